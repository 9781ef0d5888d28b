"""The fp32 stages of a fused store, on rows that lie in the unified buffer of a core.

LANES threads share a row. Each stage leaves a barrier between its accesses and the next stage's; every thread of the
region passes every barrier, also threads whose row is behind the last one. The order of the fp32 operations is fixed
(docs/numerics.md).
"""

from typing import Any

from tilelang.ascend import language as T

from kvhal.backends.ascend_tilelang.addressing import wide
from kvhal.backends.ascend_tilelang.codec import fp32_of_bits, pinned
from kvhal.backends.ascend_tilelang.exact import divided_by, reciprocal, square_root

LANES = 32


def padded(elements: int) -> int:
    """Elements of a row, rounded up so that every lane owns equally many, a power of two."""
    return max(LANES, 1 << (elements - 1).bit_length())


def fp32_at(halves: Any, place: tuple[Any, ...], step: Any) -> Any:
    """fp32 of element `place` of a bf16 or fp32 tensor viewed as int16, `step` halves an element (two: low half first).

    A bf16 is the upper half of its fp32, so the last half of either is the upper one.
    """
    *outer, element = place
    upper = T.cast(T.cast(halves[(*outer, element * step + step - 1)], "uint16"), "uint32") << T.uint32(16)
    lower = T.cast(T.cast(halves[(*outer, element * step)], "uint16"), "uint32")
    return fp32_of_bits(upper | T.if_then_else(step == 2, lower, T.uint32(0)))


@T.macro
def read_row(x: Any, place: Any, lane: Any, kv: Any, row: Any, step: Any, elements: int) -> None:
    """Widens row `row` of kv, which exists, into `x[place, :]`."""
    for i in T.serial((elements + LANES - 1) // LANES):
        element = pinned(i * LANES + lane)
        if element < elements:
            x[place, element] = fp32_at(kv, (row, wide(element)), wide(step))


@T.macro
def tree_sum(values: Any, count: int) -> None:
    """Sums `count` local values, a power of two, as a tree over adjacent pairs into the first of them."""
    for level in range(count.bit_length() - 1):
        for i in T.serial(count >> (level + 1)):
            values[i] = values[2 * i] + values[2 * i + 1]


@T.macro
def rms_norm(x: Any, sums: Any, place: Any, lane: Any, weight: Any, step: Any, eps: Any, elements: int) -> None:
    """`x[place, :]` times 1 / sqrt(mean(x^2) + eps), times weight; `sums[place, :]` is room for one value a lane.

    The tree of the sum is cut in two: the adjacent elements that a lane owns, then the adjacent lanes, which every lane
    adds up for itself rather than waiting for one to do it.
    """
    own = padded(elements) // LANES
    squares = T.alloc_local((own,), "float32")
    for i in T.serial(own):
        squares[i] = T.float32(0.0)
        if lane * own + i < elements:
            squares[i] = x[place, lane * own + i] * x[place, lane * own + i]
    tree_sum(squares, own)
    sums[place, lane] = squares[0]
    T.sync_threads()
    partial = T.alloc_local((LANES,), "float32")
    for i in T.serial(LANES):
        partial[i] = sums[place, i]
    tree_sum(partial, LANES)
    mean = pinned(divided_by(pinned(partial[0], "float32"), elements), "float32")
    factor = pinned(reciprocal(pinned(square_root(pinned(mean + eps, "float32")), "float32")), "float32")
    for i in T.serial(own):
        if lane * own + i < elements:
            scaled = pinned(x[place, lane * own + i] * factor, "float32")
            x[place, lane * own + i] = scaled * fp32_at(weight, (lane * own + i,), step)


@T.macro
def rope(x: Any, place: Any, lane: Any, angles: Any, position: Any, positions: Any, half: Any, neox: Any, first: Any) -> None:
    """Rotates 2 * half elements of `x[place, :]` from element `first` on.

    `angles` holds `half` cosines and `half` sines for each of `positions` positions; both read as zero for another one.
    """
    for i in T.serial(T.truncdiv(half + LANES - 1, LANES)):
        pair = pinned(i * LANES + lane)
        if pair < half:
            cosine = T.alloc_var("float32", init=T.float32(0.0))
            sine = T.alloc_var("float32", init=T.float32(0.0))
            if position >= 0 and position < wide(positions):
                cosine = angles[position, pair]
                sine = angles[position, half + pair]
            at = pinned(first + T.if_then_else(neox == 1, pair, 2 * pair))
            other = pinned(at + T.if_then_else(neox == 1, half, 1))
            a = pinned(x[place, at], "float32")
            b = pinned(x[place, other], "float32")
            x[place, at] = pinned(a * cosine, "float32") - pinned(b * sine, "float32")
            x[place, other] = pinned(b * cosine, "float32") + pinned(a * sine, "float32")


@T.macro
def hadamard(x: Any, place: Any, lane: Any, elements: int) -> None:
    """Normalised Walsh-Hadamard transform of `x[place, :]`, elements a power of two; one barrier a level."""
    for level in T.serial(elements.bit_length() - 1):
        for i in T.serial((elements // 2 + LANES - 1) // LANES):
            pair = pinned(i * LANES + lane)
            if pair < elements // 2:
                at = pinned(((pair >> level) << (level + 1)) + (pair & ((T.int32(1) << level) - 1)))
                other = pinned(at + (T.int32(1) << level))
                a = pinned(x[place, at], "float32")
                b = pinned(x[place, other], "float32")
                x[place, at] = a + b
                x[place, other] = a - b
        T.sync_threads()
    for i in T.serial((elements + LANES - 1) // LANES):
        element = pinned(i * LANES + lane)
        if element < elements:
            x[place, element] = x[place, element] * T.float32(elements**-0.5)
