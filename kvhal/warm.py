"""Compiling ahead of serving."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial

import torch

from kvhal.formats import SUPPORTED_KV_CACHE_FORMATS, KVCacheFormat
from kvhal.interface import FORMAT_OPS, CastArgs, KVCacheOutArgs, Op
from kvhal.layout import alloc_kv_cache
from kvhal.ops import (
    convert_kv_index,
    expand_load_plan,
    expand_swa_index,
    fused_norm_rope_hadamard_cast_store_kvcache,
    get_kv_swa_index_decode,
    kv_index_cat,
    load_kv_slots,
    load_paged_kv_cache,
    store_kv_cache,
)


def warmup(
    ops: Iterable[Op | str] | None = None,
    *,
    layouts: Iterable[KVCacheFormat] = SUPPORTED_KV_CACHE_FORMATS,
    block_size: int = 64,
    device: torch.device | str = "cpu",
) -> None:
    """Builds the kernels that later calls need, several at once, by making the calls themselves on a one-block scratch cache.

    A fused store is built without stages; stages, their options and cast_back make other kernels, so make one such call on
    a scratch cache before capturing a graph with it.

    Args:
        ops: the operations, all when None.
        layouts: the record formats that will be used.
        block_size: tokens a block that will be used; call once for each.
        device: where the kernels will run.

    Raises:
        ValueError: `ops` names no operation; the message lists them.
        UnsupportedError: an operation cannot be served on this device; ForcedBackendError when a backend was forced.
    """
    wanted = [Op(op) for op in (Op if ops is None else ops)]
    device = torch.device(device)
    calls = [partial(_warm_format, op, layout, block_size, device) for layout in layouts for op in wanted if op in FORMAT_OPS]
    calls += [partial(_warm_index, op, block_size, device) for op in wanted if op not in FORMAT_OPS]
    with ThreadPoolExecutor(min(len(calls), os.cpu_count() or 1) or 1) as pool:  # compilers run outside the interpreter lock
        for built in [pool.submit(copy_context().run, call) for call in calls]:
            built.result()


def _warm_format(op: Op, layout: KVCacheFormat, block_size: int, device: torch.device) -> None:
    cache = alloc_kv_cache(1, block_size, layout, device).zero_()
    rows = torch.zeros((1, layout.elements), dtype=torch.bfloat16, device=device)
    for dtype in (torch.int32, torch.int64):
        slots = torch.zeros(1, dtype=dtype, device=device)
        if op == Op.STORE:
            store_kv_cache(rows, cache, slots, layout=layout)
        elif op == Op.LOAD_SLOTS:
            load_kv_slots(cache, slots, layout=layout)
        elif op == Op.FUSED_STORE:
            fused_norm_rope_hadamard_cast_store_kvcache(
                rows, cast_args=CastArgs.for_layout(layout), out_args=KVCacheOutArgs(cache, slots, layout)
            )
    if op == Op.LOAD:
        segments = torch.tensor([[0, 0, 1, 0]], dtype=torch.int32, device=device)
        load_paged_kv_cache(cache, segments, 1, layout=layout)


def _warm_index(op: Op, block_size: int, device: torch.device) -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    if op == Op.CONVERT_INDEX:
        convert_kv_index(zeros(1, 1, 1), zeros(1, 1), zeros(1, 1), block_size)
    elif op == Op.INDEX_CAT:
        kv_index_cat(zeros(1, 1), zeros(1, 1), 0, 0)
    elif op == Op.EXPAND_SWA_INDEX:
        expand_swa_index(zeros(1, 4), 1)
    elif op == Op.DECODE_SWA_INDEX:
        get_kv_swa_index_decode(zeros(1, 2), 1, block_size)
    elif op == Op.EXPAND_LOAD_PLAN:
        spans = torch.tensor([[0, 0, 0, 0, 1]], dtype=torch.int32, device=device)
        expand_load_plan(spans, zeros(1, 1), block_size, 1)
