"""The packed path of the fused store, with stand-ins for its PTX, against the reference: every lane's part in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvhal.backends.reference_torch.manifest import BACKEND as REFERENCE
from kvhal.formats import (
    FP4_INDEX_KV_FORMAT,
    FP8_FLOAT32_SF_INDEX_KV_FORMAT,
    MXFP8_INDEX_KV_FORMAT,
    V41_FORMAT,
    V41_FP4_FORMAT,
    KVCacheFormat,
)
from kvhal.interface import HadamardArgs, Launcher, NormArgs, Op, Request, RopeArgs
from kvhal.layout import alloc_kv_cache
from kvhal.platform import detect

pytest.importorskip("triton")
ROWS = 7
CACHE = object()


LAYOUTS = (
    V41_FORMAT,
    MXFP8_INDEX_KV_FORMAT,
    FP8_FLOAT32_SF_INDEX_KV_FORMAT,
    V41_FP4_FORMAT,
    FP4_INDEX_KV_FORMAT,
)


@pytest.fixture
def _packed(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU runs the PTX itself: test_gpu.py")
    from kvhal.backends.portable_triton import fused, packed, packed_e2m1, stages, store
    from tests.triton.stand_ins import REPLACED

    for module in (fused, packed, packed_e2m1, stages):
        for function in REPLACED[module.__name__.rpartition(".")[2]]:
            monkeypatch.setattr(module, function.fn.__name__, function)
    for module in (fused, store):
        monkeypatch.setattr(module, "by_pairs", lambda record: replace(record, pairs=True))
        monkeypatch.setattr(module, "launch_shape", lambda *_: (4, 1))
    monkeypatch.setattr(store, "packed_store", lambda record: True)


def rows_of_every_kind(layout: KVCacheFormat, random: torch.Generator) -> torch.Tensor:
    """bf16 rows from tiny to huge, with Inf, NaN, zeros and -0 among them."""
    rows = torch.randn((ROWS, layout.elements), generator=random) * torch.exp2(torch.arange(ROWS)[:, None] * 13.0 - 40)
    rows[1, 5::9], rows[2, 7], rows[3], rows[4, 100] = float("inf"), float("nan"), 0.0, -float("inf")
    rows[5, ::3] = -0.0
    return rows.bfloat16()


def written(bind: Callable[..., Launcher], request: Request, arguments: tuple[Any, ...]) -> torch.Tensor:
    """All bytes of a poisoned cache after a call with these arguments around the cache."""
    cache = alloc_kv_cache(4, 3, request.layout, "cpu")
    cache.view(torch.uint8).fill_(0xA5)
    bind(request)(*(cache if argument is CACHE else argument for argument in arguments))
    return cache.view(torch.uint8)


@pytest.mark.usefixtures("_packed")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_packed_rows(layout: KVCacheFormat) -> None:
    from kvhal.backends.portable_triton import fused, store

    random = torch.Generator().manual_seed(5)
    rows = rows_of_every_kind(layout, random)
    rope = RopeArgs(torch.tensor([3, 0, 8, -1, 1, 9, 4]), torch.rand((9, 64), generator=random), 64)
    norm = NormArgs(torch.randn(layout.elements, generator=random).bfloat16())
    hadamard = HadamardArgs() if layout.is_index else None
    slots = torch.tensor([4, -1, 0, 11, 12, 2**40, 7])
    platform = detect("cpu")
    for op, bind, arguments in (
        (Op.STORE, store.bind_store, (rows, CACHE, slots)),
        (Op.FUSED_STORE, fused.bind_fused_store, (rows, None, rope, None, CACHE, slots, None)),
        (Op.FUSED_STORE, fused.bind_fused_store, (rows, norm, rope, hadamard, CACHE, slots, None)),
    ):
        request = Request(op, layout, platform, 3)
        assert torch.equal(written(bind, request, arguments), written(REFERENCE.bind, request, arguments)), op
