"""Which record and which output row an item of work belongs to; expressions shared by the kernels."""

from typing import Any

from tilelang.ascend import language as T

from kvhal.backends.ascend_tilelang.codec import choose, pinned
from kvhal.backends.ascend_tilelang.compiling import THREADS


def wide(value: Any) -> Any:
    """`value` as int64; addresses and counts of items do not fit 32 bits."""
    return T.cast(value, "int64")


def trips(total: Any, core: Any, cores: Any) -> Any:
    """How often a core goes round to cover `total` (int64) items, THREADS at a time."""
    stride = wide(cores) * THREADS
    return T.cast(T.truncdiv(T.max(total - wide(core) * THREADS, 0) + stride - 1, stride), "int32")


def item_of(trip: Any, core: Any, cores: Any) -> Any:
    """This thread's item (int64) in one trip; a trip behind the last whole one has items beyond the total."""
    return pinned((wide(trip) * wide(cores) + wide(core)) * THREADS + T.get_thread_binding(), "int64")


def slot_at(slots: Any, index: Any, step: Any) -> Any:
    """int64 slot `index` out of int32 words, `step` words a slot (one: sign-extended; two: low word first)."""
    low = pinned(slots[index * wide(step)])
    high = pinned(choose(step == 2, slots[index * wide(step) + wide(step) - 1], low >> 31))
    return pinned(wide(high) << T.int64(32) | wide(T.cast(low, "uint32")), "int64")


def divided(value: Any, divisor: Any, dtype: str) -> tuple[Any, Any]:
    """Quotient and remainder of non-negative integers."""
    quotient = pinned(T.truncdiv(value, T.cast(divisor, dtype)), dtype)
    return quotient, pinned(value - quotient * T.cast(divisor, dtype), dtype)


def row_bits(rows: Any, row: Any, element: Any, words: bool) -> Any:
    """bf16 bits (int32 in [0, 0xFFFF]) of one element of a row of words or of halves."""
    if not words:
        return T.cast(rows[row, element], "int32") & 0xFFFF
    word = T.cast(rows[row, element // 2], "uint32")
    return T.cast((word >> T.cast(element % 2 * 16, "uint32")) & T.uint32(0xFFFF), "int32")
