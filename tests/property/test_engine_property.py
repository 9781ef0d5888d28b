"""Any lengths, chunks and sizes: the engine equals the model without a cache, bit by bit."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhal import BF16_FORMAT, FP4_INDEX_KV_FORMAT, MXFP8_INDEX_KV_FORMAT, V41_FORMAT, V41_FP4_FORMAT
from kvhal.engine import Engine, EngineConfig, no_cache_logits


@st.composite
def cases(draw: st.DrawFn) -> tuple[EngineConfig, list[list[int]], list[list[int]], int]:
    ratio, window = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    config = EngineConfig(
        num_layers=2,
        layers_per_group=draw(st.integers(1, 2)),
        hidden_size=32,
        ffn_size=32,
        num_heads=1,
        index_heads=1,
        rope_dim=16,
        window_size=window,
        swa_block_size=window + draw(st.integers(0, 4)),
        ratio=ratio,
        block_size=ratio * draw(st.integers(1, 3)),
        top_k=draw(st.integers(1, 5)),
        max_seq_len=40,
        max_batch=3,
        swa_format=draw(st.sampled_from([V41_FORMAT, BF16_FORMAT])),
        main_format=draw(st.sampled_from([V41_FORMAT, V41_FP4_FORMAT])),
        index_format=draw(st.sampled_from([MXFP8_INDEX_KV_FORMAT, FP4_INDEX_KV_FORMAT])),
        seed=draw(st.integers(0, 3)),
    )
    tokens = st.lists(st.integers(0, 256), max_size=33)
    prompts = draw(st.lists(tokens, min_size=1, max_size=3))
    steps = draw(st.lists(st.lists(st.integers(0, 256), min_size=len(prompts), max_size=len(prompts)), max_size=7))
    return config, prompts, steps, draw(st.integers(1, 20))


@settings(max_examples=15, deadline=None)
@given(cases())
def test_the_engine_equals_the_model_without_a_cache(
    case: tuple[EngineConfig, list[list[int]], list[list[int]], int],
) -> None:
    config, prompts, steps, chunk = case
    engine = Engine(config)
    sequences, logits = engine.prefill(prompts, chunk_size=chunk)
    rows = [engine.decode(sequences, tokens)[0].clone() for tokens in steps]
    for i, prompt in enumerate(prompts):
        have = torch.cat([logits[i], *(row[i : i + 1] for row in rows)])
        need = no_cache_logits(config, engine.model.weights, prompt + [tokens[i] for tokens in steps])
        assert torch.equal(have, need)
