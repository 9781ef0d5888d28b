"""load_paged_kv_cache and load_kv_slots of quantised records: gather and dequantise, one thread a scale group."""

from typing import Any

import torch
from tilelang.ascend import language as T

from kvhal.backends.ascend_tilelang.addressing import divided, item_of, slot_at, trips, wide
from kvhal.backends.ascend_tilelang.codec import (
    bits_of_fp32,
    decoded_fp32,
    fp32_of_bits,
    is_plain_scale,
    pinned,
    rounded_bf16,
    scaled_bf16,
    scaled_bf16_any,
)
from kvhal.backends.ascend_tilelang.compiling import THREADS, compiler_of
from kvhal.backends.ascend_tilelang.raw import raw_load_kernel, raw_load_slots_kernel
from kvhal.backends.ascend_tilelang.record import (
    Record,
    raw_load_views,
    record_of,
    record_views,
    row_words,
    slot_words,
    unit_rows,
)
from kvhal.backends.ascend_tilelang.transfer import assume_pairs, read_codes, read_scale, write_elements
from kvhal.interface import Launcher, Request


@T.macro
def decode_codes(codes: Any, record: Record, scale: Any) -> None:
    """Replaces codes (local int32 `[record.group]`) by bf16 bits.

    `scale` is the ue8m0 byte, the e4m3 code, or the bits of an fp32 scale, as int32.
    """
    if record.sf_format == "ue8m0":
        if is_plain_scale(scale):
            for i in T.serial(record.group):
                codes[i] = scaled_bf16(codes[i], scale, record.dtype)
        else:
            for i in T.serial(record.group):
                codes[i] = scaled_bf16_any(codes[i], scale, record.dtype)
    else:
        factor = T.alloc_var("int32", init=scale)
        if record.sf_format == "e4m3":
            factor = bits_of_fp32(decoded_fp32(scale, "e4m3"))
        for i in T.serial(record.group):
            codes[i] = rounded_bf16(decoded_fp32(codes[i], record.dtype) * fp32_of_bits(factor))


@T.macro
def load_group(out: Any, row: Any, record: Record, group: Any, data: Any, sf: Any, block: Any, token: Any, words: bool) -> None:
    """Dequantises one group of a valid record into a row."""
    codes = T.alloc_local((record.group,), "int32")
    read_codes(codes, data, block, token, group, record)
    decode_codes(codes, record, read_scale(sf, block, token, group, record))
    write_elements(out, row, group, codes, record, words)


@T.macro
def zero_group(out: Any, row: Any, record: Record, group: Any, words: bool) -> None:
    """Writes zeros where `load_group` would write a record."""
    zeros = T.alloc_local((record.group,), "int32")
    for i in T.serial(record.group):
        zeros[i] = 0
    write_elements(out, row, group, zeros, record, words)


def load_kernel(record: Record, words: bool) -> Any:
    """Kernel of LOAD for a quantised record that dequantises; output rows of words or of halves."""
    segments, blocks, tokens, rows = (T.dynamic(name) for name in ("segments", "blocks", "tokens", "rows"))
    out_step, data_step, sf_step = (T.dynamic(name, "int64") for name in ("out_step", "data_step", "sf_step"))
    out_width, out_type = (record.elements // 2, "int32") if words else (record.elements, "int16")

    @T.prim_func
    def load(
        plan: T.Tensor((segments, 4), "int32"),
        data: T.StridedTensor((blocks, tokens, record.data_units), (data_step, record.data_stride, 1), record.unit_type),
        sf: T.StridedTensor((blocks, tokens, record.sf_bytes), (sf_step, record.sf_stride, 1), "uint8"),
        out: T.StridedTensor((rows, out_width), (out_step, 1), out_type),
        cores: T.int32,
    ):
        with T.Kernel(cores) as core, T.SimtVF(threads=THREADS):
            assume_pairs(out_step, data_step, record, words)
            total = wide(segments) * tokens * record.groups
            for trip in T.serial(trips(total, core, cores)):
                item = item_of(trip, core, cores)
                if item < total:
                    place, part = divided(item, record.groups, "int64")
                    segment, step = divided(place, tokens, "int64")
                    group = pinned(T.cast(part, "int32"))
                    begin = pinned(plan[segment, 1])
                    token = pinned(T.max(wide(begin), 0) + step, "int64")
                    row = pinned(wide(plan[segment, 3]) - wide(begin) + token, "int64")
                    if token < T.min(wide(plan[segment, 2]), wide(tokens)) and row >= 0 and row < wide(rows):
                        block = pinned(plan[segment, 0])
                        if block >= 0 and block < blocks:
                            load_group(out, row, record, group, data, sf, wide(block), token, words)
                        else:
                            zero_group(out, row, record, group, words)

    return load


def load_slots_kernel(record: Record, words: bool) -> Any:
    """Kernel of LOAD_SLOTS for a quantised record; output rows of words or of halves."""
    n, slot_count, blocks, tokens = (T.dynamic(name) for name in ("n", "slot_count", "blocks", "tokens"))
    out_step, data_step, sf_step = (T.dynamic(name, "int64") for name in ("out_step", "data_step", "sf_step"))
    out_width, out_type = (record.elements // 2, "int32") if words else (record.elements, "int16")

    @T.prim_func
    def load_slots(
        slots: T.Tensor((slot_count,), "int32"),
        data: T.StridedTensor((blocks, tokens, record.data_units), (data_step, record.data_stride, 1), record.unit_type),
        sf: T.StridedTensor((blocks, tokens, record.sf_bytes), (sf_step, record.sf_stride, 1), "uint8"),
        out: T.StridedTensor((n, out_width), (out_step, 1), out_type),
        slot_step: T.int32,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core, T.SimtVF(threads=THREADS):
            assume_pairs(out_step, data_step, record, words)
            total = wide(n) * record.groups
            for trip in T.serial(trips(total, core, cores)):
                item = item_of(trip, core, cores)
                if item < total:
                    row, part = divided(item, record.groups, "int64")
                    group = pinned(T.cast(part, "int32"))
                    slot = slot_at(slots, row, slot_step)
                    if slot >= 0 and slot < wide(blocks) * tokens:
                        block, token = divided(slot, tokens, "int64")
                        load_group(out, row, record, group, data, sf, block, token, words)
                    else:
                        zero_group(out, row, record, group, words)

    return load_slots


def bind_load(request: Request) -> Launcher:
    """Launcher of LOAD; the contract is in `kvhal.interface`."""
    compiler, layout = compiler_of(request), request.layout
    if layout is None or layout.quantized_dtype is None or layout.is_index:

        def launch_raw(
            cache: torch.Tensor, segments: torch.Tensor, total_k: int, out: torch.Tensor, out_sf: torch.Tensor | None
        ) -> None:
            unit, views = raw_load_views(cache, layout, out[:total_k], None if out_sf is None else out_sf[:total_k])
            compiler.kernel(raw_load_kernel, unit)(segments, *views, compiler.cores)

        return launch_raw
    record = record_of(layout)

    def launch(
        cache: torch.Tensor, segments: torch.Tensor, total_k: int, out: torch.Tensor, out_sf: torch.Tensor | None
    ) -> None:
        rows, words = row_words(out[:total_k], record.group)
        data, sf = record_views(cache, layout, record.unit)
        compiler.kernel(load_kernel, record, words)(segments, data, sf, rows, compiler.cores)

    return launch


def bind_load_slots(request: Request) -> Launcher:
    """Launcher of LOAD_SLOTS; the contract is in `kvhal.interface`."""
    compiler, layout = compiler_of(request), request.layout
    if layout is None or layout.quantized_dtype is None:

        def launch_raw(cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
            unit, (data, rows) = unit_rows(cache[:, :, 0], out)
            kernel = compiler.kernel(raw_load_slots_kernel, unit)
            kernel(slot_words(slots), data, rows, slots.element_size() // 4, compiler.cores)

        return launch_raw
    record = record_of(layout)

    def launch(cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
        rows, words = row_words(out, record.group)
        data, sf = record_views(cache, layout, record.unit)
        kernel = compiler.kernel(load_slots_kernel, record, words)
        kernel(slot_words(slots), data, sf, rows, slots.element_size() // 4, compiler.cores)

    return launch
