"""The engine on a CUDA device: the CPU's tokens, logits and cache bytes, and whole decode steps as one captured graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kvhal
from kvhal.engine import BOS, Engine, EngineConfig, no_cache_logits
from kvhal.interface import FORMAT_OPS
from kvhal.registry import backends

SMALL = EngineConfig(num_layers=4, window_size=12, swa_block_size=14, block_size=16, top_k=4, max_seq_len=160, max_batch=3)
FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {},
    "fp4": {"main_format": kvhal.V41_FP4_FORMAT, "index_format": kvhal.FP4_INDEX_KV_FORMAT},
}

pytestmark = pytest.mark.gpu


def text(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [BOS, *torch.randint(0, 256, (count - 1,), generator=generator).tolist()]


def need(backend: str, config: EngineConfig) -> None:
    for op in kvhal.Op:
        for layout in (config.swa_format, config.main_format, config.index_format) if op in FORMAT_OPS else (None,):
            with kvhal.use_backend(backend):
                decision = kvhal.explain(op, layout=layout, device="cuda")
            if decision.chosen is None:
                pytest.skip(str(decision))


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("backend", list(backends()))
def test_a_cuda_device_gives_the_bits_of_the_cpu(backend: str, formats: str) -> None:
    config = replace(SMALL, **FORMATS[formats])
    need(backend, config)
    prompts = [bytes(text(length, length)[1:]) for length in (70, 3, 31)]
    here, there = Engine(config), Engine(config, "cuda")
    expected = here.generate(prompts, 20, chunk_size=16)
    with kvhal.use_backend(backend):
        results = there.generate(prompts, 20, chunk_size=27)
    for have, want in zip(results, expected, strict=True):
        assert have.tokens == want.tokens
        assert torch.equal(have.logits.cpu(), want.logits)
    for name, cache in there.caches.tensors().items():
        if "swa" in name:  # blocks of the other caches are taken in the order of the chunks
            assert torch.equal(cache.cpu(), here.caches.tensors()[name]), name


@pytest.mark.parametrize("backend", list(backends()))
def test_a_captured_decode_step_replays_with_new_metadata(backend: str) -> None:
    need(backend, SMALL)
    prompts, steps = [text(30, 1), text(5, 2)], 64
    with kvhal.use_backend(backend):
        engine = Engine(SMALL, "cuda")
        sequences, logits = engine.prefill(prompts)
        tokens = torch.stack([rows[-1, :256].argmax() for rows in logits])
        spoken = [tokens]
        _, tokens = engine.decode(sequences, tokens)  # builds every kernel
        spoken.append(tokens.clone())
        decoder, graph = engine.decoder(2), torch.cuda.CUDAGraph()
        pending = {layer: source.pending.clone() for layer, source in engine.caches.sources.items()}
        with torch.no_grad(), torch.cuda.graph(graph):
            decoder.step()
        assert all(torch.equal(source.pending, pending[layer]) for layer, source in engine.caches.sources.items())
        for _ in range(steps):
            engine.caches.reserve(sequences, [1, 1])
            decoder.plan(sequences, decoder.next_tokens)
            graph.replay()
            for sequence in sequences:
                sequence.length += 1
            spoken.append(decoder.next_tokens.clone())
    for row, prompt in enumerate(prompts):
        said = [int(step[row]) for step in spoken]
        exact = no_cache_logits(SMALL, engine.model.weights, prompt + said[:-1])[len(prompt) - 1 :]
        assert said == exact[:, :256].argmax(1).tolist()
        assert torch.equal(decoder.logits[row], exact[-1])
