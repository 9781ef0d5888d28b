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
BF16_HIGH = tl.constexpr(-(1 << formats.BF16_SHIFT))
BF16_LOW = tl.constexpr((1 << formats.BF16_SHIFT) - 1)
BF16_HALF = tl.constexpr((1 << (formats.BF16_SHIFT - 1)) - 1)  #: half of bf16's last place in fp32's bits, minus one
BF16_MANTISSA_BITS = tl.constexpr(formats.BF16_MANTISSA_BITS)
FP32_MAGNITUDE = tl.constexpr(formats.FP32_MAGNITUDE)
FP32_INF = tl.constexpr(formats.FP32_INF)
FP32_MANTISSA_BITS = tl.constexpr(formats.FP32_MANTISSA_BITS)
TWICE_FP32_BIAS = tl.constexpr(2 * formats.FP32_BIAS)
LARGEST = tl.constexpr(formats.BF16_MAX_FINITE << formats.BF16_SHIFT)  #: fp32 bits of the largest finite bf16
BF16_STEP = tl.constexpr(1 << formats.BF16_SHIFT)
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


@triton.jit
def widen(bits):
    """fp32 of bf16 bits (int16), exact."""
    return (bits.to(tl.int32) << BF16_SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def to_fp32(value):
    """fp32 of bf16 or fp32, exact (Triton's interpreter loses bf16's subnormals in its own cast)."""
    if value.dtype == tl.bfloat16:
        return widen(value.to(tl.int16, bitcast=True))
    else:
        return value


@triton.jit
def round_bf16(value, native: tl.constexpr):
    """bf16 bits (int16) of fp32: nearest even, every NaN 0x7FFF."""
    if native:
        return value.to(tl.bfloat16).to(tl.int16, bitcast=True)
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + BF16_HALF + ((bits >> BF16_SHIFT) & 1)) >> BF16_SHIFT
    return tl.where((bits & FP32_MAGNITUDE) > FP32_INF, BF16_NAN, rounded).to(tl.int16)


@triton.jit
def encode_e4m3_size(size):
    """e4m3 codes (int32) of fp32 in [0, 448]: nearest even."""
    bits = size.to(tl.int32, bitcast=True)
    normal = (bits + E4M3_HALF + ((bits >> E4M3_SHIFT) & 1)) >> E4M3_SHIFT
    subnormal = (size + E4M3_ANCHOR).to(tl.int32, bitcast=True) - E4M3_ANCHOR_BITS
    return tl.where(size < E4M3_MIN_NORMAL, subnormal, normal)


@triton.jit
def encode_e4m3(value, native: tl.constexpr):
    """e4m3 codes (uint8) of fp32: nearest even, saturating, sign of zero kept, NaN 0x7F."""
    if native:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & FP32_MAGNITUDE
    size = tl.minimum(magnitude.to(tl.float32, bitcast=True), E4M3_MAX)
    code = encode_e4m3_size(size) | ((bits >> 24) & 0x80)
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
def decode_scale(sf, rec: tl.constexpr):
    """fp32 of scale factors: ue8m0 or e4m3 bytes (uint8), or fp32 bit patterns (int32)."""
    if rec.sf_format == "ue8m0":
        value = (sf.to(tl.int32) << FP32_MANTISSA_BITS).to(tl.float32, bitcast=True)
    elif rec.sf_format == "e4m3":
        value = decode_e4m3(sf, rec.native)
    else:
        value = sf.to(tl.float32, bitcast=True)
    return value


@triton.jit
def dequantise_codes(codes, scale, rec: tl.constexpr):
    """bf16 bits int16 [T, tile] of e4m3 codes uint8 [T, tile] and scales fp32 [T, groups]."""
    value = tl.reshape(decode_e4m3(codes, rec.native), (codes.shape[0], rec.groups, rec.group))
    return tl.reshape(round_bf16(value * scale[:, :, None], rec.native), codes.shape)


@triton.jit
def ue8m0_scale(amax, rec: tl.constexpr):
    """ue8m0 bytes (int32) of bf16 magnitudes (int32): ceil(log2(max(amax, floor) / qmax)) + 127 in integers."""
    # a mantissa above the rule's carries into the exponent
    return tl.maximum(((amax + rec.sf_carry) >> BF16_MANTISSA_BITS) - rec.sf_shift, rec.sf_floor)


@triton.jit
def power_of_two_bits(exponent):
    """fp32 2**(127 - exponent) of a ue8m0 byte (int32)."""
    return ((-exponent + TWICE_FP32_BIAS) << FP32_MANTISSA_BITS).to(tl.float32, bitcast=True)


@triton.jit
def larger_of_pairs(left, right):
    """Of two pairs of bf16 halves (int32), the larger magnitude of each half, with some sign; a NaN wins and is 0x7FFF."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [left, right], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def group_magnitudes(bits, rec: tl.constexpr):
    """fp32 bit patterns [T, groups, group] of bf16 bits [T, tile], and of each group's largest magnitude [T, groups]."""
    wide = tl.reshape(bits, (bits.shape[0], rec.groups, rec.group)).to(tl.int32) << BF16_SHIFT
    if rec.native and rec.group > 2:
        low, high = tl.split(tl.reshape(bits, (bits.shape[0], rec.groups, rec.group // 2, 2)))
        both = (low.to(tl.int32) & BF16_LOW) | (high.to(tl.int32) << BF16_SHIFT)
        both = tl.reduce(both, 2, larger_of_pairs)
        largest = tl.maximum((both << BF16_SHIFT) & FP32_MAGNITUDE, both & BF16_HIGH & FP32_MAGNITUDE)
    else:
        largest = tl.max(wide & FP32_MAGNITUDE, axis=2)
    return wide, largest


@triton.jit
def without_inf(wide):
    """fp32 bit patterns with +-Inf as +-(largest finite bf16), one bf16 step below; NaN stays."""
    infinite = (wide & FP32_MAGNITUDE) == FP32_INF
    return tl.where(infinite, wide - BF16_STEP, wide)


@triton.jit
def finite_groups(wide):
    """fp32 bit patterns [T, groups, group] without infinities, and each group's largest magnitude that is a number."""
    wide = without_inf(wide)
    # NaNs become negative numbers, which a signed maximum skips
    return wide, tl.maximum(tl.max((wide & FP32_MAGNITUDE) + NAN_WRAP, axis=2), NAN_WRAP) - NAN_WRAP


@triton.jit
def scale_e4m3(largest, rec: tl.constexpr):
    """Scales (int32: ue8m0 bytes or fp32 bit patterns) and fp32 multipliers of e4m3 groups.

    Args:
        largest: fp32 bit patterns (int32) of the groups' largest finite magnitudes.
    """
    if rec.sf_format == "ue8m0":
        scale = ue8m0_scale(largest >> BF16_SHIFT, rec)
        multiplier = power_of_two_bits(scale)
    else:
        sf = tl.div_rn(tl.maximum(largest.to(tl.float32, bitcast=True), FP32_SF_AMAX_FLOOR), E4M3_MAX)
        scale = sf.to(tl.int32, bitcast=True)
        multiplier = reciprocal(sf, rec.ptx)
    return scale, multiplier


@triton.jit
def quantise_e4m3(bits, rec: tl.constexpr):
    """A tile's e4m3 codes and scales.

    Args:
        bits: bf16 bits, int16 [T, tile], zero where there is no element.

    Returns:
        codes uint8 of the same shape, and scales int32 [T, groups]: ue8m0 bytes or fp32 bit patterns.
    """
    wide, largest = group_magnitudes(bits, rec)
    if rec.guarded:
        if tl.max(tl.max(largest, axis=0), axis=0) >= FP32_INF:  # an Inf or a NaN somewhere in the tile
            wide, largest = finite_groups(wide)
    else:
        wide, largest = finite_groups(wide)
    scale, multiplier = scale_e4m3(largest, rec)
    value = wide.to(tl.float32, bitcast=True) * multiplier[:, :, None]
    return tl.reshape(encode_e4m3(value, rec.native), bits.shape), scale


@triton.jit
def reciprocal(value, ptx: tl.constexpr):
    """fp32(1 / value), rounded to nearest even."""
    if ptx:
        result = tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1)
    else:
        result = tl.div_rn(tl.full(value.shape, 1.0, tl.float32), value)
    return result
