"""Logits depend on the tokens before them and on nothing else; compared bit by bit, caches byte by byte."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from kvhal.engine import BOS, Engine, EngineConfig, no_cache_logits

SMALL = EngineConfig(
    num_layers=2, window_size=12, swa_block_size=14, block_size=16, top_k=4, max_seq_len=128, max_batch=4, hidden_size=64
)
LENGTHS = (50, 2, 29, 3)  # two of them shorter than a group


def text(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [BOS, *torch.randint(0, 256, (count - 1,), generator=generator).tolist()]


TEXTS = [text(length, seed) for seed, length in enumerate(LENGTHS)]


@lru_cache(maxsize=1)
def expected() -> list[Tensor]:
    weights = Engine(SMALL).model.weights
    return [no_cache_logits(SMALL, weights, tokens) for tokens in TEXTS]


@pytest.mark.parametrize("chunk", [1, 7, 13, 14, 15, 50])
def test_chunk_size_changes_no_bit(chunk: int) -> None:
    """1; not a multiple of the ratio; window + 1; the ring; more than the ring; everything at once."""
    _, logits = Engine(SMALL).prefill(TEXTS, chunk_size=chunk)
    assert all(torch.equal(have, need) for have, need in zip(logits, expected(), strict=True))


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_chunk_size_changes_no_byte_of_any_cache(chunk: int) -> None:
    tokens = TEXTS[0]
    one, other = Engine(SMALL), Engine(SMALL)
    one.prefill([tokens], chunk_size=16)
    other.prefill([tokens], chunk_size=chunk)
    for name, cache in one.caches.tensors().items():
        assert torch.equal(cache, other.caches.tensors()[name]), name


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (1, 0, 3, 2), (2, 3, 0, 1)])
def test_batch_order_changes_no_bit(order: tuple[int, ...]) -> None:
    engine = Engine(SMALL)
    sequences, logits = engine.prefill([TEXTS[i] for i in order], chunk_size=16)
    assert all(torch.equal(have, expected()[i]) for have, i in zip(logits, order, strict=True))
    steps, chosen = engine.decode(sequences, [7] * 4)
    for row, i in enumerate(order):
        last = no_cache_logits(SMALL, engine.model.weights, [*TEXTS[i], 7])[-1]
        assert torch.equal(steps[row], last)
        assert chosen[row] == last[:256].argmax()


def test_a_batch_is_its_sequences_alone() -> None:
    engine = Engine(SMALL)
    for tokens, need in zip(TEXTS, expected(), strict=True):
        (sequence,), (logits,) = engine.prefill([tokens], chunk_size=9)
        assert torch.equal(logits, need)
        engine.release([sequence])


def test_decode_batches_may_change_between_steps() -> None:
    engine = Engine(SMALL)
    sequences, _ = engine.prefill(TEXTS, chunk_size=32)
    appended: list[list[int]] = [[] for _ in TEXTS]
    for step, alive in enumerate([(0, 1, 2, 3), (2, 0), (3, 1, 0), (1,), (0, 2, 3), (1, 2)]):
        logits, _ = engine.decode([sequences[i] for i in alive], [10 * step + i for i in alive])
        for row, i in enumerate(alive):
            appended[i].append(10 * step + i)
            need = no_cache_logits(SMALL, engine.model.weights, TEXTS[i] + appended[i])[-1]
            assert torch.equal(logits[row], need)


@pytest.mark.parametrize("ratio", [1, 3, 5])
def test_long_decode_across_ring_wraps_equals_prefill(ratio: int) -> None:
    """From nothing at all: pending groups, the first group, the first block and four turns of the ring, one token at a time."""
    config = replace(SMALL, ratio=ratio, block_size=15, swa_block_size=12, max_batch=1)
    engine = Engine(config)
    sequence = engine.caches.open()
    logits = torch.cat([engine.decode([sequence], [token])[0].clone() for token in TEXTS[0]])
    assert torch.equal(logits, no_cache_logits(config, engine.model.weights, TEXTS[0]))


def test_block_order_changes_no_bit() -> None:
    engine = Engine(SMALL)
    random.Random(0).shuffle(engine.caches.blocks._free)
    sequences, logits = engine.prefill(TEXTS, chunk_size=8)
    assert sequences[0].blocks != sorted(sequences[0].blocks)
    assert all(torch.equal(have, need) for have, need in zip(logits, expected(), strict=True))


def test_used_blocks_and_rings_leak_nothing() -> None:
    """A pool of exactly one batch, so that the second batch gets the first one's blocks, rings and pending rows."""
    engine = Engine(replace(SMALL, num_blocks=6))
    first, _ = engine.prefill([text(length, 50) for length in (40, 10, 20)], chunk_size=16)
    engine.release(first)
    _, logits = engine.prefill(TEXTS[:3], chunk_size=16)
    assert all(torch.equal(have, need) for have, need in zip(logits, expected(), strict=False))


def test_empty_chunks_and_sequences() -> None:
    engine = Engine(SMALL)
    sequences = [engine.caches.open() for _ in range(3)]
    assert [rows.shape[0] for rows in engine.prefill_chunk(sequences, [[], [], []])] == [0, 0, 0]
    first = engine.prefill_chunk(sequences, [TEXTS[0][:20], [], TEXTS[2][:5]])
    second = engine.prefill_chunk(sequences, [[], TEXTS[1], TEXTS[2][5:]])
    third = engine.prefill_chunk(sequences, [TEXTS[0][20:], [], []])
    for row, i in enumerate((0, 1, 2)):
        rows = torch.cat([first[row], second[row], third[row]])
        assert torch.equal(rows, expected()[i])
    assert engine.prefill([], chunk_size=3) == ([], [])
    (opened,), (logits,) = engine.prefill([[]])
    assert (opened.length, logits.shape) == (0, (0, 257))


@pytest.mark.parametrize("top_k", [1, 15, 100])
def test_top_k_up_to_more_than_there_are(top_k: int) -> None:
    config = replace(SMALL, top_k=top_k)
    engine = Engine(config)
    (sequence,), (logits,) = engine.prefill([TEXTS[0][:-1]], chunk_size=16)
    last, _ = engine.decode([sequence], TEXTS[0][-1:])
    assert torch.equal(torch.cat((logits, last)), no_cache_logits(config, engine.model.weights, TEXTS[0]))
