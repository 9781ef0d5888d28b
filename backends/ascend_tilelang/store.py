"""store_kv_cache: quantise rows and scatter them, one thread a scale group, no barrier."""

from typing import Any

from tilelang.ascend import language as T

from kvhal.backends.ascend_tilelang.addressing import divided, item_of, row_bits, slot_at, trips, wide
from kvhal.backends.ascend_tilelang.codec import (
    BF16_INF,
    BF16_MAGNITUDE,
    capped_amax,
    code_of,
    e4m3_of_amax,
    fp32_of_amax,
    pinned,
    poisoned_scale,
    reciprocal_of_e4m3,
    reciprocal_of_fp32,
    ue8m0_of_amax,
)
from kvhal.backends.ascend_tilelang.compiling import THREADS
from kvhal.backends.ascend_tilelang.record import Record


@T.macro
def store_group(bits: Any, record: Record, group: Any, data: Any, sf: Any, block: Any, token: Any) -> None:
    """Quantises one group and writes its codes and its scale.

    Args:
        bits: local int32 `[record.group]`, bf16 bits of the group's elements, zeros behind a shorter last group.
        group: which group of the record.
        data, sf: the cache's views; block, token: the record's place, valid.
    """
    amax = T.alloc_var("int32", init=0)
    largest = T.alloc_var("int32", init=0)
    for i in T.serial(record.group):
        magnitude = pinned(bits[i] & BF16_MAGNITUDE)
        largest = T.max(largest, magnitude)
        amax = T.max(amax, capped_amax(magnitude))
    scale = T.alloc_var("float32" if record.sf_format != "ue8m0" else "int32", init=0)
    keep = T.alloc_var("int32", init=-1)
    if record.sf_format == "fp32":
        stored = T.alloc_var("int32", init=fp32_of_amax(amax))
        scale = reciprocal_of_fp32(stored)
        for i in T.serial(4):
            sf[block, token, group * 4 + i] = T.cast((stored >> (i * 8)) & 0xFF, "uint8")
    else:
        stored = T.alloc_var(
            "int32", init=ue8m0_of_amax(amax, record.dtype) if record.sf_format == "ue8m0" else e4m3_of_amax(amax)
        )
        if record.sf_format == "ue8m0":
            scale = stored
        else:
            scale = reciprocal_of_e4m3(stored)
        if record.dtype == "e2m1":
            if largest > BF16_INF:
                stored = poisoned_scale(record.sf_format)
                keep = 0
        sf[block, token, group] = T.cast(stored, "uint8")
    for u in T.serial(record.group_units):
        if not record.ragged or group * record.group_units + u < record.data_units:
            unit = T.alloc_var("uint32", init=T.uint32(0))
            for j in range(record.per_unit):
                code = code_of(bits[u * record.per_unit + j], scale, record.dtype, record.sf_format) & keep
                unit = unit | T.cast(code, "uint32") << T.uint32(j * record.bits)
            data[block, token, group * record.group_units + u] = T.cast(unit, record.unit_type)


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
                        for i in T.serial(record.group):
                            bits[i] = 0
                            if not record.ragged or group * record.group + i < record.elements:
                                bits[i] = row_bits(kv, row, group * record.group + i, words)
                        store_group(bits, record, group, data, sf, block, token)

    return store
