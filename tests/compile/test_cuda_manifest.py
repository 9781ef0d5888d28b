"""cuda_tilelang's refusals and its build cache; no kernel is compiled."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvhal.backends.cuda_tilelang.manifest import BACKEND
from kvhal.errors import CaptureError
from kvhal.formats import BUILTIN_FORMATS, V41_FORMAT, KVCacheFormat
from kvhal.interface import FORMAT_OPS, Op, Request
from kvhal.testing.platforms import PLATFORMS, machine

HOPPER = PLATFORMS["sm_90"]


def whats(request: Request) -> list[str]:
    return [reason.what for reason in BACKEND.why_not(request)]


@pytest.mark.parametrize("op", Op)
def test_serves_all_operations_and_built_in_formats(op: Op) -> None:
    for layout in BUILTIN_FORMATS.values() if op in FORMAT_OPS else [None]:
        assert whats(Request(op, layout, HOPPER, 64)) == []


def test_every_reason_is_given_at_once() -> None:
    odd = KVCacheFormat("e4m3", 100, 24, 0, False, "e4m3", "unspecified codec, odd sizes")
    bare = machine("cuda", "sm_80")
    have = whats(Request(Op.STORE, odd, bare, 64))
    assert have == ["architecture", "tilelang", "nvcc", "elements", "codec", "elements_per_sf"]
    assert whats(Request(Op.INDEX_CAT, None, PLATFORMS["cpu"])) == ["device", "tilelang", "nvcc"]


def test_newer_architectures_are_served() -> None:
    assert whats(Request(Op.LOAD, V41_FORMAT, PLATFORMS["sm_100"], 64)) == []
    assert whats(Request(Op.LOAD, V41_FORMAT, replace(HOPPER, arch="sm_89"), 64)) == ["architecture"]


def test_the_manifest_imports_no_language() -> None:
    code = (
        "import sys, kvhal.backends.cuda_tilelang.manifest; sys.exit(any(name in sys.modules for name in ('tilelang', 'tvm')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("tilelang")
    from kvhal.backends.cuda_tilelang import build as module

    monkeypatch.setattr(module, "_kernels", {})
    monkeypatch.setattr(module, "_building", {})
    return module


def test_a_kernel_is_built_once_by_many_threads(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    monkeypatch.setattr(build.tilelang, "compile", lambda func, **_: built.append(func) or func)
    monkeypatch.setattr(build, "_callable", lambda compiled: compiled)
    device = torch.device("cpu")

    def factory(name: int) -> int:
        return name

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda i: build.kernel(factory, i % 3, platform=HOPPER, device=device), range(60)))
    assert sorted(built) == [0, 1, 2]
    assert got == [i % 3 for i in range(60)]


def test_nothing_is_built_during_capture(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "is_capturing", lambda device: True)
    with pytest.raises(CaptureError, match="warmup"):
        build.kernel(lambda: None, platform=HOPPER, device=torch.device("cpu"))
