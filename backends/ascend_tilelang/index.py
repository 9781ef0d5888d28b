"""The index operations, one thread an entry. Positions are computed in 64 bits and cut to their low 32."""

from typing import Any

import torch
from tilelang.ascend import language as T

from kvhal.backends.ascend_tilelang.addressing import divided, item_of, trips, wide
from kvhal.backends.ascend_tilelang.codec import choose, pinned
from kvhal.backends.ascend_tilelang.compiling import THREADS, compiler_of
from kvhal.interface import Launcher, Request

_INT32_MAX = torch.iinfo(torch.int32).max


def low_bits(value: Any) -> Any:
    """The low 32 bits of an int64, as int32."""
    return T.cast(value, "int32")


def convert_kernel() -> Any:
    """Kernel of CONVERT_INDEX."""
    batch, queries, count, width = (T.dynamic(name) for name in ("batch", "queries", "count", "width"))
    batch_step, query_step, table_step = (T.dynamic(s, "int64") for s in ("batch_step", "query_step", "table_step"))
    lens_batch, lens_query = T.dynamic("lens_batch", "int64"), T.dynamic("lens_query", "int64")

    @T.prim_func
    def convert_index(
        topk: T.StridedTensor((batch, queries, count), (batch_step, query_step, 1), "int32"),
        tables: T.StridedTensor((batch, width), (table_step, 1), "int32"),
        lens: T.StridedTensor((batch, queries), (lens_batch, lens_query), "int32"),
        block_size: T.int64,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core, T.SimtVF(threads=THREADS):
            total = wide(batch) * queries * count
            for trip in T.serial(trips(total, core, cores)):
                item = item_of(trip, core, cores)
                if item < total:
                    place, entry = divided(item, count, "int64")
                    sequence, query = divided(place, queries, "int64")
                    index = pinned(topk[sequence, query, entry])
                    result = T.alloc_var("int32", init=-1)
                    if index >= 0 and entry < wide(lens[sequence, query]):
                        column, offset = divided(wide(index), block_size, "int64")
                        if column < wide(width):
                            block = pinned(tables[sequence, column])
                            slot = pinned(wide(block) * block_size + offset, "int64")
                            if block >= 0 and slot <= T.int64(_INT32_MAX):
                                result = low_bits(slot)
                    topk[sequence, query, entry] = result

    return convert_index


def cat_kernel() -> Any:
    """Kernel of INDEX_CAT."""
    rows, left_width, right_width, width = (T.dynamic(name) for name in ("rows", "left_width", "right_width", "width"))
    left_step, right_step, out_step = (T.dynamic(name, "int64") for name in ("left_step", "right_step", "out_step"))

    @T.prim_func
    def index_cat(
        left: T.StridedTensor((rows, left_width), (left_step, 1), "int32"),
        right: T.StridedTensor((rows, right_width), (right_step, 1), "int32"),
        out: T.StridedTensor((rows, width), (out_step, 1), "int32"),
        base: T.int64,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core, T.SimtVF(threads=THREADS):
            total = wide(rows) * width
            for trip in T.serial(trips(total, core, cores)):
                item = item_of(trip, core, cores)
                if item < total:
                    row, column = divided(item, width, "int64")
                    if column < wide(left_width):
                        out[row, column] = left[row, column]
                    else:
                        index = pinned(right[row, column - wide(left_width)])
                        out[row, column] = choose(index >= 0, low_bits(wide(index) + base), -1)

    return index_cat


def expand_kernel() -> Any:
    """Kernel of EXPAND_SWA_INDEX."""
    n, width, out_step = T.dynamic("n"), T.dynamic("width"), T.dynamic("out_step", "int64")

    @T.prim_func
    def expand_swa_index(
        pivots: T.Tensor((n, 4), "int32"),
        out: T.StridedTensor((n, width), (out_step, 1), "int32"),
        cores: T.int32,
    ):
        with T.Kernel(cores) as core, T.SimtVF(threads=THREADS):
            total = wide(n) * width
            for trip in T.serial(trips(total, core, cores)):
                item = item_of(trip, core, cores)
                if item < total:
                    row, column = divided(item, width, "int64")
                    behind = pinned(column - T.max(wide(pivots[row, 1]), 0), "int64")
                    result = T.alloc_var("int32", init=-1)
                    if behind < 0:
                        result = low_bits(wide(pivots[row, 0]) + column)
                    elif behind < wide(pivots[row, 3]):
                        result = low_bits(wide(pivots[row, 2]) + behind)
                    out[row, column] = result

    return expand_swa_index


def decode_kernel() -> Any:
    """Kernel of DECODE_SWA_INDEX."""
    n, width, out_step = T.dynamic("n"), T.dynamic("width"), T.dynamic("out_step", "int64")

    @T.prim_func
    def decode_swa_index(
        offset_len: T.Tensor((n, 2), "int32"),
        out: T.StridedTensor((n, width), (out_step, 1), "int32"),
        block_size: T.int64,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core, T.SimtVF(threads=THREADS):
            total = wide(n) * width
            for trip in T.serial(trips(total, core, cores)):
                item = item_of(trip, core, cores)
                if item < total:
                    row, column = divided(item, width, "int64")
                    start = pinned(offset_len[row, 0])
                    result = T.alloc_var("int32", init=-1)
                    if start >= 0 and column < wide(offset_len[row, 1]):
                        block, first = divided(wide(start), block_size, "int64")
                        _, place = divided(first + column, block_size, "int64")
                        result = low_bits(block * block_size + place)
                    out[row, column] = result

    return decode_swa_index


def bind_convert_index(request: Request) -> Launcher:
    """Launcher of CONVERT_INDEX; the contract is in `kvhal.interface`."""
    compiler = compiler_of(request)
    kernel = compiler.kernel(convert_kernel)

    def launch(topk: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor, block_size: int) -> None:
        kernel(topk, tables, lens, block_size, compiler.cores)

    return launch


def bind_index_cat(request: Request) -> Launcher:
    """Launcher of INDEX_CAT; the contract is in `kvhal.interface`."""
    compiler = compiler_of(request)
    kernel = compiler.kernel(cat_kernel)

    def launch(left: torch.Tensor, right: torch.Tensor, base: int, out: torch.Tensor) -> None:
        kernel(left, right, out, base, compiler.cores)

    return launch


def bind_expand_swa_index(request: Request) -> Launcher:
    """Launcher of EXPAND_SWA_INDEX; the contract is in `kvhal.interface`."""
    compiler = compiler_of(request)
    kernel = compiler.kernel(expand_kernel)

    def launch(pivots: torch.Tensor, out: torch.Tensor) -> None:
        kernel(pivots, out, compiler.cores)

    return launch


def bind_decode_swa_index(request: Request) -> Launcher:
    """Launcher of DECODE_SWA_INDEX; the contract is in `kvhal.interface`."""
    compiler = compiler_of(request)
    kernel = compiler.kernel(decode_kernel)

    def launch(offset_len: torch.Tensor, swa_block_size: int, out: torch.Tensor) -> None:
        kernel(offset_len, out, swa_block_size, compiler.cores)

    return launch
