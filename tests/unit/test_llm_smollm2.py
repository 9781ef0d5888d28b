"""SmolLM2-135M-Instruct itself; skipped where `scripts/get-model` has not been run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvhal.llm import KV_FORMATS, Generation, Model, PagedCache, load_model, parse_kv_format, perplexity
from kvhal.llm.decode import DecodeBatch
from kvhal.llm.fetch import default_model_path
from kvhal.llm.model import dense_attention

if not default_model_path().is_file():
    pytest.skip(f"no model at {default_model_path()}: run scripts/get-model", allow_module_level=True)
pytest.importorskip("gguf", reason="gguf is not installed: pip install 'kvhal[llm]'")

TEXT = (Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="utf-8").strip("\n")


@pytest.fixture(scope="module")
def loaded() -> tuple[Model, Any]:
    return load_model()


def test_the_shape_is_the_models(loaded: tuple[Model, Any]) -> None:
    config = loaded[0].config
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.rope_base == 100000.0 and config.record_elements == 384


@pytest.mark.parametrize(("name", "known", "noise"), [("bf16", 14.20, 0.02), ("fp8", 14.19, 0.06)])
def test_perplexity_is_the_known_one(loaded: tuple[Model, Any], name: str, known: float, noise: float) -> None:
    """Known from an independent computation; how far rounding alone moves it is in docs/llm.md."""
    model, tokenizer = loaded
    layout = parse_kv_format(name, 384)
    result = perplexity(model, layout, tokenizer.encode(TEXT)[:1024])
    assert result.perplexity == pytest.approx(known, abs=noise)
    assert result.bytes_per_token == 30 * layout.bytes_per_token


@torch.inference_mode()
def test_decoding_equals_the_full_pass_at_every_position() -> None:
    """Every next token, in float64: float32 leaves rounding that decides between near ties.

    All positions in one batch: sequence i has the first 16 * i tokens in shared blocks, and decodes the next 16 into its own.
    """
    tokens, size = 256, 16
    model, tokenizer = load_model(dtype=torch.float64)
    text = torch.tensor(tokenizer.encode(TEXT)[:tokens])
    cache = PagedCache(30, 2 * tokens // size, size, parse_kv_format("bf16", 384), "cpu")
    shared, own = cache.reserve([tokens]), cache.reserve([size] * (tokens // size))
    slots = (torch.from_numpy(shared).view(-1, 1) * size + torch.arange(size, dtype=torch.int32)).flatten()
    dense = dense_attention(model.config)

    def attend(layer: int, queries: Tensor, records: Tensor) -> Tensor:
        cache.store(layer, records, slots)
        return dense(layer, queries, records)

    expected = model.logits(model.hidden(text, torch.arange(tokens), attend)).argmax(-1)
    tables = shared.repeat(len(own), 0)
    tables[range(len(own)), range(len(own))] = own[:, 0]
    columns = text.view(len(own), size)
    decoder = DecodeBatch(model, cache, tables, range(0, tokens, size), columns[:, 0])
    got = []
    for step in range(size):
        decoder.tokens.copy_(columns[:, step])
        decoder.step()
        got.append(decoder.tokens.clone())
    assert torch.equal(torch.stack(got, 1).flatten(), expected)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_it_knows_the_capital_of_france(loaded: tuple[Model, Any], name: str) -> None:
    model, tokenizer = loaded
    prompt = tokenizer.encode_chat("What is the capital of France? Answer in one sentence.")
    cache = PagedCache(30, 4, 16, parse_kv_format(name, 384), "cpu")
    answer = [token for (token,) in Generation(model, cache).run([prompt], 10, tokenizer.stop) if token is not None]
    assert "Paris" in tokenizer.decode(answer)
