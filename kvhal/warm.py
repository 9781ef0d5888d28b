"""Compiling ahead of serving."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from kvhal.config import several
from kvhal.formats import SUPPORTED_KV_CACHE_FORMATS, KVCacheFormat
from kvhal.interface import FORMAT_OPS, CastArgs, HadamardArgs, KVCacheOutArgs, NormArgs, Op, RopeArgs
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
from kvhal.ops.checks import check_int, check_type
from kvhal.platform import usable_device

WIDTH = 16  #: entries of a table's row
CHUNK = 1 << 13  #: tokens of a prefill chunk, where there is a kernel for those
MANY = (1 << 15) + 1  #: tokens, or rows of a table, more than any backend's kernels for fewer of them take


@dataclass(frozen=True)
class FusedStages:
    """One kind of fused store that will be called: what its kernel depends on beside the format, block size and slots' dtype.

    Args:
        norm: dtype of NormArgs.weight, torch.bfloat16 or torch.float32; None without the stage.
        rope_dim: rotated elements; 0 without the stage.
        is_neox_style, offset: as in RopeArgs.
        positions: dtype of RopeArgs.positions, torch.int32 or torch.int64.
        hadamard: the stage is on.
        cast_back: the dequantised rows are returned.
        store: the rows are stored; False is a call without out_args, which needs cast_back.
        rows: dtype of the rows that come in, torch.bfloat16 or torch.float32.
    """

    norm: torch.dtype | None = None
    rope_dim: int = 0
    is_neox_style: bool = False
    offset: int | None = None
    positions: torch.dtype = torch.int64
    hadamard: bool = False
    cast_back: bool = False
    store: bool = True
    rows: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        floats, integers = (torch.bfloat16, torch.float32), (torch.int32, torch.int64)
        for name, value, allowed in (
            ("norm", self.norm, (None, *floats)),
            ("positions", self.positions, integers),
            ("rows", self.rows, floats),
        ):
            if value not in allowed:
                raise ValueError(f"FusedStages.{name}: has {value!r}, needs one of {', '.join(map(str, allowed))}")
        check_int("FusedStages.rope_dim", self.rope_dim, 0)


def warmup(
    ops: Iterable[Op | str] | Op | str | None = None,
    *,
    layouts: Iterable[KVCacheFormat] | KVCacheFormat = SUPPORTED_KV_CACHE_FORMATS,
    block_size: int = 64,
    device: torch.device | str = "cpu",
    fused: Iterable[FusedStages] | FusedStages = (FusedStages(),),
) -> None:
    """Builds the kernels that later calls need, several at once, by making the calls themselves on a one-block scratch cache.

    After it, calls of these kinds can be captured into a graph at once. Rows, of tables of indices as well, are taken to start
    on multiples of 16 bytes and to be a multiple of 16 elements apart; others need kernels of their own.

    Args:
        ops: the operations, or one; all when None.
        layouts: the record formats that will be used, or one.
        block_size: tokens a block that will be used; call once for each.
        device: where the kernels will run.
        fused: the kinds of fused store that will be called, or one, each with every layout; by default the one without stages.

    Raises:
        ValueError: `ops` names no operation (the message lists them), a layout's records cannot go through the stages, or
            `device` is none of this machine's.
        TypeError: `layouts` or `fused` holds something else.
        UnsupportedError: an operation cannot be served on this device; ForcedBackendError when a backend was forced.
    """
    wanted = [Op(op) for op in (Op if ops is None else several(ops))]
    device, block_size = usable_device(device), check_int("block_size", block_size, 1)
    layouts, fused = several(layouts), several(fused)
    for one in layouts:
        check_type("layouts", one, KVCacheFormat)
    for stages in fused:
        check_type("fused", stages, FusedStages)
    record_ops = [op for op in wanted if op in FORMAT_OPS and op != Op.FUSED_STORE]
    calls: list[Callable[[], object]]
    calls = [partial(_warm_format, op, layout, block_size, device) for layout in layouts for op in record_ops]
    if Op.FUSED_STORE in wanted:
        calls += [partial(_warm_fused, stages, layout, block_size, device) for layout in layouts for stages in fused]
    calls += [partial(_warm_index, op, block_size, device) for op in wanted if op not in FORMAT_OPS]
    side_by_side(calls)


def side_by_side(calls: list[Callable[[], object]]) -> None:
    """Makes calls under the configuration in force, each in a thread: compilers run outside the interpreter lock."""
    with ThreadPoolExecutor(min(len(calls), os.cpu_count() or 1) or 1) as pool:
        for built in [pool.submit(copy_context().run, call) for call in calls]:
            built.result()


def _counts(device: torch.device) -> tuple[int, ...]:
    """Tokens of a call: one, and more where there may be other kernels for them."""
    return (1,) if device.type == "cpu" else (1, CHUNK, MANY)


def _warm_format(op: Op, layout: KVCacheFormat, block_size: int, device: torch.device) -> None:
    cache = alloc_kv_cache(1, block_size, layout, device).zero_()
    rows = torch.zeros((1, layout.elements), dtype=torch.bfloat16, device=device)
    for dtype, count in product((torch.int32, torch.int64), _counts(device)):
        slots = torch.full((count,), -1, dtype=dtype, device=device)
        if op == Op.STORE:
            store_kv_cache(rows.expand(count, -1), cache, slots, layout=layout)
        elif op == Op.LOAD_SLOTS:
            load_kv_slots(cache, slots, layout=layout)
    if op == Op.LOAD:
        segment = torch.tensor([[0, 0, 1, 0]], dtype=torch.int32, device=device)
        for count in _counts(device):
            load_paged_kv_cache(cache, segment.repeat(-(-count // block_size), 1), 1, layout=layout)


def _warm_fused(stages: FusedStages, layout: KVCacheFormat, block_size: int, device: torch.device) -> None:
    new = partial(torch.zeros, device=device)
    cache = alloc_kv_cache(1, block_size, layout, device).zero_()
    dtypes = (torch.int32, torch.int64) if stages.store else (torch.int64,)
    for dtype, count in product(dtypes, _counts(device)):
        rope = None
        if stages.rope_dim:
            positions, table = new(count, dtype=stages.positions), new((1, stages.rope_dim), dtype=torch.float32)
            rope = RopeArgs(positions, table, stages.rope_dim, stages.is_neox_style, stages.offset)
        fused_norm_rope_hadamard_cast_store_kvcache(
            new((1, layout.elements), dtype=stages.rows).expand(count, -1),
            norm_args=None if stages.norm is None else NormArgs(new(layout.elements, dtype=stages.norm)),
            rope_args=rope,
            hadamard_args=HadamardArgs() if stages.hadamard else None,
            cast_args=CastArgs.for_layout(layout, cast_back=stages.cast_back),
            out_args=KVCacheOutArgs(cache, new(count, dtype=dtype) - 1, layout) if stages.store else None,
        )


def _warm_index(op: Op, block_size: int, device: torch.device) -> None:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    for rows in _counts(device):
        table = zeros(rows, WIDTH)
        if op == Op.CONVERT_INDEX:
            convert_kv_index(table[None], zeros(1, WIDTH), zeros(1, rows), block_size)
        elif op == Op.INDEX_CAT:
            kv_index_cat(table, table, 0, 0)
        elif op == Op.EXPAND_SWA_INDEX:
            expand_swa_index(zeros(rows, 4), WIDTH)
        elif op == Op.DECODE_SWA_INDEX:
            get_kv_swa_index_decode(zeros(rows, 2), WIDTH, block_size)
    if op == Op.EXPAND_LOAD_PLAN:
        spans = torch.tensor([[0, 0, 0, 0, 1]], dtype=torch.int32, device=device)
        expand_load_plan(spans, zeros(1, WIDTH), block_size, 1)
