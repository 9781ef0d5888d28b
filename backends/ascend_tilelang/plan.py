"""Load plans, one thread a segment, which finds its span by bisection."""

from typing import Any

import torch
from tilelang.ascend import language as T

from kvhal.backends.ascend_tilelang.addressing import divided, item_of, trips, wide
from kvhal.backends.ascend_tilelang.codec import pinned
from kvhal.backends.ascend_tilelang.compiling import THREADS, compiler_of
from kvhal.backends.ascend_tilelang.index import low_bits
from kvhal.interface import Launcher, Request


def plan_kernel() -> Any:
    """Kernel of EXPAND_LOAD_PLAN."""
    n, rows, width, count = (T.dynamic(name) for name in ("n", "rows", "width", "count"))
    table_step = T.dynamic("table_step", "int64")

    @T.prim_func
    def expand_load_plan(
        spans: T.Tensor((n, 5), "int32"),
        tables: T.StridedTensor((rows, width), (table_step, 1), "int32"),
        out: T.Tensor((count, 4), "int32"),
        block_size: T.int64,
        bits: T.int32,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core, T.SimtVF(threads=THREADS):
            for trip in T.serial(trips(wide(count), core, cores)):
                segment = item_of(trip, core, cores)
                if segment < wide(count):
                    before = T.alloc_var("int64", init=T.int64(0))  # spans known to begin at or before the segment
                    for bit in T.serial(bits):
                        probe = pinned(before + (T.int64(1) << wide(bits - 1 - bit)), "int64")
                        if probe <= wide(n):  # noqa: SIM102  read only what is there
                            if wide(spans[probe - 1, 0]) <= segment:
                                before = probe
                    block = T.alloc_var("int32", init=-1)
                    src_begin = T.alloc_var("int64", init=T.int64(0))
                    src_end = T.alloc_var("int64", init=T.int64(0))
                    dst = T.alloc_var("int64", init=T.int64(0))
                    if before > 0:
                        begin = pinned(wide(spans[before - 1, 3]), "int64")
                        first_column, _ = divided(T.max(begin, 0), block_size, "int64")
                        column = pinned(first_column + segment - wide(spans[before - 1, 0]), "int64")
                        start = pinned(column * block_size, "int64")
                        low = pinned(T.max(begin - start, 0), "int64")
                        high = pinned(T.min(wide(spans[before - 1, 4]) - start, block_size), "int64")
                        if begin >= 0 and low < high:
                            row = pinned(spans[before - 1, 2])
                            if row >= 0 and row < rows and column < wide(width):
                                block = tables[row, column]
                            src_begin = low
                            src_end = high
                            dst = wide(spans[before - 1, 1]) + T.max(start - begin, 0)
                    out[segment, 0] = block
                    out[segment, 1] = low_bits(src_begin)
                    out[segment, 2] = low_bits(src_end)
                    out[segment, 3] = low_bits(dst)

    return expand_load_plan


def bind_expand_load_plan(request: Request) -> Launcher:
    """Launcher of EXPAND_LOAD_PLAN; the contract is in `kvhal.interface`."""
    compiler = compiler_of(request)
    kernel = compiler.kernel(plan_kernel)

    def launch(spans: torch.Tensor, block_tables: torch.Tensor, block_size: int, out: torch.Tensor) -> None:
        kernel(spans, block_tables, out, block_size, spans.shape[0].bit_length(), compiler.cores)

    return launch
