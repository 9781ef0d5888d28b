"""The index operations in Triton: rows cut into tiles, one program a tile; integer results keep their low 32 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvhal.backends.portable_triton.launch import Kernel, await_producers
from kvhal.backends.portable_triton.prepared import launcher
from kvhal.backends.portable_triton.tuned import shape_of
from kvhal.interface import Launcher, Request

INT32_MAX = torch.iinfo(torch.int32).max
INT32_LIMIT = tl.constexpr(INT32_MAX)


@triton.jit
def tile_of(parts, width, tile: tl.constexpr):
    """Row (int64), columns [tile] (int64) and which of them exist, of this program."""
    row = tl.program_id(0) // parts  # in 32 bits, as the number of programs: a division of 64 bits is a hundred instructions
    column = (tl.program_id(0) - row * parts).to(tl.int64) * tile + tl.arange(0, tile)
    return row.to(tl.int64), column, column < width


@triton.jit(
    do_not_specialize=["topk_row", "lens_row", "lens_column", "table_row", "queries", "count", "width", "block_size", "parts"],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr"],
)
def convert_kernel(
    topk_ptr,
    topk_stride,
    topk_row: tl.int64,
    table_ptr,
    table_row: tl.int64,
    lens_ptr,
    lens_row: tl.int64,
    lens_column: tl.int64,
    queries: tl.int32,
    count: tl.int64,
    width: tl.int64,
    block_size: tl.int32,
    parts: tl.int32,
    tile: tl.constexpr,
    early: tl.constexpr,
):
    await_producers(early)
    row, column, exists = tile_of(parts, count, tile)
    batch = (row.to(tl.int32) // queries).to(tl.int64)
    query = row - batch * queries
    entries = topk_ptr + batch * topk_row + query * topk_stride + column
    length = tl.load(lens_ptr + batch * lens_row + query * lens_column)
    index = tl.load(entries, mask=exists, other=-1)
    inside = exists & (column < length) & (index >= 0)
    index = tl.where(inside, index, 0)
    place = index // block_size
    inside = inside & (place < width)
    block = tl.load(table_ptr + batch * table_row + place, mask=inside, other=-1)
    slot = block.to(tl.int64) * block_size + (index - place * block_size)
    inside = inside & (block >= 0) & (slot <= INT32_LIMIT)
    tl.store(entries, tl.where(inside, slot, -1).to(tl.int32), mask=exists)


def bind_convert_index(request: Request) -> Launcher:
    """The launcher of CONVERT_INDEX (kvhal.interface, "Launchers")."""
    tile, warps = shape_of(request.platform.arch, "convert", None)
    kernel = Kernel(convert_kernel, (tile,), warps, request.platform)

    def call_of(topk, block_tables, context_lens, block_size):
        batch, queries, count = topk.shape
        parts = (count + tile - 1) // tile
        return (
            kernel,
            batch * queries * parts,
            topk,
            topk.stride(1),
            topk.stride(0),
            block_tables,
            block_tables.stride(0),
            context_lens,
            context_lens.stride(0),
            context_lens.stride(1),
            queries,
            count,
            block_tables.shape[1],
            min(block_size, INT32_MAX),  # an int32 index lies in block 0 of anything larger
            parts,
        )

    return launcher(call_of, request.platform)


@triton.jit(do_not_specialize=["left_width", "width", "base", "parts"])
def cat_kernel(
    left_ptr,
    left_stride,
    right_ptr,
    right_stride,
    out_ptr,
    out_stride,
    left_width: tl.int64,
    width: tl.int64,
    base: tl.int64,
    parts: tl.int32,
    tile: tl.constexpr,
    early: tl.constexpr,
):
    await_producers(early)
    row, column, exists = tile_of(parts, width, tile)
    from_left = column < left_width
    left = tl.load(left_ptr + row * left_stride + column, mask=exists & from_left, other=0)
    right_column = column - left_width
    right = tl.load(right_ptr + row * right_stride + right_column, mask=exists & (right_column >= 0), other=-1)
    shifted = tl.where(right >= 0, right.to(tl.int64) + base, -1).to(tl.int32)
    tl.store(out_ptr + row * out_stride + column, tl.where(from_left, left, shifted), mask=exists)


def bind_index_cat(request: Request) -> Launcher:
    """The launcher of INDEX_CAT (kvhal.interface, "Launchers")."""
    tile, warps = shape_of(request.platform.arch, "cat", None)
    kernel = Kernel(cat_kernel, (tile,), warps, request.platform)

    def call_of(left, right, base, out):
        rows, width = out.shape
        parts = (width + tile - 1) // tile
        strides = left.stride(0), right.stride(0), out.stride(0)
        return kernel, rows * parts, left, strides[0], right, strides[1], out, strides[2], left.shape[1], width, base, parts

    return launcher(call_of, request.platform)


@triton.jit(do_not_specialize=["width", "parts"], do_not_specialize_on_alignment=["pivots_ptr"])
def expand_kernel(pivots_ptr, out_ptr, out_stride, width: tl.int64, parts: tl.int32, tile: tl.constexpr, early: tl.constexpr):
    await_producers(early)
    row, column, exists = tile_of(parts, width, tile)
    pivots_ptr += row * 4
    offset1 = tl.load(pivots_ptr).to(tl.int64)
    length1 = tl.maximum(tl.load(pivots_ptr + 1), 0).to(tl.int64)
    offset2 = tl.load(pivots_ptr + 2).to(tl.int64)
    length2 = tl.load(pivots_ptr + 3).to(tl.int64)
    behind = column - length1
    second = tl.where(behind < length2, offset2 + behind, -1)
    value = tl.where(behind < 0, offset1 + column, second)
    tl.store(out_ptr + row * out_stride + column, value.to(tl.int32), mask=exists)


def bind_expand_swa_index(request: Request) -> Launcher:
    """The launcher of EXPAND_SWA_INDEX (kvhal.interface, "Launchers")."""
    tile, warps = shape_of(request.platform.arch, "expand", None)
    kernel = Kernel(expand_kernel, (tile,), warps, request.platform)

    def call_of(pivots, out):
        rows, width = out.shape
        parts = (width + tile - 1) // tile
        return kernel, rows * parts, pivots, out, out.stride(0), width, parts

    return launcher(call_of, request.platform)


@triton.jit(do_not_specialize=["width", "block_size", "parts"], do_not_specialize_on_alignment=["pivots_ptr"])
def decode_kernel(
    pivots_ptr,
    out_ptr,
    out_stride,
    width: tl.int64,
    block_size: tl.int64,
    parts: tl.int32,
    tile: tl.constexpr,
    early: tl.constexpr,
):
    await_producers(early)
    row, column, exists = tile_of(parts, width, tile)
    start = tl.load(pivots_ptr + row * 2).to(tl.int64)
    length = tl.load(pivots_ptr + row * 2 + 1)
    first = tl.maximum(start, 0) % block_size
    slot = start - first + (first + column) % block_size
    value = tl.where((column < length) & (start >= 0), slot, -1)
    tl.store(out_ptr + row * out_stride + column, value.to(tl.int32), mask=exists)


def bind_decode_swa_index(request: Request) -> Launcher:
    """The launcher of DECODE_SWA_INDEX (kvhal.interface, "Launchers")."""
    tile, warps = shape_of(request.platform.arch, "window", None)
    kernel = Kernel(decode_kernel, (tile,), warps, request.platform)

    def call_of(offset_len, swa_block_size, out):
        rows, width = out.shape
        parts = (width + tile - 1) // tile
        return kernel, rows * parts, offset_len, out, out.stride(0), width, swa_block_size, parts

    return launcher(call_of, request.platform)
