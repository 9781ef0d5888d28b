"""Load plans in Triton: one lane a segment, which finds its span by bisection; results keep their low 32 bits."""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal.backends.portable_triton.launch import Kernel, await_producers
from kvhal.backends.portable_triton.prepared import launcher
from kvhal.backends.portable_triton.tuned import shape_of
from kvhal.interface import Launcher, Request

SPAN = tl.constexpr(5)  #: int32 entries of a span


@triton.jit(
    do_not_specialize=["step", "spans", "table_row", "rows", "width", "block_size", "count"],
    do_not_specialize_on_alignment=["spans_ptr", "table_ptr"],
)
def plan_kernel(
    spans_ptr,
    table_ptr,
    out_ptr,
    step: tl.int64,
    spans: tl.int64,
    table_row: tl.int64,
    rows: tl.int64,
    width: tl.int64,
    block_size: tl.int32,
    count: tl.int64,
    tile: tl.constexpr,
    early: tl.constexpr,
):
    await_producers(early)
    segment = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    exists = segment < count
    before = tl.zeros((tile,), tl.int64)  # spans known to begin at or before the segment
    while step > 0:
        probe = before + step
        first = tl.load(spans_ptr + (probe - 1) * SPAN, mask=exists & (probe <= spans), other=0)
        before = tl.where((probe <= spans) & (first <= segment), probe, before)
        step = step // 2
    found = exists & (before > 0)
    span = spans_ptr + (before - 1) * SPAN
    ordinal = segment - tl.load(span, mask=found, other=0)
    first_row = tl.load(span + 1, mask=found, other=0).to(tl.int64)
    row = tl.load(span + 2, mask=found, other=-1)
    begin = tl.load(span + 3, mask=found, other=-1)
    end = tl.load(span + 4, mask=found, other=0).to(tl.int64)
    found = found & (begin >= 0)
    column = tl.maximum(begin, 0) // block_size + ordinal
    start = column * block_size
    src_begin = tl.maximum(begin - start, 0)
    src_end = tl.minimum(end - start, block_size)
    found = found & (src_begin < src_end)
    in_table = found & (row >= 0) & (row < rows) & (column < width)
    block = tl.load(table_ptr + row.to(tl.int64) * table_row + column, mask=in_table, other=-1)
    dst = first_row + tl.maximum(start - begin, 0)
    src_begin = tl.where(found, src_begin, 0).to(tl.int32)
    src_end = tl.where(found, src_end, 0).to(tl.int32)
    dst = tl.where(found, dst, 0).to(tl.int32)
    segments = tl.interleave(tl.interleave(block, src_end), tl.interleave(src_begin, dst))  # a row in consecutive lanes
    entry = tl.program_id(0).to(tl.int64) * (4 * tile) + tl.arange(0, 4 * tile)
    tl.store(out_ptr + entry, segments, mask=entry < 4 * count)


def bind_expand_load_plan(request: Request) -> Launcher:
    """The launcher of EXPAND_LOAD_PLAN (kvhal.interface, "Launchers")."""
    tile, warps = shape_of(request.platform.arch, "plan", None)
    kernel = Kernel(plan_kernel, (tile,), warps, request.platform)

    def call_of(spans, block_tables, block_size, out):
        count, number = out.shape[0], spans.shape[0]
        rows, width = block_tables.shape
        step = 1 << number.bit_length() >> 1  # the largest power of two among the counts of spans
        facts = (step, number, block_tables.stride(0), rows, width, block_size, count)
        return kernel, (count + tile - 1) // tile, spans, block_tables, out, *facts

    return launcher(call_of, request.platform)
