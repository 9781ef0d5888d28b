"""The engine on every backend by configuration alone: equal tokens, logit bits and cache bytes under each file of configs/."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvhal
from kvhal.engine import Engine, EngineConfig, Generation
from kvhal.interface import FORMAT_OPS
from kvhal.testing.platforms import PLATFORMS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
#: the least that has two layers, ring wraps, several blocks and chunks, and picks to choose from: kernels are simulated
TINY = EngineConfig(
    num_layers=2,
    hidden_size=32,
    ffn_size=32,
    num_heads=1,
    index_heads=1,
    window_size=6,
    swa_block_size=8,
    block_size=8,
    top_k=2,
    max_seq_len=32,
    max_batch=2,
)
PROMPTS, NEW_TOKENS, CHUNK = [b"a text, bytes", b"2"], 2, 9
HERE = {"reference": "reference_torch", "auto": "reference_torch", "triton": "portable_triton", "ascend": "ascend_tilelang"}
GPU = {
    "reference": ("reference_torch",),
    "triton": ("portable_triton",),
    "h100": ("cuda_tilelang", "portable_triton"),
    "auto": ("cuda_tilelang", "portable_triton"),
}


def run(device: str) -> tuple[list[Generation], dict[str, Tensor]]:
    engine = Engine(TINY, device)
    generations = engine.generate(PROMPTS, NEW_TOKENS, CHUNK)
    return generations, {name: cache.cpu() for name, cache in engine.caches.tensors().items()}


@lru_cache(maxsize=1)
def expected() -> tuple[list[Generation], dict[str, Tensor]]:
    with kvhal.use_backend("reference_torch"):
        return run("cpu")


def serving(device: str) -> set[str]:
    """Who serves the engine's operations under the configuration in force; skips where nothing does."""
    found = set()
    for op in kvhal.Op:
        for layout in (TINY.swa_format, TINY.index_format) if op in FORMAT_OPS else (None,):
            decision = kvhal.explain(op, layout=layout, device=device)
            if decision.chosen is None:
                pytest.skip(str(decision))
            found.add(decision.chosen)
    return found


def check(device: str) -> None:
    generations, caches = run(device)
    wanted, wanted_caches = expected()
    for have, need in zip(generations, wanted, strict=True):
        assert have.tokens == need.tokens
        assert torch.equal(have.logits.cpu().view(torch.int32), need.logits.view(torch.int32))
    assert caches.keys() == wanted_caches.keys()
    for name, cache in caches.items():
        assert torch.equal(cache, wanted_caches[name]), name


@pytest.mark.parametrize("name", HERE)
def test_a_file_chooses_the_backend_and_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected()
    monkeypatch.setenv("KVHAL_CONFIG", str(CONFIGS / f"{name}.toml"))
    if name == "ascend":
        kvhal.configure(simulate=True)  # the file is written for hardware; this is its one other setting
    assert serving("cpu") == {HERE[name]}
    check("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU)
def test_a_file_chooses_the_backend_of_a_gpu_and_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected()
    monkeypatch.setenv("KVHAL_CONFIG", str(CONFIGS / f"{name}.toml"))
    assert serving("cuda") <= set(GPU[name])
    check("cuda")


def test_a_file_for_a_gpu_is_an_error_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHAL_CONFIG", str(CONFIGS / "h100.toml"))
    decision = kvhal.explain("expand_swa_index", platform=PLATFORMS["cpu"])
    assert decision.chosen is None
    assert "reference_torch: preference: has only cuda_tilelang, portable_triton" in str(decision)


def test_every_file_is_tested() -> None:
    assert {path.stem for path in CONFIGS.glob("*.toml")} == {*HERE, *GPU}
