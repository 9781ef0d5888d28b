"""The short way to e2m1 codes, two elements a register (see packed)."""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from kvhal import formats
from kvhal.backends.e2m1_ptx import octet_codes as octet_codes_ptx
from kvhal.backends.portable_triton.codec import (
    BF16_HIGH,
    BF16_SHIFT,
    E4M3_NAN,
    E4M3_SF_AMAX_FLOOR,
    E4M3_SF_RECIPROCAL,
    E4M3_SHIFT,
    E4M3_UNBIAS,
    FP32_INF,
    UE8M0_NAN,
)
from kvhal.backends.portable_triton.codec_e2m1 import E2M1_IN_FP16, E2M1_LIFT, reciprocal_of_scale
from kvhal.backends.portable_triton.packed import (
    HALVES,
    any_not_finite,
    finite_pairs,
    group_maxima,
    larger_halves,
    side_by_side,
    spread,
    ue8m0_halves,
)


def _bf16(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little") >> formats.BF16_SHIFT


#: bf16 bits of the largest magnitudes between which an e4m3 scale depends on them
AMAX_LOW = tl.constexpr(_bf16(E4M3_SF_AMAX_FLOOR.value))
AMAX_HIGH = tl.constexpr(_bf16(formats.E2M1_MAX * formats.E4M3_MAX))
#: an e4m3 lies in fp32's bits as it is when it is this much smaller, subnormals included; the product with a magnitude is
#: rounded at another place than the specification's, which changes no scale (tests/triton tries every magnitude)
SF_IN_FP32 = tl.constexpr(E4M3_SF_RECIPROCAL.value / E4M3_UNBIAS.value)
E4M3_HALF_STEP = tl.constexpr((1 << (E4M3_SHIFT.value - 1)) - 1)


@triton.jit
def smaller_halves(left, right):
    """Of two pairs of unsigned 16-bit halves, the smaller of each."""
    return tl.inline_asm_elementwise("min.u16x2 $0, $1, $2;", "=r,r,r", [left, right], dtype=tl.int32, is_pure=True, pack=1)


OCTET_CODES = tl.constexpr(octet_codes_ptx("$", saturate=True))


@triton.jit
def octet_codes(first, second, third, fourth, multiplier):
    """Eight e2m1 codes (int32) of four pairs of bf16 times fp32, the products scaled by 2**-14 and rounded to fp32.

    Elements i and i + 4 share a register as fp16, as in `codec_e2m1.round_e2m1`; their codes meet in a byte.
    """
    operands = [first, second, third, fourth, multiplier]
    return tl.inline_asm_elementwise(OCTET_CODES, "=r,r,r,r,r,r", operands, dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def scale_pairs_e2m1(both, rec: tl.constexpr):
    """Scale bytes (int32 [T, groups]) and fp32 multipliers, scaled by 2**-14, of `group_maxima` that are finite."""
    if rec.sf_format == "ue8m0":
        byte, power = ue8m0_halves(both, rec)
        scale = spread(byte)
        multiplier = wide_halves(power) * E2M1_IN_FP16
    else:
        both = larger_halves(both, tl.full(both.shape, AMAX_LOW * HALVES, tl.int32))
        both = smaller_halves(both, tl.full(both.shape, AMAX_HIGH * HALVES, tl.int32))
        bits = (wide_halves(both) * SF_IN_FP32).to(tl.int32, bitcast=True)
        scale = (bits + E4M3_HALF_STEP + ((bits >> E4M3_SHIFT) & 1)) >> E4M3_SHIFT
        value = (scale << E4M3_SHIFT).to(tl.float32, bitcast=True) * E4M3_UNBIAS
        lifted = ((scale & 7) == 7) & (scale > 7)
        factor = tl.full(value.shape, E2M1_IN_FP16, tl.float32)
        multiplier = reciprocal_of_scale(value, True) * tl.where(lifted, E2M1_LIFT * E2M1_IN_FP16, factor)
    return scale, multiplier


@triton.jit
def wide_halves(both):
    """fp32 [T, 2 n] of bf16 halves [T, n]: all lower ones, then all upper ones."""
    return side_by_side(both << BF16_SHIFT, both & BF16_HIGH).to(tl.float32, bitcast=True)


@triton.jit
def quantise_pairs_e2m1(pairs, rec: tl.constexpr):
    """`codec_e2m1.quantise_e2m1` of pairs: int32 [T, tile / 2] of bf16.

    Returns:
        words int32 [T, tile / 8], and scale bytes int32 [T, groups].
    """
    rows: tl.constexpr = pairs.shape[0]
    words: tl.constexpr = pairs.shape[1] // 4
    both = group_maxima(pairs, rec)
    poison = tl.full((rows, rec.groups), 0, tl.int32)
    if any_not_finite(both):  # rare
        # e2m1 has no NaN: the scale says it, and the codes are zero
        nan: tl.constexpr = UE8M0_NAN if rec.sf_format == "ue8m0" else E4M3_NAN
        poison = tl.where((spread(both) << BF16_SHIFT) > FP32_INF, nan, poison)
        of_pair = tl.broadcast_to(poison[:, :, None], (rows, rec.groups, rec.group // 2))
        pairs = tl.where(tl.reshape(of_pair, pairs.shape) != 0, 0, finite_pairs(pairs, False))
        both = group_maxima(pairs, rec)
    scale, multiplier = scale_pairs_e2m1(both, rec)
    of_word = tl.broadcast_to(multiplier[:, :, None], (rows, rec.groups, rec.group // 8))
    even, odd = tl.split(tl.reshape(pairs, (rows, words, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return octet_codes(first, second, third, fourth, tl.reshape(of_word, (rows, words))), scale | poison
