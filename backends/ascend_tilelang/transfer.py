"""One scale group between global memory and a thread's own array, 8 bytes an access wherever alignment allows."""

from typing import Any

from tilelang.ascend import language as T

from kvhal.backends.ascend_tilelang.addressing import row_bits
from kvhal.backends.ascend_tilelang.record import Record

PAIR = 2  #: words of the widest access that the compiler generates for a SIMT region


@T.macro
def read_elements(bits: Any, rows: Any, row: Any, group: Any, record: Record, words: bool) -> None:
    """bf16 bits (local int32 `[record.group]`) of one group of a row; zeros behind a shorter last group."""
    if words and not record.ragged:
        staged = T.alloc_local((record.group // 2,), "int32")
        for i in T.serial(record.group // 2 // PAIR):
            for k in T.vectorized(PAIR):
                staged[i * PAIR + k] = rows[row, group * (record.group // 2) + i * PAIR + k]
        for i in T.serial(record.group // 2):
            bits[2 * i] = staged[i] & 0xFFFF
            bits[2 * i + 1] = (staged[i] >> 16) & 0xFFFF
    else:
        for i in T.serial(record.group):
            bits[i] = 0
            if not record.ragged or group * record.group + i < record.elements:
                bits[i] = row_bits(rows, row, group * record.group + i, words)


@T.macro
def write_elements(rows: Any, row: Any, group: Any, bits: Any, record: Record, words: bool) -> None:
    """Writes bf16 bits (local int32 `[record.group]`) as one group of a row."""
    if words:
        staged = T.alloc_local((record.group // 2,), "int32")
        for i in T.serial(record.group // 2):
            staged[i] = T.cast(T.cast(bits[2 * i], "uint32") | T.cast(bits[2 * i + 1], "uint32") << T.uint32(16), "int32")
        if not record.ragged:
            for i in T.serial(record.group // 2 // PAIR):
                for k in T.vectorized(PAIR):
                    rows[row, group * (record.group // 2) + i * PAIR + k] = staged[i * PAIR + k]
        else:
            for i in T.serial(record.group // 2):
                if group * record.group + 2 * i < record.elements:
                    rows[row, group * (record.group // 2) + i] = staged[i]
    else:
        for i in T.serial(record.group):
            if not record.ragged or group * record.group + i < record.elements:
                rows[row, group * record.group + i] = T.cast(bits[i], "int16")


@T.macro
def read_codes(codes: Any, data: Any, block: Any, token: Any, group: Any, record: Record) -> None:
    """Unpacks one group's codes into local int32 `[record.group]`."""
    units = T.alloc_local((record.group_units,), record.unit_type)
    if record.paired:
        for i in T.serial(record.group_units // PAIR):
            for k in T.vectorized(PAIR):
                units[i * PAIR + k] = data[block, token, group * record.group_units + i * PAIR + k]
    else:
        for u in T.serial(record.group_units):
            units[u] = T.cast(0, record.unit_type)
            if not record.ragged or group * record.group_units + u < record.data_units:
                units[u] = data[block, token, group * record.group_units + u]
    for u in T.serial(record.group_units):
        for j in T.serial(record.per_unit):
            code = T.cast(units[u], "uint32") >> T.cast(j * record.bits, "uint32")
            codes[u * record.per_unit + j] = T.cast(code & T.uint32((1 << record.bits) - 1), "int32")


@T.macro
def write_codes(data: Any, block: Any, token: Any, group: Any, codes: Any, record: Record) -> None:
    """Packs one group's codes (local int32 `[record.group]`) into the record."""
    units = T.alloc_local((record.group_units,), record.unit_type)
    for u in T.serial(record.group_units):
        unit = T.alloc_var("uint32", init=T.uint32(0))
        for j in T.serial(record.per_unit):
            code = T.cast(codes[u * record.per_unit + j], "uint32")
            unit = unit | (code << T.cast(j * record.bits, "uint32"))
        units[u] = T.cast(unit, record.unit_type)
    if record.paired:
        for i in T.serial(record.group_units // PAIR):
            for k in T.vectorized(PAIR):
                data[block, token, group * record.group_units + i * PAIR + k] = units[i * PAIR + k]
    else:
        for u in T.serial(record.group_units):
            if not record.ragged or group * record.group_units + u < record.data_units:
                data[block, token, group * record.group_units + u] = units[u]


@T.macro
def read_scale(sf: Any, block: Any, token: Any, group: Any, record: Record) -> Any:
    """One scale factor's bytes as an int32."""
    scale = T.alloc_var("int32", init=0)
    for i in T.serial(record.sf_item):
        byte = T.cast(sf[block, token, group * record.sf_item + i], "uint32")
        scale = scale | T.cast(byte << T.cast(i * 8, "uint32"), "int32")
    return scale


@T.macro
def write_scale(sf: Any, block: Any, token: Any, group: Any, stored: Any, record: Record) -> None:
    """Writes one scale factor's bytes."""
    for i in T.serial(record.sf_item):
        sf[block, token, group * record.sf_item + i] = T.cast((stored >> (i * 8)) & 0xFF, "uint8")


@T.macro
def assume_pairs(row_step: Any, data_step: Any, record: Record, words: bool) -> None:
    """Tells the compiler what `row_words` and `Record.paired` have made sure of: that pairs of words are aligned."""
    if words:
        T.assume(row_step % PAIR == 0)
    if record.paired:
        T.assume(data_step % PAIR == 0)
