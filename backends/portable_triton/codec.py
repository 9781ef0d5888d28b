"""The codecs of docs/numerics.md as Triton device functions: integer arithmetic on bit patterns.

Exact on every target, also in Triton's interpreter and where the hardware has no fp8. `native` (see record.PROVEN_NATIVE)
switches to the hardware's casts where a test over every input found them identical. Kernels that use these functions are
compiled without fused multiply-add: every product is rounded on its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal import formats

BF16_NAN = tl.constexpr(formats.BF16_NAN)
BF16_SHIFT = tl.constexpr(formats.BF16_SHIFT)
BF16_HALF = tl.constexpr((1 << (formats.BF16_SHIFT - 1)) - 1)  #: half of bf16's last place in fp32's bits, minus one
BF16_MANTISSA_BITS = tl.constexpr(formats.BF16_MANTISSA_BITS)
BF16_MANTISSA = tl.constexpr((1 << formats.BF16_MANTISSA_BITS) - 1)
FP32_MAGNITUDE = tl.constexpr(formats.FP32_MAGNITUDE)
FP32_INF = tl.constexpr(formats.FP32_INF)
FP32_MANTISSA_BITS = tl.constexpr(formats.FP32_MANTISSA_BITS)
TWICE_FP32_BIAS = tl.constexpr(2 * formats.FP32_BIAS)
LARGEST = tl.constexpr(formats.BF16_MAX_FINITE << formats.BF16_SHIFT)  #: fp32 bits of the largest finite bf16
#: added to the fp32 bits of a bf16's magnitude, wraps exactly the NaNs around to negative numbers
NAN_WRAP = tl.constexpr((formats.BF16_MAGNITUDE - formats.BF16_INF) << formats.BF16_SHIFT)

E4M3_MAX = tl.constexpr(formats.E4M3_MAX)
E4M3_NAN = tl.constexpr(formats.E4M3_NAN)
UE8M0_NAN = tl.constexpr(formats.UE8M0_NAN)
E4M3_SF_AMAX_FLOOR = tl.constexpr(formats.E4M3_SF_AMAX_FLOOR)
E4M3_SF_RECIPROCAL = tl.constexpr(formats.E4M3_SF_RECIPROCAL)
FP32_SF_AMAX_FLOOR = tl.constexpr(formats.FP32_SF_AMAX_FLOOR)

# e4m3 beside fp32
_SHIFT = formats.FP32_MANTISSA_BITS - formats.MINIFLOAT_BITS["e4m3"][1]
_REBIAS = formats.FP32_BIAS - formats.MINIFLOAT_BIAS["e4m3"]
_ANCHOR = _SHIFT + 1 - formats.MINIFLOAT_BIAS["e4m3"]
E4M3_SHIFT = tl.constexpr(_SHIFT)  #: mantissa bits that a cast drops
E4M3_HALF = tl.constexpr((1 << (_SHIFT - 1)) - 1 - (_REBIAS << formats.FP32_MANTISSA_BITS))
E4M3_UNBIAS = tl.constexpr(2.0**_REBIAS)
E4M3_MIN_NORMAL = tl.constexpr(2.0 ** (1 - formats.MINIFLOAT_BIAS["e4m3"]))
#: the power of two whose unit in the last place is e4m3's smallest step: adding it rounds to that step
E4M3_ANCHOR = tl.constexpr(2.0**_ANCHOR)
E4M3_ANCHOR_BITS = tl.constexpr((_ANCHOR + formats.FP32_BIAS) << formats.FP32_MANTISSA_BITS)

# e2m1 beside fp32, and beside fp16: scaled by 2**-14, an e2m1 is an fp16 with the same exponent field, subnormals included
_FP16_BIAS, _FP16_MANTISSA_BITS = 15, 10
E2M1_FP32_SHIFT = tl.constexpr(formats.FP32_MANTISSA_BITS - formats.MINIFLOAT_BITS["e2m1"][1])
E2M1_UNBIAS = tl.constexpr(2.0 ** (formats.FP32_BIAS - formats.MINIFLOAT_BIAS["e2m1"]))
E2M1_IN_FP16 = tl.constexpr(2.0 ** (formats.MINIFLOAT_BIAS["e2m1"] - _FP16_BIAS))
E2M1_TOP = tl.constexpr(formats.E2M1_MAX * E2M1_IN_FP16.value)
E2M1_SHIFT = tl.constexpr(_FP16_MANTISSA_BITS - formats.MINIFLOAT_BITS["e2m1"][1])
#: fp32(1 / sf) of a scale with mantissa 1.875 is large enough to lift a product off a tie of e2m1, by less than fp16 can
#: show. A multiplier larger by this much shows it, and still rounds every other product as before (all 4.1 million
#: pairs of a bf16 and a scale are checked in tests/triton).
E2M1_LIFT = tl.constexpr(1.0 + 3 * 2.0**-11)


@triton.jit
def pair(low, high):
    """Both halves of an int32 from two 16-bit patterns (int16)."""
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def widen(bits):
    """fp32 of bf16 bits (int16), exact."""
    return (bits.to(tl.int32) << BF16_SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def round_bf16(value, native: tl.constexpr):
    """bf16 bits (int16) of fp32: nearest even, every NaN 0x7FFF."""
    if native:
        return value.to(tl.bfloat16).to(tl.int16, bitcast=True)
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + BF16_HALF + ((bits >> BF16_SHIFT) & 1)) >> BF16_SHIFT
    return tl.where((bits & FP32_MAGNITUDE) > FP32_INF, BF16_NAN, rounded).to(tl.int16)


@triton.jit
def encode_e4m3(value, native: tl.constexpr):
    """e4m3 codes (uint8) of fp32: nearest even, saturating, sign of zero kept, NaN 0x7F."""
    if native:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & FP32_MAGNITUDE
    size = tl.minimum(magnitude.to(tl.float32, bitcast=True), E4M3_MAX)
    clamped = size.to(tl.int32, bitcast=True)
    normal = (clamped + E4M3_HALF + ((clamped >> E4M3_SHIFT) & 1)) >> E4M3_SHIFT
    subnormal = (size + E4M3_ANCHOR).to(tl.int32, bitcast=True) - E4M3_ANCHOR_BITS
    code = tl.where(size < E4M3_MIN_NORMAL, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > FP32_INF, E4M3_NAN, code).to(tl.uint8)


@triton.jit
def decode_e4m3(code, native: tl.constexpr):
    """fp32 of e4m3 codes (uint8), exact; 0x7F and 0xFF are NaN."""
    if native:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = code.to(tl.int32)
    # the code's fields in fp32's places make a number 2**120 too small, subnormals included
    bits = ((wide & 0x7F) << E4M3_SHIFT) | ((wide & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * E4M3_UNBIAS
    return tl.where((wide & E4M3_NAN) == E4M3_NAN, float("nan"), value)


@triton.jit
def decode_e2m1(code):
    """fp32 of e2m1 codes (uint8 in [0, 15]), exact."""
    wide = code.to(tl.int32)
    bits = ((wide & 7) << E2M1_FP32_SHIFT) | ((wide & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * E2M1_UNBIAS


@triton.jit
def decode_scale(sf, rec: tl.constexpr):
    """fp32 of scale factors: ue8m0 or e4m3 bytes (uint8), or fp32 bit patterns (int32)."""
    if rec.sf_format == "ue8m0":
        return (sf.to(tl.int32) << FP32_MANTISSA_BITS).to(tl.float32, bitcast=True)
    if rec.sf_format == "e4m3":
        return decode_e4m3(sf, rec.native)
    return sf.to(tl.float32, bitcast=True)


@triton.jit
def ue8m0_scale(amax, rec: tl.constexpr):
    """ue8m0 bytes (int32) of bf16 magnitudes (int32): ceil(log2(max(amax, floor) / qmax)) + 127 in integers."""
    above = (amax & BF16_MANTISSA) > rec.sf_mantissa
    return tl.maximum((amax >> BF16_MANTISSA_BITS) - rec.sf_shift + above.to(tl.int32), rec.sf_floor)


@triton.jit
def power_of_two_bits(exponent):
    """fp32 2**(127 - exponent) of a ue8m0 byte (int32)."""
    return ((-exponent + TWICE_FP32_BIAS) << FP32_MANTISSA_BITS).to(tl.float32, bitcast=True)


@triton.jit
def quantise_e4m3(bits, rec: tl.constexpr):
    """A tile's e4m3 codes and scales.

    Args:
        bits: bf16 bits, int16 [T, groups * group], zero where there is no element.

    Returns:
        codes uint8 of the same shape, and scales int32 [T, groups]: ue8m0 bytes or fp32 bit patterns.
    """
    rows: tl.constexpr = bits.shape[0]
    wide = tl.reshape(bits, (rows, rec.groups, rec.group)).to(tl.int32) << BF16_SHIFT
    # NaNs have become negative numbers, which a signed maximum skips
    largest = tl.maximum(tl.max((wide & FP32_MAGNITUDE) + NAN_WRAP, axis=2), NAN_WRAP) - NAN_WRAP
    infinite = largest == FP32_INF
    amax = tl.minimum(largest, LARGEST)
    if rec.sf_format == "ue8m0":
        scale = ue8m0_scale(amax >> BF16_SHIFT, rec)
        multiplier = power_of_two_bits(scale)
    else:
        sf = tl.div_rn(tl.maximum(amax.to(tl.float32, bitcast=True), FP32_SF_AMAX_FLOOR), E4M3_MAX)
        scale = sf.to(tl.int32, bitcast=True)
        multiplier = tl.div_rn(tl.full(sf.shape, 1.0, tl.float32), sf)
    # Inf counts as the largest finite bf16: nothing may come out larger than that would
    limit = tl.where(infinite, amax.to(tl.float32, bitcast=True) * multiplier, E4M3_MAX)[:, :, None]
    value = wide.to(tl.float32, bitcast=True) * multiplier[:, :, None]
    value = tl.clamp(value, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return tl.reshape(encode_e4m3(value, rec.native), bits.shape), scale


@triton.jit
def scale_e2m1(largest, rec: tl.constexpr):
    """Scale bytes (int32) and fp32 multipliers of e2m1 groups, the latter scaled for `round_e2m1`.

    Args:
        largest: fp32 bit patterns (int32) of the groups' largest finite magnitudes.
    """
    if rec.sf_format == "ue8m0":
        scale = ue8m0_scale(largest >> BF16_SHIFT, rec)
        return scale, power_of_two_bits(scale) * E2M1_IN_FP16
    amax = tl.maximum(largest.to(tl.float32, bitcast=True), E4M3_SF_AMAX_FLOOR)
    scale = encode_e4m3(tl.minimum(amax * E4M3_SF_RECIPROCAL, E4M3_MAX), rec.native).to(tl.int32)
    multiplier = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), decode_e4m3(scale.to(tl.uint8), rec.native))
    lifted = ((scale & 7) == 7) & (scale > 7)
    return scale, tl.where(lifted, multiplier * E2M1_LIFT, multiplier) * E2M1_IN_FP16


@triton.jit
def round_e2m1(value):
    """e2m1 codes, eight to an int32 (element 0 in the low nibble), of fp32 values scaled by 2**-14.

    Two codes are rounded at once, as fp16 halves of one register: nearest even at the last bit of e2m1.

    Args:
        value: fp32 [T, n], n a multiple of 8, |value| <= 6 * 2**-14; a NaN gives any code.
    """
    words: tl.constexpr = value.shape[1] // 8
    halves = value.to(tl.float16).to(tl.int16, bitcast=True)
    halves = tl.permute(tl.reshape(halves, (value.shape[0], words, 2, 4)), (0, 1, 3, 2))
    low, high = tl.split(halves)  # elements 0..3 and 4..7 of a word share registers, so that packing is three shifts
    both = pair(low, high)
    both = (both + 0x00FF00FF + ((both >> E2M1_SHIFT) & 0x00010001)) >> E2M1_SHIFT
    codes = (both | (both >> 3)) & 0x000F000F  # bit 3: the sign, from fp16's bit 15
    even, odd = tl.split(tl.reshape(codes, (value.shape[0], words, 2, 2)))
    first, second = tl.split(even | (odd << 4))
    return first | (second << 8)


@triton.jit
def quantise_e2m1(bits, rec: tl.constexpr):
    """A tile's e2m1 codes, eight to an int32, and scales.

    Args:
        bits: bf16 bits, int16 [T, groups * group], zero where there is no element.

    Returns:
        words int32 [T, groups * group / 8], and scale bytes int32 [T, groups].
    """
    rows: tl.constexpr = bits.shape[0]
    per_group: tl.constexpr = rec.group // 8
    wide = tl.reshape(bits, (rows, rec.groups, rec.group)).to(tl.int32) << BF16_SHIFT
    largest = tl.max(wide & FP32_MAGNITUDE, axis=2)
    poisoned = largest > FP32_INF
    amax = tl.minimum(largest, LARGEST)
    scale, multiplier = scale_e2m1(amax, rec)
    # Inf counts as the largest finite bf16: nothing may come out larger than that would
    limit = tl.minimum(amax.to(tl.float32, bitcast=True) * multiplier, E2M1_TOP)
    limit = tl.where(largest == FP32_INF, limit, E2M1_TOP)[:, :, None]
    value = tl.clamp(wide.to(tl.float32, bitcast=True) * multiplier[:, :, None], -limit, limit)
    words = tl.reshape(round_e2m1(tl.reshape(value, bits.shape)), (rows, rec.groups, per_group))
    # e2m1 has no NaN: the scale says it, and the codes are zero
    words = tl.reshape(tl.where(poisoned[:, :, None], 0, words), (rows, rec.groups * per_group))
    nan: tl.constexpr = UE8M0_NAN if rec.sf_format == "ue8m0" else E4M3_NAN
    return words, tl.where(poisoned, nan, scale)
