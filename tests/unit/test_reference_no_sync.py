"""No launcher of reference_torch reads a tensor's value on the host: they run on meta tensors, which have none.

That is what CUDA-graph capture needs (tests/gpu captures for real).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvhal.backends.reference_torch.manifest import BACKEND
from kvhal.formats import BUILTIN_FORMATS, KVCacheFormat
from kvhal.interface import HadamardArgs, NormArgs, Op, Request, RopeArgs
from kvhal.layout import DATA_DTYPES, alloc_kv_cache, sf_output
from kvhal.platform import Platform

LAYOUTS = list(BUILTIN_FORMATS.values())


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def bind(op: Op, layout: KVCacheFormat | None = None) -> Any:
    return BACKEND.bind(Request(op, layout, Platform("meta", "")))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_cache_operations(layout: KVCacheFormat) -> None:
    cache = alloc_kv_cache(4, 16, layout, "meta")
    kv = meta(9, layout.elements, dtype=torch.bfloat16)
    bind(Op.STORE, layout)(kv, cache, meta(9, dtype=torch.int64))
    norm = NormArgs(meta(layout.elements, dtype=torch.float32))
    rotary = RopeArgs(meta(9), meta(20, 64, dtype=torch.float32), 64)
    bind(Op.FUSED_STORE, layout)(kv, norm, rotary, HadamardArgs(), cache, meta(9), torch.empty_like(kv))
    if layout.is_index:
        dtype, tail = sf_output(layout)
        out, sf = meta(12, layout.data_bytes, dtype=DATA_DTYPES[layout.quantized_dtype]), meta(12, *tail, dtype=dtype)
        bind(Op.LOAD, layout)(cache, meta(5, 4), 12, out, sf)
    else:
        bind(Op.LOAD, layout)(cache, meta(5, 4), 12, meta(12, layout.elements, dtype=torch.bfloat16), None)
        bind(Op.LOAD_SLOTS, layout)(cache, meta(9), kv)


def test_index_operations() -> None:
    bind(Op.CONVERT_INDEX)(meta(2, 3, 8), meta(2, 5), meta(2, 3), 16)
    bind(Op.INDEX_CAT)(meta(2, 3), meta(2, 5), 7, meta(2, 8))
    bind(Op.EXPAND_SWA_INDEX)(meta(6, 4), meta(6, 10))
    bind(Op.DECODE_SWA_INDEX)(meta(6, 2), 16, meta(6, 10))
    bind(Op.EXPAND_LOAD_PLAN)(meta(6, 5), meta(2, 7), 16, meta(10, 4))
