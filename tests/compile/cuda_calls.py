"""Calls that cuda_tilelang's kernels serve by their own checks, on CPU tensors, and what is done to one tensor of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

import kvhal
from kvhal.backends.cuda_tilelang import fused, load, store
from kvhal.interface import Op, Request

Tensors = dict[str, Tensor]
TOKENS = 3
MANY = 20000  #: tokens; more than any kernel for few takes
STAGES = ("kv", "weight", "positions", "turns", "cache", "slots")  #: a fused store's tensors, as its kernels take them


@dataclass(frozen=True)
class Operation:
    """One operation: its tensors, the public call on them, what the kernel is called with."""

    op: Op
    names: tuple[str, ...]
    bind: Callable[[Request], Any]
    public: Callable[[Tensors], object]
    operands: Callable[[Tensors], tuple[Any, ...]]


def operations(layout: kvhal.KVCacheFormat) -> dict[str, Operation]:
    """Those on records of a format whose kernels look at their tensors themselves."""

    def fuse(given: Tensors) -> None:
        kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
            given["kv"],
            norm_args=kvhal.NormArgs(given["weight"]),
            rope_args=kvhal.RopeArgs(given["positions"], given["turns"], 64),
            cast_args=kvhal.CastArgs.for_layout(layout),
            out_args=kvhal.KVCacheOutArgs(given["cache"], given["slots"], layout),
        )

    return {
        "store": Operation(
            Op.STORE,
            ("kv", "cache", "slots"),
            store.bind_store,
            lambda given: kvhal.store_kv_cache(given["kv"], given["cache"], given["slots"], layout=layout),
            lambda given: (given["kv"], given["cache"], given["slots"]),
        ),
        "load": load_of(TOKENS, layout),
        "load_slots": Operation(
            Op.LOAD_SLOTS,
            ("cache", "slots", "out"),
            load.bind_load_slots,
            lambda given: kvhal.load_kv_slots(given["cache"], given["slots"], given["out"], layout=layout),
            lambda given: (given["cache"], given["slots"], given["out"]),
        ),
        "fused": Operation(
            Op.FUSED_STORE,
            STAGES,
            fused.bind_fused_store,
            fuse,
            lambda given: (1e-6, *(given[name] for name in STAGES), None),
        ),
    }


def load_of(total_k: int, layout: kvhal.KVCacheFormat) -> Operation:
    """A load of so many rows."""
    return Operation(
        Op.LOAD,
        ("cache", "segments", "out"),
        load.bind_load,
        lambda given: kvhal.load_paged_kv_cache(given["cache"], given["segments"], total_k, given["out"], layout=layout),
        lambda given: (given["cache"], given["segments"], total_k, given["out"], None),
    )


def tensors(names: tuple[str, ...], layout: kvhal.KVCacheFormat, block_size: int, n: int = TOKENS) -> Tensors:
    """Valid ones, aligned; the rows of many tokens are one row."""
    elements = layout.elements
    rows = torch.zeros((1 if n == MANY else n, elements), dtype=torch.bfloat16).expand(n, elements)
    made = {
        "kv": rows,
        "cache": kvhal.alloc_kv_cache(3, block_size, layout, "cpu"),
        "slots": torch.arange(n),
        "segments": torch.zeros((n, 4), dtype=torch.int32),
        "out": torch.zeros((max(n, TOKENS) if "segments" in names else n, elements), dtype=torch.bfloat16),
        "weight": torch.ones(elements),
        "positions": torch.arange(n),
        "turns": torch.zeros((9, 64)),
    }
    return {name: made[name] for name in names}


def restrided(tensor: Tensor, axis: int, change: int) -> Tensor:
    """The same extents over other memory, `change` elements more from one to the next of an axis."""
    strides = list(tensor.stride())
    strides[axis] = max(strides[axis] + change, 0)
    span = 1 + sum(stride * max(extent - 1, 0) for stride, extent in zip(strides, tensor.shape, strict=True))
    return torch.zeros(span + 64, dtype=tensor.dtype).as_strided(tensor.shape, strides)


def moved(tensor: Tensor, elements: int) -> Tensor:
    span = 1 + sum(stride * max(extent - 1, 0) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))
    return torch.zeros(span + 64, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride(), elements)


def sized(tensor: Tensor, axis: int, change: int) -> Tensor:
    """Another extent of an axis, with contiguous strides."""
    shape = list(tensor.shape)
    shape[axis] = max(shape[axis] + change, 0)
    return torch.zeros(shape, dtype=tensor.dtype)


def changes(tensor: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """What is done to one tensor of a call."""
    found: list[Callable[[Tensor], Tensor]] = [lambda tensor: tensor.clone()]
    for dtype in (torch.int16, torch.int32, torch.int64, torch.uint8, torch.float16, torch.float32, torch.bfloat16):
        found.append(lambda tensor, dtype=dtype: tensor.to(dtype))
    found += [lambda tensor: tensor[None], lambda tensor: tensor.unsqueeze(-1), lambda tensor: tensor.reshape(-1)]
    for axis, change in product(range(tensor.dim()), (-5, -1, 1, 3)):
        found.append(lambda tensor, axis=axis, change=change: sized(tensor, axis, change))
    for axis, change in product(range(tensor.dim()), (-512, -16, -8, -1, 1, 2, 4, 8, 16, 32)):
        found.append(lambda tensor, axis=axis, change=change: restrided(tensor, axis, change))
    for extent in (0, 1):  # of what is left of the first axis its stride may be anything
        found.append(lambda tensor, extent=extent: tensor[:extent])
        for change in (-512, -1, 1, 16, 32):
            found.append(lambda tensor, extent=extent, change=change: restrided(tensor[:extent], 0, change))
    for elements in (1, 2, 4, 8, 16, 32):
        found.append(lambda tensor, elements=elements: moved(tensor, elements))
    return found
