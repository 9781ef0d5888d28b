"""One valid call of every operation, and what counts the decisions and validations behind it."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvhal
from kvhal import KVCacheOutArgs, NormArgs, RopeArgs, binding

LAYOUT = kvhal.V41_FORMAT


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def rows(n: int = 3) -> Tensor:
    return torch.ones((n, LAYOUT.elements), dtype=torch.bfloat16)


def new_cache(block_size: int = 4) -> Tensor:
    return kvhal.alloc_kv_cache(2, block_size, LAYOUT, "cpu").zero_()


RAW = kvhal.MXFP8_INDEX_KV_FORMAT


def load_raw(out: Any = ()) -> kvhal.KVCacheTensors:
    cache = kvhal.alloc_kv_cache(2, 4, RAW, "cpu").zero_()
    out = kvhal.KVCacheTensors(torch.zeros((3, 128), dtype=torch.float8_e4m3fn), ints(3)) if out == () else out
    return kvhal.load_paged_kv_cache(cache, torch.tensor([[0, 0, 3, 0]], dtype=torch.int32), 3, out, layout=RAW)


def fused(
    kv: Tensor, weight: Tensor, offset: int | None = None, layout: Any = LAYOUT, back: bool = True, stored: bool = True
) -> Any:
    return kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
        kv,
        norm_args=NormArgs(weight),
        rope_args=RopeArgs(torch.arange(kv.shape[0]), torch.ones(8, 64), 64, offset=offset),
        cast_args=kvhal.CastArgs.for_layout(LAYOUT, cast_back=back),
        out_args=KVCacheOutArgs(new_cache(), torch.arange(kv.shape[0]), layout) if stored else None,
    )


CALLS: dict[str, Callable[[], Any]] = {
    "store": lambda: kvhal.store_kv_cache(rows(), new_cache(), torch.arange(3), layout=LAYOUT),
    "load": lambda: kvhal.load_paged_kv_cache(new_cache(), ints(1, 4), 3, rows()).kv,
    "load, new": lambda: kvhal.load_paged_kv_cache(new_cache(), torch.tensor([[0, 0, 3, 0]], dtype=torch.int32), 3).kv,
    "load, raw": lambda: load_raw().kv.view(torch.uint8),
    "load, raw, new": lambda: load_raw(None).kv.view(torch.uint8),
    "load_slots": lambda: kvhal.load_kv_slots(new_cache(), torch.arange(3), rows()),
    "load_slots, new": lambda: kvhal.load_kv_slots(new_cache(), torch.arange(3)),
    "load_slots, 2-d": lambda: kvhal.load_kv_slots(new_cache(), torch.arange(4).view(2, 2)),
    "convert": lambda: kvhal.convert_kv_index(ints(1, 1, 2), ints(1, 2), ints(1, 1), 4),
    "cat": lambda: kvhal.kv_index_cat(ints(2, 3), ints(2, 1), 4, 5, ints(2, 4)),
    "cat, new": lambda: kvhal.kv_index_cat(ints(2, 3), ints(2, 1), 4, 5),
    "expand": lambda: kvhal.expand_swa_index(torch.tensor([[5, 2, 8, 1]], dtype=torch.int32), 4, ints(1, 4)),
    "decode": lambda: kvhal.get_kv_swa_index_decode(torch.tensor([[6, 3]], dtype=torch.int32), 4, 8, ints(1, 4)),
    "expand_plan": lambda: kvhal.expand_load_plan(ints(1, 5), ints(1, 1), 4, 1, ints(1, 4)),
    "expand_plan, new": lambda: kvhal.expand_load_plan(ints(1, 5), ints(1, 1), 4, 1),
    "fused": lambda: fused(rows(), torch.ones(512)),
    "fused, back": lambda: fused(rows(), torch.ones(512), stored=False),
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often a decision was made and a tensor was checked."""
    count: Counter[str] = Counter()

    def wrap(module: Any, name: str) -> None:
        original = getattr(module, name)

        def counting(*given: Any, **named: Any) -> Any:
            count[name] += 1
            return original(*given, **named)

        monkeypatch.setattr(module, name, counting)

    wrap(binding, "resolve")
    for module in ("cache_calls", "index_calls", "fused_calls", "plan"):
        wrap(importlib.import_module(f"kvhal.ops.{module}"), "check_tensor")
    kvhal.configure()
    yield count
