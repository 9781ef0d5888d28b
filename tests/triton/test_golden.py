"""The golden tables, made by an independent implementation, through the kernels; and what the manifest says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import kvhal
from kvhal.backends.portable_triton.manifest import BACKEND
from kvhal.formats import BF16_MAGNITUDE, BUILTIN_FORMATS, SUPPORTED_KV_CACHE_FORMATS, KVCacheFormat
from kvhal.interface import Op, Request
from kvhal.layout import alloc_kv_cache, split_kv_cache
from kvhal.testing.platforms import PLATFORMS, machine

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 96  #: of each table, from all its parts: the interpreter takes a while; a GPU gets them all


@pytest.mark.parametrize("layout", SUPPORTED_KV_CACHE_FORMATS, ids=str)
def test_golden_rows(layout: KVCacheFormat) -> None:
    pytest.importorskip("triton")
    table = np.load(GOLDEN / f"{layout}.npz")
    count = len(table["x"]) if DEVICE == "cuda" else ROWS
    chosen = np.linspace(0, len(table["x"]) - 1, count).astype(int)
    rows = torch.from_numpy(table["x"][chosen].view(np.int16)).view(torch.bfloat16).to(DEVICE)
    cache = alloc_kv_cache(-(-count // 33), 33, layout, DEVICE)
    slots = torch.arange(count, device=DEVICE)
    with kvhal.use_backend("portable_triton"):
        kvhal.store_kv_cache(rows, cache, slots, layout=layout)
        back = kvhal.load_kv_slots(cache, slots, layout=layout)
    data, sf = (part.cpu().view(torch.uint8).flatten(0, 1)[:count].numpy() for part in split_kv_cache(cache, layout))
    assert np.array_equal(data, table["data"][chosen])
    assert np.array_equal(sf, table["sf"][chosen].view(np.uint8).reshape(sf.shape))
    have, need = back.cpu().view(torch.int16).numpy().view(np.uint16), table["back"][chosen]
    nan = (need & BF16_MAGNITUDE) > 0x7F80
    assert np.array_equal(have[~nan], need[~nan]) and (have[nan] == 0x7FFF).all()


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950", "cpu+interpreter"])
def test_every_operation_is_served(name: str) -> None:
    for op in Op:
        for layout in BUILTIN_FORMATS.values():
            assert BACKEND.why_not(Request(op, layout, PLATFORMS[name], 64)) == ()


def test_all_reasons_are_given() -> None:
    odd = KVCacheFormat("e2m1", 30, 15, 0, True, "fp32", "", token_interleaved=True)
    reasons = BACKEND.why_not(Request(Op.FUSED_STORE, odd, machine("cuda", "sm_75"), 64))
    assert {reason.what for reason in reasons} == {
        "triton",
        "architecture",
        "codec",
        "scale group",
        "scale group of a fused store",
    }
    assert {reason.what for reason in BACKEND.why_not(Request(Op.STORE, None, machine("npu", "x", "triton"), 64))} == {"device"}
    cpu = BACKEND.why_not(Request(Op.STORE, None, machine("cpu", "x86_64", "triton"), 64))
    assert [reason.need for reason in cpu] == ["TRITON_INTERPRET=1"]
