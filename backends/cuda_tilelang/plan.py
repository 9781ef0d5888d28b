"""Load plans: one thread a segment, which finds its span by bisection and writes its row in one access where it can."""

from typing import Any

import tilelang.language as T
import torch

from kvhal.backends.cuda_tilelang.build import Kernel, aligned, await_producers, kernel, launcher
from kvhal.backends.cuda_tilelang.index import table, unsigned_quotient
from kvhal.backends.cuda_tilelang.tuned import shape_of
from kvhal.interface import Launcher, Request


def bind_expand_load_plan(request: Request) -> Launcher:
    """``launch(spans, block_tables, block_size, out)``, see `kvhal.interface`."""
    built: dict[bool, Kernel] = {}
    (threads,) = shape_of(request.platform.arch, "plan", None)

    def prepare(spans: torch.Tensor, block_tables: torch.Tensor, block_size: int, out: torch.Tensor) -> Kernel:
        wide, bits = aligned(out), spans.shape[0].bit_length()
        run = built.get(wide)
        if run is None:
            run = built[wide] = kernel(plan_kernel, 4 if wide else 1, threads, platform=request.platform, device=out.device)
        return lambda spans, block_tables, block_size, out: run(spans, block_tables, block_size, bits, out)

    return launcher(prepare)


def plan_kernel(lanes: int, threads: int) -> Any:
    """Kernel of EXPAND_LOAD_PLAN; `lanes` entries of a segment are written at once."""
    n, rows, width, count = T.dynamic("n"), T.dynamic("rows"), T.dynamic("width"), T.dynamic("count")

    @T.prim_func
    def plan(
        spans: T.Tensor((n, 5), "int32"),
        block_tables: table(rows, width, "tables"),
        block_size: T.int32,
        bits: T.int32,
        out: T.Tensor((count, 4), "int32"),
    ):
        with T.Kernel(T.ceildiv(count, threads), threads=threads) as part:
            await_producers(T.ceildiv(count, threads))
            segment = part * threads + T.get_thread_binding()
            if segment < count:
                result = T.alloc_local((4,), "int32")
                for field in T.serial(4):
                    result[field] = T.if_then_else(field == 0, -1, 0)
                before = T.alloc_var("uint32", init=0)  # spans known to begin at or before the segment
                for bit in T.serial(bits):
                    probe = T.alloc_var("uint32", init=before + (T.uint32(1) << T.cast(bits - 1 - bit, "uint32")))
                    if probe <= T.cast(n, "uint32"):  # noqa: SIM102  read only what is there
                        if spans[T.cast(probe - 1, "int64"), 0] <= segment:
                            before = probe
                if before > 0:
                    span = T.alloc_local((5,), "int32")
                    for field in T.unroll(5):  # at once: each one used first would be waited for alone
                        span[field] = spans[T.cast(before - 1, "int64"), field]
                    column = T.alloc_var("int64", init=T.cast(segment, "int64") - span[0])
                    column = column + unsigned_quotient(T.max(span[3], 0), block_size)
                    start = T.alloc_var("int64", init=column * block_size)
                    src_begin = T.alloc_var("int64", init=T.max(span[3] - start, 0))
                    src_end = T.alloc_var("int64", init=T.min(span[4] - start, T.cast(block_size, "int64")))
                    if (span[3] >= 0) & (src_begin < src_end):
                        if (span[2] >= 0) & (span[2] < rows) & (column < width):
                            result[0] = block_tables[span[2], column]
                        result[1] = T.cast(src_begin, "int32")
                        result[2] = T.cast(src_end, "int32")
                        moved = T.cast(span[1], "int64") + T.max(start - span[3], 0)
                        result[3] = T.cast(moved, "int32")
                for quarter in T.serial(4 // lanes):
                    for lane in T.vectorized(lanes):
                        out[segment, quarter * lanes + lane] = result[quarter * lanes + lane]

    return plan
