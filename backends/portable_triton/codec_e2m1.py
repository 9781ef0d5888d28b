"""The e2m1 codec as Triton device functions: two elements a register, eight codes to an int32 (see codec)."""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from kvhal import formats
from kvhal.backends.portable_triton.codec import (
    BF16_HIGH,
    BF16_LOW,
    BF16_SHIFT,
    E4M3_MAX,
    E4M3_NAN,
    E4M3_SF_AMAX_FLOOR,
    E4M3_SF_RECIPROCAL,
    E4M3_SHIFT,
    E4M3_UNBIAS,
    FP32_INF,
    LARGEST,
    UE8M0_NAN,
    encode_e4m3_size,
    group_magnitudes,
    power_of_two_bits,
    reciprocal,
    round_bf16,
    ue8m0_scale,
    without_inf,
)

# e2m1 beside fp32, and beside fp16: scaled by 2**-14, an e2m1 is an fp16 with the same exponent field, subnormals included
_FP16_BIAS, _FP16_MANTISSA_BITS = 15, 10
E2M1_FP32_SHIFT = tl.constexpr(formats.FP32_MANTISSA_BITS - formats.MINIFLOAT_BITS["e2m1"][1])
E2M1_UNBIAS = tl.constexpr(2.0 ** (formats.FP32_BIAS - formats.MINIFLOAT_BIAS["e2m1"]))
E2M1_IN_FP16 = tl.constexpr(2.0 ** (formats.MINIFLOAT_BIAS["e2m1"] - _FP16_BIAS))
E2M1_BF16_UNBIAS = tl.constexpr(0x7E807E80)  #: 2**126 as both bf16 halves
E2M1_BF16_SIGNS = tl.constexpr(-0x7FFF8000)  #: both sign bits, 0x80008000
E2M1_TOP = tl.constexpr(formats.E2M1_MAX * E2M1_IN_FP16.value)
#: fp32 bits of the largest scaled value that rounds to the largest code without a clamp; Inf and NaN are larger
E2M1_SAFE = tl.constexpr(int.from_bytes(struct.pack("<f", (formats.E2M1_MAX + 0.5) * E2M1_IN_FP16.value), "little"))
E2M1_SHIFT = tl.constexpr(_FP16_MANTISSA_BITS - formats.MINIFLOAT_BITS["e2m1"][1])
#: fp32(1 / sf) of a scale with mantissa 1.875 is large enough to lift a product off a tie of e2m1, by less than fp16 can
#: show. A multiplier larger by this much shows it, and still rounds every other product as before (all 4.1 million
#: pairs of a bf16 and a scale are checked in tests/triton).
E2M1_LIFT = tl.constexpr(1.0 + 3 * 2.0**-11)


@triton.jit
def decode_e2m1(code):
    """fp32 of e2m1 codes (int32 in [0, 15]), exact."""
    bits = ((code & 7) << E2M1_FP32_SHIFT) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * E2M1_UNBIAS


@triton.jit
def times_bf16_pair(left, right):
    """Products of bf16 halves (int32 each), nearest even."""
    return tl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def e2m1_pair(words, nibble: tl.constexpr, scale, native: tl.constexpr):
    """bf16 bits (int16 each) of nibbles k and k + 4 of int32 words, times `scale` (fp32, exact in bf16)."""
    part = words >> (4 * nibble)
    if native:
        # Two elements an instruction. Every product of an e2m1 and a scale is exact in bf16, however often it is rounded;
        # the code as bf16's lowest exponent bits and highest mantissa bit is a number 2**126 too small.
        upper = scale.to(tl.int32, bitcast=True)
        upper = (upper & BF16_HIGH) | ((upper >> BF16_SHIFT) & BF16_LOW)
        code = ((part << 6) & 0x01C001C0) | ((part << 12) & E2M1_BF16_SIGNS)
        both = times_bf16_pair(times_bf16_pair(code, tl.full(words.shape, E2M1_BF16_UNBIAS, tl.int32)), upper)
        low, high = both.to(tl.int16), (both >> BF16_SHIFT).to(tl.int16)
    else:
        low = round_bf16(decode_e2m1(part & 0xF) * scale, native)
        high = round_bf16(decode_e2m1((part >> 16) & 0xF) * scale, native)
    return low, high


@triton.jit
def dequantise_words(words, scale, rec: tl.constexpr):
    """bf16 bits int16 [T, tile] of e2m1 words int32 [T, tile / 8] and scales fp32 [T, groups]."""
    of_word = tl.broadcast_to(scale[:, :, None], (words.shape[0], rec.groups, rec.group // 8))
    of_word = tl.reshape(of_word, words.shape)
    e0, e4 = e2m1_pair(words, 0, of_word, rec.native)
    e1, e5 = e2m1_pair(words, 1, of_word, rec.native)
    e2, e6 = e2m1_pair(words, 2, of_word, rec.native)
    e3, e7 = e2m1_pair(words, 3, of_word, rec.native)
    even = tl.join(tl.join(e0, e4), tl.join(e2, e6))
    odd = tl.join(tl.join(e1, e5), tl.join(e3, e7))
    # [T, n, bit 2, bit 1, bit 0] of an element's place in its word
    return tl.reshape(tl.join(even, odd), (words.shape[0], words.shape[1] * 8))


@triton.jit
def reciprocal_of_scale(value, native: tl.constexpr):
    """fp32(1 / value) of e4m3 scales: a true division, or one Newton step that gives the same for all of them."""
    if native:
        guess = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1)
        result = tl.fma(guess, tl.fma(-value, guess, 1.0), guess)
    else:
        result = reciprocal(value, False)
    return result


@triton.jit
def scale_e2m1(largest, rec: tl.constexpr):
    """Scale bytes (int32) and fp32 multipliers of e2m1 groups, the latter scaled for `round_e2m1`.

    Args:
        largest: fp32 bit patterns (int32) of the groups' largest finite magnitudes.
    """
    if rec.sf_format == "ue8m0":
        scale = ue8m0_scale(largest >> BF16_SHIFT, rec)
        multiplier = power_of_two_bits(scale)
    else:
        amax = tl.maximum(largest.to(tl.float32, bitcast=True), E4M3_SF_AMAX_FLOOR)
        # never by the hardware's casts: ptxas 12.8 loses a register between an encoding and a decoding one
        scale = encode_e4m3_size(tl.minimum(amax * E4M3_SF_RECIPROCAL, E4M3_MAX))
        multiplier = reciprocal_of_scale((scale << E4M3_SHIFT).to(tl.float32, bitcast=True) * E4M3_UNBIAS, rec.native)
        multiplier = tl.where(((scale & 7) == 7) & (scale > 7), multiplier * E2M1_LIFT, multiplier)
    return scale, multiplier * E2M1_IN_FP16


@triton.jit
def pair_fp16(low, high, ptx: tl.constexpr):
    """fp16 of two fp32, nearest even, as the halves of an int32."""
    if ptx:  # one instruction; from separate casts the compiler makes four, at a quarter of the rate
        both = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        lower = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        upper = high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        both = (lower & 0xFFFF) | (upper << 16)
    return both


@triton.jit
def round_e2m1(value, ptx: tl.constexpr):
    """e2m1 codes, eight to an int32 (element 0 in the low nibble), of fp32 values scaled by 2**-14.

    Two codes are rounded at once, as fp16 halves of one register: nearest even at the last bit of e2m1.

    Args:
        value: fp32 [T, n], n a multiple of 8, |value| <= 6.5 * 2**-14.
    """
    words: tl.constexpr = value.shape[1] // 8
    halves = tl.permute(tl.reshape(value, (value.shape[0], words, 2, 4)), (0, 1, 3, 2))
    low, high = tl.split(halves)  # elements 0..3 and 4..7 of a word share registers, so that packing is a few shifts
    both = pair_fp16(low, high, ptx)
    both += 0x00FF00FF + ((both >> E2M1_SHIFT) & 0x00010001)
    # a code now lies in bits 9..11 and its sign in bit 15 of each half; bits 12..14 are zero
    codes = (both | (both >> 3)) & 0x1E001E00
    even, odd = tl.split(tl.reshape(codes, (value.shape[0], words, 2, 2)))
    first, second = tl.split((even >> 4) + odd)
    return (first >> 5) + (second << 3)


@triton.jit
def any_values(wide, raw, scale, multiplier, rec: tl.constexpr):
    """What `round_e2m1` takes of any groups, and their scales: saturated, Inf as a number; a group with a NaN says so."""
    value = without_inf(wide).to(tl.float32, bitcast=True) * multiplier[:, :, None]
    value = tl.clamp(value, -E2M1_TOP, E2M1_TOP)
    # e2m1 has no NaN: the scale says it, and the codes are zero
    poisoned = raw > FP32_INF
    nan: tl.constexpr = UE8M0_NAN if rec.sf_format == "ue8m0" else E4M3_NAN
    return tl.where(poisoned[:, :, None], 0.0, value), tl.where(poisoned, nan, scale)


@triton.jit
def quantise_e2m1(bits, rec: tl.constexpr):
    """A tile's e2m1 codes, eight to an int32, and scales.

    Args:
        bits: bf16 bits, int16 [T, tile], zero where there is no element.

    Returns:
        words int32 [T, tile / 8], and scale bytes int32 [T, groups].
    """
    wide, raw = group_magnitudes(bits, rec)
    largest = tl.minimum(raw, LARGEST)
    scale, multiplier = scale_e2m1(largest, rec)
    if rec.guarded:
        top = (raw.to(tl.float32, bitcast=True) * multiplier).to(tl.int32, bitcast=True)
        if tl.max(tl.max(top, axis=0), axis=0) > E2M1_SAFE:  # something saturates, or an Inf or a NaN in the tile
            value, scale = any_values(wide, raw, scale, multiplier, rec)
        else:
            value = wide.to(tl.float32, bitcast=True) * multiplier[:, :, None]
    else:
        value, scale = any_values(wide, raw, scale, multiplier, rec)
    return round_e2m1(tl.reshape(value, bits.shape), rec.ptx), scale
