"""Index operations: a row of thread blocks a table row, entries side by side on the threads; no record format matters here."""

import math
from collections.abc import Callable
from typing import Any

import tilelang.language as T

from kvhal.backends.cuda_tilelang.build import INT32_MAX, Kernel, await_producers, kernel, launcher
from kvhal.backends.cuda_tilelang.tuned import shape_of
from kvhal.interface import Launcher, Request


def bind_convert_index(request: Request) -> Launcher:
    """``launch(topk, block_tables, context_lens, block_size)``, see `kvhal.interface`."""
    return _launcher(convert_kernel, "convert", request, written=0)


def bind_index_cat(request: Request) -> Launcher:
    """``launch(left, right, base, out)``, see `kvhal.interface`."""
    return _launcher(cat_kernel, "cat", request, written=3)


def bind_expand_swa_index(request: Request) -> Launcher:
    """``launch(pivots, out)``, see `kvhal.interface`."""
    return _launcher(expand_kernel, "expand", request, written=1)


def bind_decode_swa_index(request: Request) -> Launcher:
    """``launch(offset_len, swa_block_size, out)``, see `kvhal.interface`."""
    return _launcher(window_kernel, "window", request, written=2)


def _launcher(factory: Callable[..., Any], name: str, request: Request, written: int) -> Launcher:
    """The launcher of a factory; its kernel takes what the launcher does, the table that is written in place `written`."""
    built: dict[int, Kernel] = {}
    threads, entries, few = shape_of(request.platform.arch, name, None)

    def prepare(*arguments: Any) -> Kernel:
        *rows, width = arguments[written].shape
        each = 1 if math.prod(rows) * -(-width // threads) <= few else entries
        run = built.get(each)
        if run is None:
            run = kernel(factory, threads, each, platform=request.platform, device=arguments[written].device)
            built[each] = run
        return run

    return launcher(prepare)


def table(rows: Any, width: Any, name: str) -> Any:
    """An int32 table parameter; both strides are free, since torch leaves those of a single column or row open."""
    strides = (T.dynamic(f"{name}_stride", "int64"), T.dynamic(f"{name}_step", "int64"))
    return T.StridedTensor((rows, width), strides, "int32")


def unsigned_quotient(number: Any, divisor: Any) -> Any:
    """int32 quotient of numbers that are not negative; a signed division would be longer."""
    return T.cast(T.truncdiv(T.cast(number, "uint32"), T.cast(divisor, "uint32")), "int32")


def convert_kernel(threads: int, entries: int) -> Any:
    columns = threads * entries  # of a thread block
    batch, queries, k, width = T.dynamic("batch"), T.dynamic("queries"), T.dynamic("k"), T.dynamic("width")
    batch_stride, query_stride = T.dynamic("batch_stride", "int64"), T.dynamic("query_stride", "int64")
    step = T.dynamic("step", "int64")

    @T.prim_func
    def convert(
        topk: T.StridedTensor((batch, queries, k), (batch_stride, query_stride, step), "int32"),
        block_tables: table(batch, width, "tables"),
        lens: table(batch, queries, "lens"),
        block_size: T.int32,
    ):
        with T.Kernel(batch * queries, T.ceildiv(k, columns), threads=threads) as (row, part):
            sequence = T.alloc_var("int32", init=unsigned_quotient(row, queries))
            query = T.alloc_var("int32", init=row - sequence * queries)
            await_producers(batch * queries * T.ceildiv(k, columns))
            for i in T.unroll(entries):
                column = part * columns + i * threads + T.get_thread_binding()
                if column < k:
                    index = T.alloc_var("int32", init=topk[sequence, query, column])
                    length = T.alloc_var("int32", init=lens[sequence, query])
                    page = T.alloc_var("int32", init=unsigned_quotient(index, block_size))
                    block = T.alloc_var("int64", init=-1)
                    if (column < length) & (index >= 0) & (page < width):
                        block = T.cast(block_tables[sequence, page], "int64")
                    slot = T.alloc_var("int64", init=block * block_size + (index - page * block_size))
                    topk[sequence, query, column] = T.if_then_else(
                        (block >= 0) & (slot <= INT32_MAX), T.cast(slot, "int32"), -1
                    )

    return convert


def cat_kernel(threads: int, entries: int) -> Any:
    columns = threads * entries  # of a thread block
    rows, width = T.dynamic("rows"), T.dynamic("width")
    left_width, right_width = T.dynamic("left_width"), T.dynamic("right_width")

    @T.prim_func
    def cat(
        left: table(rows, left_width, "left"),
        right: table(rows, right_width, "right"),
        base: T.int32,
        out: table(rows, width, "out"),
    ):
        with T.Kernel(rows, T.ceildiv(width, columns), threads=threads) as (row, part):
            T.pdl_sync()
            for i in T.unroll(entries):
                column = part * columns + i * threads + T.get_thread_binding()
                if column < left_width:
                    out[row, column] = left[row, column]
                elif column < width:
                    index = T.alloc_var("int32", init=right[row, column - left_width])
                    moved = T.cast(T.cast(index, "int64") + base, "int32")
                    out[row, column] = T.if_then_else(index < 0, -1, moved)
            T.pdl_trigger()

    return cat


def expand_kernel(threads: int, entries: int) -> Any:
    columns = threads * entries  # of a thread block
    n, width = T.dynamic("n"), T.dynamic("width")

    @T.prim_func
    def expand(pivots: T.Tensor((n, 4), "int32"), out: table(n, width, "out")):
        with T.Kernel(n, T.ceildiv(width, columns), threads=threads) as (row, part):
            await_producers(n * T.ceildiv(width, columns))
            for i in T.unroll(entries):
                column = part * columns + i * threads + T.get_thread_binding()
                if column < width:
                    first = T.max(pivots[row, 1], 0)
                    value = T.alloc_var("int64", init=-1)
                    if column < first:
                        value = T.cast(pivots[row, 0], "int64") + column
                    elif column - first < pivots[row, 3]:
                        value = T.cast(pivots[row, 2], "int64") + (column - first)
                    out[row, column] = T.cast(value, "int32")

    return expand


def window_kernel(threads: int, entries: int) -> Any:
    columns = threads * entries  # of a thread block
    n, width = T.dynamic("n"), T.dynamic("width")

    @T.prim_func
    def window(offset_len: T.Tensor((n, 2), "int32"), block_size: T.int32, out: table(n, width, "out")):
        with T.Kernel(n, T.ceildiv(width, columns), threads=threads) as (row, part):
            await_producers(n * T.ceildiv(width, columns))
            for i in T.unroll(entries):
                column = part * columns + i * threads + T.get_thread_binding()
                if column < width:
                    start = T.alloc_var("int32", init=offset_len[row, 0])
                    value = T.alloc_var("int64", init=-1)
                    if (start >= 0) & (column < offset_len[row, 1]):
                        inside = T.truncmod(start, block_size)
                        turned = T.truncmod(T.cast(inside, "uint32") + T.cast(column, "uint32"), T.cast(block_size, "uint32"))
                        value = T.cast(start - inside, "int64") + T.cast(turned, "int64")
                    out[row, column] = T.cast(value, "int32")

    return window
