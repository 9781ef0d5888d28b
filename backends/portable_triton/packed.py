"""Rows two bf16 to a register, for devices whose casts are proven (`rec.native`): the fused store's short way to e4m3 codes.

A row lies over eight lanes: a lane holds octets of eight elements, 64 elements apart, so that a warp's access is whole lines
of four rows, scalars of a row are computed once a lane, and the elements that a rotation leaves alone lie in registers of
their own. Tensors of this shape are
[8, T, octets of a lane, items of an octet]: in this order of sizes the compiler gives the eight to lanes first, then rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal.backends.portable_triton.codec import (
    BF16_HIGH,
    BF16_LOW,
    BF16_MANTISSA_BITS,
    BF16_SHIFT,
    FP32_INF,
    FP32_MAGNITUDE,
    larger_of_pairs,
    scale_e4m3,
    without_inf,
)

HALVES = tl.constexpr(0x00010001)  #: times a number below 2**16: the number in both halves
BYTES = tl.constexpr(0x00FF00FF)
MAGNITUDES = tl.constexpr(0x7FFF7FFF)
TWICE_BIASES = tl.constexpr(0x00FE00FE)


@triton.jit
def first_of_lane(width: tl.constexpr):
    """Item int32 [8, 1, 1, 1] at which a lane's octets begin, of rows that have `width` items an octet."""
    return (tl.arange(0, 8) * width)[:, None, None, None]


@triton.jit
def item_of_lane(rec: tl.constexpr, width: tl.constexpr):
    """Items int32 [1, 1, octets, width] of a lane from its first one on: constants, apart so that they stay immediate."""
    octets: tl.constexpr = rec.tile // 64
    return (tl.arange(0, octets) * (8 * width))[None, None, :, None] + tl.arange(0, width)[None, None, None, :]


@triton.jit
def addresses(base, rec: tl.constexpr, width: tl.constexpr):
    """Pointers [8, T, octets, width] to the items of rows at `base` (pointers [T])."""
    return (base[None, :, None, None] + first_of_lane(width)) + item_of_lane(rec, width)


@triton.jit
def rows_of(items):
    """[T, octets * 8 * width] of items [8, T, octets, width]; nothing changes lanes."""
    shape: tl.constexpr = (items.shape[1], items.shape[0] * items.shape[2] * items.shape[3])
    return tl.reshape(tl.permute(items, (1, 2, 0, 3)), shape)


@triton.jit
def items_of(rows, width: tl.constexpr):
    """The reverse of `rows_of`."""
    octets: tl.constexpr = rows.shape[1] // (8 * width)
    return tl.permute(tl.reshape(rows, (rows.shape[0], octets, 8, width)), (2, 0, 1, 3))


@triton.jit
def pair_bf16(low, high):
    """bf16 of two fp32, nearest even, every NaN 0x7FFF, as the halves of an int32."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def lower_halves(left, right):
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [left, right], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def upper_halves(left, right):
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [left, right], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def larger_halves(left, right):
    """Of two pairs of unsigned 16-bit halves, the larger of each."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [left, right], dtype=tl.int32, is_pure=True, pack=1)


def _widened(first: str, second: str) -> str:
    """PTX: two pairs of bf16 as four fp32, la, ha, lb, hb."""
    return f"""shl.b32 la, {first}, 16;
        and.b32 ha, {first}, 0xFFFF0000;
        shl.b32 lb, {second}, 16;
        and.b32 hb, {second}, 0xFFFF0000;
        """


_REGISTERS = "{ .reg .b32 a, b, la, ha, lb, hb; .reg .b16 c, d;\n"
_CODES = """cvt.rn.satfinite.e4m3x2.f32 c, ha, la;
        cvt.rn.satfinite.e4m3x2.f32 d, hb, lb;
        mov.b32 $0, {c, d}; }"""  #: PTX: la, ha, lb, hb as four codes
_SCALED = "mul.rn.bf16x2 a, $1, $3;\nmul.rn.bf16x2 b, $2, $3;\n"
_MULTIPLIED = "".join(f"mul.rn.f32 {part}, {part}, $3;\n" for part in ("la", "ha", "lb", "hb"))
SCALED_CODES = tl.constexpr(_REGISTERS + _SCALED + _widened("a", "b") + _CODES)
MULTIPLIED_CODES = tl.constexpr(_REGISTERS + _widened("$1", "$2") + _MULTIPLIED + _CODES)


@triton.jit
def scaled_codes(first, second, multiplier):
    """Four e4m3 codes (int32) of two pairs of bf16 times a power of two, given as both halves.

    Such a product is exact in bf16, subnormals included, down to where e4m3 has only zeros.
    """
    operands = [first, second, multiplier]
    return tl.inline_asm_elementwise(SCALED_CODES, "=r,r,r,r", operands, dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def multiplied_codes(first, second, multiplier):
    """Four e4m3 codes (int32) of two pairs of bf16 times any fp32, the products rounded to fp32."""
    operands = [first, second, multiplier]
    return tl.inline_asm_elementwise(MULTIPLIED_CODES, "=r,r,r,r", operands, dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def side_by_side(left, right):
    """[T, 2 n] of two [T, n]."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], 2 * left.shape[1]))


@triton.jit
def spread(both):
    """[T, 2 n] of halves [T, n]: all lower ones, then all upper ones (int32, unsigned)."""
    return side_by_side(both & BF16_LOW, (both >> BF16_SHIFT) & BF16_LOW)


@triton.jit
def group_maxima(pairs, rec: tl.constexpr):
    """Magnitudes of groups of bf16 pairs [T, tile / 2], two to a register; a NaN is 0x7FFF and wins.

    Returns:
        int32 [T, groups / 2], group g in the lower half and group g + groups / 2 in the upper one, or [T, 1] of one group.
    """
    rows: tl.constexpr = pairs.shape[0]
    if rec.groups == 1:
        both = tl.reduce(pairs, 1, larger_of_pairs)[:, None]
        both = larger_of_pairs(both, both >> BF16_SHIFT) & BF16_LOW
    else:
        # two groups come to share a register before anything changes lanes
        octets = tl.reshape(pairs, (rows, 2, rec.groups // 2, rec.group // 8, 4))
        lower, upper = tl.split(tl.permute(tl.reduce(octets, 4, larger_of_pairs), (0, 2, 3, 1)))
        both = tl.reduce(larger_of_pairs(lower_halves(lower, upper), upper_halves(lower, upper)), 2, larger_of_pairs)
    return both & MAGNITUDES


@triton.jit
def any_not_finite(both):
    """Whether a magnitude of `group_maxima` is an Inf or a NaN."""
    largest = tl.reduce(tl.reshape(both, (both.shape[0] * both.shape[1],)), 0, larger_of_pairs) & MAGNITUDES
    return tl.maximum(largest & BF16_HIGH, (largest << BF16_SHIFT) & FP32_MAGNITUDE) >= FP32_INF


@triton.jit
def ue8m0_halves(both, rec: tl.constexpr):
    """ue8m0 bytes of `group_maxima`, and the bf16 2**(127 - byte), of both halves at once."""
    # a mantissa above the rule's carries into the exponent
    exponent = ((both + rec.sf_carry * HALVES) >> BF16_MANTISSA_BITS) & BYTES
    byte = larger_halves(exponent, tl.full(both.shape, (rec.sf_floor + rec.sf_shift) * HALVES, tl.int32))
    byte -= rec.sf_shift * HALVES
    return byte, (-byte + TWICE_BIASES) << BF16_MANTISSA_BITS


@triton.jit
def finite_pairs(pairs, keep_nan: tl.constexpr):
    """Pairs with +-Inf as +-(largest finite bf16), and NaN as it is or as 0."""
    low, high = without_inf(pairs << BF16_SHIFT), without_inf(pairs & BF16_HIGH)
    if not keep_nan:
        low = tl.where((low & FP32_MAGNITUDE) > FP32_INF, 0, low)
        high = tl.where((high & FP32_MAGNITUDE) > FP32_INF, 0, high)
    return ((low >> BF16_SHIFT) & BF16_LOW) | high


@triton.jit
def quantise_pairs(pairs, rec: tl.constexpr):
    """`codec.quantise_e4m3` of pairs: int32 [T, tile / 2] of bf16.

    Returns:
        codes int32 [T, tile / 4], four each, and scales int32 [T, groups]: ue8m0 bytes or fp32 bit patterns.
    """
    rows: tl.constexpr = pairs.shape[0]
    words: tl.constexpr = pairs.shape[1] // 2
    both = group_maxima(pairs, rec)
    if any_not_finite(both):  # rare
        both = group_maxima(finite_pairs(pairs, False), rec)
        pairs = finite_pairs(pairs, True)
    first, second = tl.split(tl.reshape(pairs, (rows, words, 2)))
    if rec.sf_format == "ue8m0" and rec.groups > 1:
        byte, power = ue8m0_halves(both, rec)
        scale = spread(byte)
        multiplier = side_by_side(lower_halves(power, power), upper_halves(power, power))
    else:
        wide = both if rec.groups == 1 else spread(both)
        scale, multiplier = scale_e4m3(wide << BF16_SHIFT, rec)
    of_word = tl.broadcast_to(multiplier[:, :, None], (rows, rec.groups, rec.group // 4))
    of_word = tl.reshape(of_word, (rows, words))
    if rec.sf_format == "ue8m0" and rec.groups > 1:
        codes = scaled_codes(first, second, of_word)
    else:
        codes = multiplied_codes(first, second, of_word)
    return codes, scale
