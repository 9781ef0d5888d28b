"""Planning held to slow, obvious loops, and to what it is for: reading back exactly what was stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvhal import plan

Draw = Any


@st.composite
def batches(draw: Draw, max_sequences: int = 5, max_tokens: int = 40) -> tuple[list[int], list[int]]:
    """(seqlens_k, seqlens_q)"""
    k = draw(st.lists(st.integers(0, max_tokens), max_size=max_sequences))
    return k, [draw(st.integers(0, tokens)) for tokens in k]


@st.composite
def tables(draw: Draw, tokens: list[int], block_size: int) -> torch.Tensor:
    """Shuffled unique blocks where a sequence needs them, -1 elsewhere, as a slice of something wider."""
    need = [-(-n // block_size) for n in tokens]
    width = max(need, default=0) + draw(st.integers(0, 2))
    blocks = draw(st.permutations(range(sum(need) + 2)))
    storage = torch.full((len(tokens), width + 3), -9, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    table = storage[:, 1 : width + 1]
    table.fill_(-1)
    for i, n in enumerate(need):
        table[i, :n] = torch.tensor(blocks[sum(need[:i]) : sum(need[:i]) + n])
    return table


def expand(segments: torch.Tensor) -> list[tuple[int, int]]:
    """(block, offset) of each output row; checks that rows are covered once and in order."""
    out: list[tuple[int, int]] = []
    for block, begin, end, dst in segments.tolist():
        assert dst == len(out)
        assert begin < end
        out += [(block, offset if block >= 0 else -1) for offset in range(begin, end)]
    return out


@given(st.data(), st.integers(1, 9))
def test_builder(data: st.DataObject, size: int) -> None:
    builder, expected = plan.BlockLoadPlanBuilder(size), []
    for kind in data.draw(st.lists(st.sampled_from(["segment", "zero", "paged", "ring"]), max_size=6)):
        if kind == "segment":
            block = data.draw(st.integers(-1, 9))
            begin, end = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
            builder.append_segment(block, begin, end)
            expected += [(block, t if block >= 0 else -1) for t in range(begin, end)]
        elif kind == "zero":
            n = data.draw(st.integers(0, 30))
            builder.append_zero_fill(n)
            expected += [(-1, -1)] * n
        elif kind == "paged":
            table = data.draw(st.lists(st.integers(0, 99), max_size=6))
            bounds = st.integers(0, len(table) * size)
            begin, end = sorted(data.draw(st.tuples(bounds, bounds)))
            builder.append_paged_range(table, begin, end)
            expected += [(table[t // size], t % size) for t in range(begin, end)]
        else:
            begin = data.draw(st.integers(0, 50))
            end = begin + data.draw(st.integers(0, size))
            builder.append_ring_range(4, begin, end)
            expected += [(4, t % size) for t in range(begin, end)]
    built = builder.build()
    assert expand(built.segments) == expected
    assert built.total_k == len(expected)
    assert all(end - begin <= size for _, begin, end, _ in built.segments.tolist())


@given(st.data(), batches(), st.integers(1, 6), st.integers(1, 5))
def test_compressed_plan_and_slots(data: st.DataObject, batch: tuple[list[int], list[int]], per_block: int, ratio: int) -> None:
    (k, q), block_size = batch, per_block * ratio
    table = data.draw(tables([n // ratio for n in k], per_block))
    built = plan.build_compressed_load_plan(k, table, block_size=block_size, ratio=ratio)
    expected, cu = [], [0]
    for i, n in enumerate(k):
        expected += [(int(table[i, t // per_block]), t % per_block) for t in range(n // ratio)]
        if n < ratio:
            expected.append((-1, -1))
        cu.append(len(expected))
    assert expand(built.segments) == expected
    assert built.total_k == len(expected)
    assert built.cu_compressed_seqlens.tolist() == cu
    assert len(built.segments) == sum(max(1, -(-(n // ratio) // per_block)) for n in k)

    slots = []
    for i in range(len(k)):
        for p in range(k[i] - q[i], k[i]):
            token = p // ratio
            done = p % ratio == ratio - 1
            slots.append(int(table[i, token // per_block]) * per_block + token % per_block if done else -1)
    mapping = plan.build_compressed_slot_mapping(k, q, table, block_size=block_size, ratio=ratio)
    assert mapping.tolist() == slots
    assert mapping.dtype == torch.int32
    if ratio == 1:
        assert plan.build_paged_slot_mapping(k, q, table, block_size=block_size).tolist() == slots


@given(st.data(), batches(), st.integers(1, 12), st.integers(0, 8))
def test_swa_plan_slots_and_pivots(data: st.DataObject, batch: tuple[list[int], list[int]], window: int, extra: int) -> None:
    (k, q), ring = batch, window + extra
    states = data.draw(st.permutations(range(len(k))))
    valid = [data.draw(st.integers(-3, n + 3)) for n in k]
    built = plan.build_swa_load_plan(k, q, states, window_size=window, swa_block_size=ring, swa_valid_starts=valid)
    history, slots, pivots = [], [], []
    chunk_row = len(k) * window
    for i in range(len(k)):
        start = k[i] - q[i]
        for p in range(start - window, start):
            history.append((states[i], p % ring) if p >= max(valid[i], 0) else (-1, -1))
        for p in range(start, k[i]):
            slots.append(states[i] * ring + p % ring if k[i] - p <= ring else -1)
            seen = list(range(max(p - window + 1, valid[i], 0), p + 1))
            pivots.append(
                [i * window + window - start + t for t in seen if t < start]
                + [chunk_row + t - start for t in seen if t >= start]
            )
        chunk_row += q[i]
    assert expand(built.segments) == history
    assert built.total_k == len(k) * window
    assert len(built.segments) <= 3 * len(k)
    assert plan.build_swa_slot_mapping(k, q, states, swa_block_size=ring).tolist() == slots
    table = plan.build_prefill_swa_pivots(k, q, window_size=window, swa_valid_starts=valid)
    assert table.dtype == torch.int32
    assert [[*range(a, a + m), *range(b, b + n)] for a, m, b, n in table.tolist()] == pivots


@given(st.data(), batches(), st.integers(1, 12), st.integers(0, 8))
def test_decode_index(data: st.DataObject, batch: tuple[list[int], list[int]], window: int, extra: int) -> None:
    k, q = batch
    ring = window + max([n - 1 for n in q if n], default=0) + extra
    states = data.draw(st.permutations(range(len(k))))
    valid = [data.draw(st.integers(-3, n + 3)) for n in k]
    index = plan.build_decode_swa_index(k, states, window_size=window, swa_block_size=ring, seqlens_q=q, swa_valid_starts=valid)
    expected = []
    for i in range(len(k)):
        for p in range(k[i] - q[i], k[i]):
            seen = range(max(p - window + 1, valid[i], 0), p + 1)
            expected.append([states[i] * ring + t % ring for t in seen])
    slots = [[s // ring * ring + (s % ring + n) % ring for n in range(length)] for s, length in index.tolist()]
    assert slots == expected
    assert index.dtype == torch.int32


@given(st.data(), st.integers(1, 8), st.integers(0, 5), st.integers(1, 40))
def test_chunked_prefill_sees_the_same_tokens_as_one_pass(data: st.DataObject, window: int, extra: int, tokens: int) -> None:
    """Load, look, store, chunk after chunk, with positions for records: each query finds its window's positions."""
    ring = window + extra
    cache = np.full((2, ring), -7)
    k = 0
    while k < tokens:
        q = data.draw(st.integers(1, tokens - k))
        k += q
        built = plan.build_swa_load_plan([k], [q], [1], window_size=window, swa_block_size=ring)
        loaded = [cache[block, offset] if block >= 0 else -1 for block, offset in expand(built.segments)]
        buffer = np.array(loaded + list(range(k - q, k)))
        pivots = plan.build_prefill_swa_pivots([k], [q], window_size=window).tolist()
        for p, (a, m, b, n) in zip(range(k - q, k), pivots, strict=True):
            assert [*buffer[a : a + m], *buffer[b : b + n]] == list(range(max(0, p - window + 1), p + 1))
        slots = plan.build_swa_slot_mapping([k], [q], [1], swa_block_size=ring).numpy()
        assert len(set(slots[slots >= 0])) == (slots >= 0).sum()
        cache.reshape(-1)[slots[slots >= 0]] = np.arange(k - q, k)[slots >= 0]
        start, length = plan.build_decode_swa_index([k], [1], window_size=window, swa_block_size=ring)[0].tolist()
        seen = [cache[1, (start % ring + n) % ring] for n in range(length)]
        assert seen == list(range(max(0, k - window), k))


@given(st.lists(st.integers(0, 30), max_size=5), st.integers(1, 5))
def test_mirror_index(lengths: list[int], cp: int) -> None:
    expected: list[list[int]] = [[] for _ in range(cp)]
    first = 0
    for n in lengths:
        chunk = -(-n // (2 * cp))
        padded = [first + t if t < n else -1 for t in range(2 * cp * chunk)]
        for rank in range(cp):
            for c in (rank, 2 * cp - 1 - rank):
                expected[rank] += padded[c * chunk : (c + 1) * chunk]
        first += n
    index = plan.mirror_cp_index(lengths, cp)
    assert index.tolist() == expected
    assert index.dtype == torch.int32
    reverse = plan.mirror_cp_reverse_index(lengths, cp)
    assert reverse.dtype == torch.int32
    assert index.flatten()[reverse.long()].tolist() == list(range(first))
