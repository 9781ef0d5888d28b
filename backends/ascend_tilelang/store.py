"""store_kv_cache: quantise rows and scatter them, one thread a scale group, no barrier."""

from typing import Any

import torch
from tilelang.ascend import language as T

from kvhal.backends.ascend_tilelang.addressing import divided, item_of, slot_at, trips, wide
from kvhal.backends.ascend_tilelang.codec import (
    BF16_INF,
    BF16_MAGNITUDE,
    capped_amax,
    code_of,
    e4m3_of_amax,
    fp32_of_bits,
    pinned,
    poisoned_scale,
    reciprocal_of_e4m3,
    ue8m0_of_amax,
)
from kvhal.backends.ascend_tilelang.compiling import THREADS, compiler_of
from kvhal.backends.ascend_tilelang.exact import fp32_of_amax, reciprocal_bits
from kvhal.backends.ascend_tilelang.raw import raw_store_kernel
from kvhal.backends.ascend_tilelang.record import (
    Record,
    record_of,
    record_views,
    row_words,
    slot_words,
    unit_rows,
)
from kvhal.backends.ascend_tilelang.transfer import assume_pairs, read_elements, write_codes, write_scale
from kvhal.interface import Launcher, Request


@T.macro
def quantise_group(bits: Any, record: Record) -> Any:
    """Replaces a group's bf16 bits (local int32 `[record.group]`, zeros behind a shorter last group) by codes.

    Returns the scale as the record holds it: a byte, or the bits of an fp32 scale.
    """
    amax = T.alloc_var("int32", init=0)
    largest = T.alloc_var("int32", init=0)
    for i in T.serial(record.group):
        magnitude = pinned(bits[i] & BF16_MAGNITUDE)
        largest = T.max(largest, magnitude)
        amax = T.max(amax, capped_amax(magnitude))
    stored = T.alloc_var("int32", init=0)
    factor = T.alloc_var("float32", init=0)
    if record.sf_format == "ue8m0":
        stored = ue8m0_of_amax(amax, record.dtype)
    elif record.sf_format == "e4m3":
        stored = e4m3_of_amax(amax)
        factor = reciprocal_of_e4m3(stored)
    else:
        stored = fp32_of_amax(amax)
        factor = fp32_of_bits(reciprocal_bits(stored))
    for i in T.serial(record.group):
        bits[i] = code_of(bits[i], stored if record.sf_format == "ue8m0" else factor, record.dtype, record.sf_format)
    # e2m1 has no NaN: the scale says it, and the codes are zero.
    if record.dtype == "e2m1" and largest > BF16_INF:
        stored = poisoned_scale(record.sf_format)
        for i in T.serial(record.group):
            bits[i] = 0
    return stored


def store_kernel(record: Record, words: bool) -> Any:
    """Kernel of STORE for a quantised record; rows of words or of halves, as `row_words` says."""
    n, slot_count, blocks, tokens = (T.dynamic(name) for name in ("n", "slot_count", "blocks", "tokens"))
    kv_step, data_step, sf_step = (T.dynamic(name, "int64") for name in ("kv_step", "data_step", "sf_step"))
    kv_width, kv_type = (record.elements // 2, "int32") if words else (record.elements, "int16")

    @T.prim_func
    def store(
        kv: T.StridedTensor((n, kv_width), (kv_step, 1), kv_type),
        slots: T.Tensor((slot_count,), "int32"),
        data: T.StridedTensor((blocks, tokens, record.data_units), (data_step, record.data_stride, 1), record.unit_type),
        sf: T.StridedTensor((blocks, tokens, record.sf_bytes), (sf_step, record.sf_stride, 1), "uint8"),
        slot_step: T.int32,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core, T.SimtVF(threads=THREADS):
            assume_pairs(kv_step, data_step, record, words)
            total = wide(n) * record.groups
            for trip in T.serial(trips(total, core, cores)):
                item = item_of(trip, core, cores)
                if item < total:
                    row, part = divided(item, record.groups, "int64")
                    group = pinned(T.cast(part, "int32"))
                    slot = slot_at(slots, row, slot_step)
                    if slot >= 0 and slot < wide(blocks) * tokens:
                        block, token = divided(slot, tokens, "int64")
                        bits = T.alloc_local((record.group,), "int32")
                        read_elements(bits, kv, row, group, record, words)
                        write_scale(sf, block, token, group, quantise_group(bits, record), record)
                        write_codes(data, block, token, group, bits, record)

    return store


def bind_store(request: Request) -> Launcher:
    """Launcher of STORE; the contract is in `kvhal.interface`."""
    compiler, layout = compiler_of(request), request.layout
    if layout is None or layout.quantized_dtype is None:

        def launch_raw(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
            unit, (rows, data) = unit_rows(kv, cache[:, :, 0])
            kernel = compiler.kernel(raw_store_kernel, unit)
            kernel(rows, slot_words(slots), data, slots.element_size() // 4, compiler.cores)

        return launch_raw
    record = record_of(layout)

    def launch(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        rows, words = row_words(kv, record.group)
        data, sf = record_views(cache, layout, record.unit)
        kernel = compiler.kernel(store_kernel, record, words)
        kernel(rows, slot_words(slots), data, sf, slots.element_size() // 4, compiler.cores)

    return launch
