"""Kernels that move whole rows without looking at them: bf16 records, and the raw loads of index records.

A unit is an int32 word or a byte, whichever all rows allow; a thread moves RUN consecutive units.
"""

from typing import Any

from tilelang.ascend import language as T

from kvhal.backends.ascend_tilelang.addressing import divided, item_of, slot_at, trips, wide
from kvhal.backends.ascend_tilelang.codec import choose, pinned
from kvhal.backends.ascend_tilelang.compiling import THREADS

RUN = 4


@T.macro
def copy_run(out: Any, row: Any, source: Any, block: Any, token: Any, run: Any, width: Any) -> None:
    """`out[row, :]` = the cache's row at (block, token), one run of it."""
    for i in T.serial(RUN):
        if run * RUN + i < width:
            out[row, run * RUN + i] = source[block, token, run * RUN + i]


@T.macro
def zero_run(out: Any, row: Any, run: Any, width: Any) -> None:
    """`out[row, :]` = 0, one run of it."""
    for i in T.serial(RUN):
        if run * RUN + i < width:
            out[row, run * RUN + i] = 0


def runs_of(width: Any) -> Any:
    """Runs that cover `width` units."""
    return T.truncdiv(width + RUN - 1, RUN)


def raw_store_kernel(unit: str) -> Any:
    """Kernel of STORE for unquantised records."""
    n, width, slot_count, blocks, tokens = (T.dynamic(name) for name in ("n", "width", "slot_count", "blocks", "tokens"))
    kv_step, data_step, token_step = (T.dynamic(name, "int64") for name in ("kv_step", "data_step", "token_step"))

    @T.prim_func
    def raw_store(
        kv: T.StridedTensor((n, width), (kv_step, 1), unit),
        slots: T.Tensor((slot_count,), "int32"),
        data: T.StridedTensor((blocks, tokens, width), (data_step, token_step, 1), unit),
        slot_step: T.int32,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core, T.SimtVF(threads=THREADS):
            runs = pinned(runs_of(width))
            total = wide(n) * runs
            for trip in T.serial(trips(total, core, cores)):
                item = item_of(trip, core, cores)
                if item < total:
                    row, run = divided(item, runs, "int64")
                    slot = slot_at(slots, row, slot_step)
                    if slot >= 0 and slot < wide(blocks) * tokens:
                        block, token = divided(slot, tokens, "int64")
                        for i in T.serial(RUN):
                            if run * RUN + i < width:
                                data[block, token, run * RUN + i] = kv[row, run * RUN + i]

    return raw_store


def raw_load_slots_kernel(unit: str) -> Any:
    """Kernel of LOAD_SLOTS for unquantised records."""
    n, width, slot_count, blocks, tokens = (T.dynamic(name) for name in ("n", "width", "slot_count", "blocks", "tokens"))
    out_step, data_step, token_step = (T.dynamic(name, "int64") for name in ("out_step", "data_step", "token_step"))

    @T.prim_func
    def raw_load_slots(
        slots: T.Tensor((slot_count,), "int32"),
        data: T.StridedTensor((blocks, tokens, width), (data_step, token_step, 1), unit),
        out: T.StridedTensor((n, width), (out_step, 1), unit),
        slot_step: T.int32,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core, T.SimtVF(threads=THREADS):
            runs = pinned(runs_of(width))
            total = wide(n) * runs
            for trip in T.serial(trips(total, core, cores)):
                item = item_of(trip, core, cores)
                if item < total:
                    row, run = divided(item, runs, "int64")
                    slot = slot_at(slots, row, slot_step)
                    if slot >= 0 and slot < wide(blocks) * tokens:
                        block, token = divided(slot, tokens, "int64")
                        copy_run(out, row, data, block, token, run, width)
                    else:
                        zero_run(out, row, run, width)

    return raw_load_slots


def raw_load_kernel(unit: str) -> Any:
    """Kernel of LOAD for records that are not dequantised; `sf` and `out_sf` may be zero units wide."""
    segments, blocks, tokens, rows = (T.dynamic(name) for name in ("segments", "blocks", "tokens", "rows"))
    width, sf_width = T.dynamic("width"), T.dynamic("sf_width")
    data_step, data_row, sf_step, sf_row = (T.dynamic(s, "int64") for s in ("data_step", "data_row", "sf_step", "sf_row"))
    out_step, out_sf_step = T.dynamic("out_step", "int64"), T.dynamic("out_sf_step", "int64")

    @T.prim_func
    def raw_load(
        plan: T.Tensor((segments, 4), "int32"),
        data: T.StridedTensor((blocks, tokens, width), (data_step, data_row, 1), unit),
        sf: T.StridedTensor((blocks, tokens, sf_width), (sf_step, sf_row, 1), unit),
        out: T.StridedTensor((rows, width), (out_step, 1), unit),
        out_sf: T.StridedTensor((rows, sf_width), (out_sf_step, 1), unit),
        cores: T.int32,
    ):
        with T.Kernel(cores) as core, T.SimtVF(threads=THREADS):
            data_runs = pinned(runs_of(width))
            runs = pinned(data_runs + runs_of(sf_width))
            total = wide(segments) * tokens * runs
            for trip in T.serial(trips(total, core, cores)):
                item = item_of(trip, core, cores)
                if item < total:
                    place, part = divided(item, runs, "int64")
                    segment, step = divided(place, tokens, "int64")
                    begin = pinned(plan[segment, 1])
                    token = pinned(T.max(wide(begin), 0) + step, "int64")
                    row = pinned(wide(plan[segment, 3]) - wide(begin) + token, "int64")
                    if token < T.min(wide(plan[segment, 2]), wide(tokens)) and row >= 0 and row < wide(rows):
                        block = pinned(plan[segment, 0])
                        known = pinned(choose(block >= 0, choose(block < blocks, 1, 0), 0))
                        if part < wide(data_runs):
                            if known == 1:
                                copy_run(out, row, data, wide(block), token, part, width)
                            else:
                                zero_run(out, row, part, width)
                        else:
                            if known == 1:
                                copy_run(out_sf, row, sf, wide(block), token, part - wide(data_runs), sf_width)
                            else:
                                zero_run(out_sf, row, part - wide(data_runs), sf_width)

    return raw_load
