"""The engine against the same model without a cache: to the last bit with the same records, within a bound of bf16 ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvhal import (
    BF16_FORMAT,
    FP4_INDEX_KV_FORMAT,
    FP8_FLOAT32_SF_INDEX_KV_FORMAT,
    MXFP8_INDEX_KV_FORMAT,
    V41_FORMAT,
    V41_FP4_FORMAT,
)
from kvhal.engine import BF16_INDEX_FORMAT, BOS, Engine, EngineConfig, make_weights, no_cache_logits
from kvhal.engine.arithmetic import ACTIVATION_BITS

SMALL = EngineConfig(
    num_layers=3, window_size=12, swa_block_size=14, block_size=16, top_k=4, max_seq_len=112, max_batch=3, hidden_size=64
)
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"swa_format": BF16_FORMAT, "main_format": BF16_FORMAT, "index_format": BF16_INDEX_FORMAT},
    "fp8": {"swa_format": V41_FORMAT, "main_format": V41_FORMAT, "index_format": MXFP8_INDEX_KV_FORMAT},
    "fp8-fp32-index": {"index_format": FP8_FLOAT32_SF_INDEX_KV_FORMAT},
    "fp4": {"main_format": V41_FP4_FORMAT, "index_format": FP4_INDEX_KV_FORMAT},
    "fp4-window": {"swa_format": V41_FP4_FORMAT, "main_format": V41_FP4_FORMAT, "index_format": FP4_INDEX_KV_FORMAT},
}
#: |quantised - bf16| / |bf16| of the logits where every group is picked; 1.5 times the largest of several seeds and sizes
BOUNDS = {"bf16": 0.0, "fp8": 0.06, "fp8-fp32-index": 0.06, "fp4": 0.14, "fp4-window": 0.21}


def text(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [BOS, *torch.randint(0, 256, (count - 1,), generator=generator).tolist()]


@pytest.mark.parametrize("name", FORMATS)
def test_prefill_and_decode_equal_the_oracle_bit_by_bit(name: str) -> None:
    engine = Engine(replace(SMALL, **FORMATS[name]))
    prompt, more = text(40), text(20, seed=1)[1:]
    (sequence,), (logits,) = engine.prefill([prompt], chunk_size=11)
    steps = [engine.decode([sequence], [token])[0].clone() for token in more]
    expected = no_cache_logits(engine.config, engine.model.weights, prompt + more)
    assert torch.equal(torch.cat([logits, *steps]), expected)
    if name == "bf16":
        assert torch.equal(expected, no_cache_logits(engine.config, engine.model.weights, prompt + more, quantized=False))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("seed", [0, 1])
def test_quantisation_moves_logits_by_less_than_the_stated_bound(name: str, seed: int) -> None:
    config = replace(SMALL, **FORMATS[name], top_k=32, seed=seed)
    weights, tokens = make_weights(config), text(100)
    exact = no_cache_logits(config, weights, tokens, quantized=False)
    error = (no_cache_logits(config, weights, tokens) - exact).norm() / exact.norm()
    assert error <= BOUNDS[name]
    assert name == "bf16" or error > BOUNDS[name] / 4  # the bound is not idle


def test_generate_is_the_greedy_choice_of_the_oracle() -> None:
    engine = Engine(replace(SMALL, max_batch=2))
    prompts = [b"the first prompt is longer than a window", b"2nd"]
    for prompt, result in zip(prompts, engine.generate(prompts, 20, chunk_size=16), strict=True):
        assert result.prompt_tokens == [BOS, *prompt]
        logits = no_cache_logits(engine.config, engine.model.weights, result.prompt_tokens + result.tokens)
        assert torch.equal(result.logits, logits[len(prompt) : -1])
        assert list(result.output) == logits[len(prompt) : -1, :256].argmax(1).tolist()
    assert engine.caches.states.free == 2


def test_float32_accumulation_agrees_to_rounding() -> None:
    exact = Engine(replace(SMALL, **FORMATS["bf16"]))
    rounded = Engine(replace(SMALL, **FORMATS["bf16"], accumulate="float32"))
    tokens = text(60)
    _, (expected,) = exact.prefill([tokens], chunk_size=16)
    _, (logits,) = rounded.prefill([tokens], chunk_size=16)
    assert (logits - expected).norm() / expected.norm() < 0.02  # a bf16 record may round the other way


def test_the_oracle_is_the_model_that_plain_torch_computes() -> None:
    """The model once more in fp64 library calls, without a line of the engine: no snapped operand, no own exponential."""
    config = replace(SMALL, **FORMATS["bf16"], top_k=32, num_layers=3)
    weights, tokens = make_weights(config), text(50)
    logits = no_cache_logits(config, weights, tokens, quantized=False)
    plain = _plain_model(config, tokens)
    assert (logits - plain).abs().max() < 0.03  # bf16 records may round the other way
    assert (logits - plain).norm() / plain.norm() < 0.004
    assert torch.equal(logits.argmax(1), plain.argmax(1))


def _plain_model(config: EngineConfig, tokens: list[int]) -> Tensor:
    weights, count = make_weights(config), len(tokens)
    position = torch.arange(count)
    distance = position[:, None] - position
    x = weights.embedding[torch.tensor(tokens)].double()
    groups = count // config.ratio
    complete = (torch.arange(groups) + 1) * config.ratio <= position[:, None] + 1
    mask = torch.cat(((distance >= 0) & (distance < config.window_size), complete), 1)
    for layer, part in enumerate(weights.layers):
        h = _norm(x, part.norm)
        if part.compressor is not None:
            pooled = (h[: groups * config.ratio].view(groups, config.ratio, -1) * part.compressor.pool).sum(1)
            rows = _norm(pooled @ part.compressor.latent, part.compressor.latent_norm)
            compressed = _rotate(rows, position[:: config.ratio][:groups], config).bfloat16().double()
        rows = _norm(h @ part.latent, part.latent_norm)
        keys = torch.cat((_rotate(rows, position, config).bfloat16().double(), compressed))
        queries = _norm((h @ part.query).view(count, config.num_heads, -1), part.query_norm).transpose(0, 1)
        queries = _rotate(queries, position, config)
        values = torch.nn.functional.scaled_dot_product_attention(queries, keys, keys[:, : config.value_size], mask)
        x = x + values.transpose(0, 1).flatten(1) @ part.output
        h = _norm(x, part.ffn_norm)
        x = x + (torch.nn.functional.silu(h @ part.gate) * (h @ part.up)) @ part.down
        assert layer or part.compressor is not None
    return (_norm(x, weights.norm) @ weights.head).float()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight.double(), 1e-6)


def _rotate(x: Tensor, position: Tensor, config: EngineConfig) -> Tensor:
    """Rotation as a complex product over adjacent pairs of the last elements."""
    head, tail = x[..., : -config.rope_dim], x[..., -config.rope_dim :]
    half = config.rope_dim // 2
    angle = position[:, None] * config.rope_base ** (-torch.arange(half).double() / half)
    pairs = torch.view_as_complex(tail.reshape(*tail.shape[:-1], half, 2)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((head, torch.view_as_real(pairs).flatten(-2)), -1)


def test_the_oracle_takes_no_tokens() -> None:
    assert no_cache_logits(SMALL, make_weights(SMALL), []).shape == (0, 257)
    assert ACTIVATION_BITS == 16  # what the tolerances above were measured with
