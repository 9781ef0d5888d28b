"""The codecs as expressions of the Ascend dialect, in integer arithmetic.

Integers because their result does not depend on the device: no rounding mode, no flushing of subnormals, no approximate
division. Bit patterns are int32 values: `magnitude` is a bf16 without its sign. Functions here build expressions and run
while a kernel is traced; `pinned` gives a value a name in the generated code where it would otherwise be repeated.
"""

import struct
from typing import Any

from tilelang.ascend import language as T

from kvhal.formats import (
    BF16_INF,
    BF16_MAGNITUDE,
    BF16_MANTISSA_BITS,
    BF16_MAX_FINITE,
    BF16_NAN,
    BF16_SHIFT,
    E4M3_MAX,
    E4M3_NAN,
    E4M3_SF_AMAX_FLOOR,
    E4M3_SF_RECIPROCAL,
    FP32_BIAS,
    FP32_INF,
    FP32_MAGNITUDE,
    FP32_MANTISSA_BITS,
    MINIFLOAT_BIAS,
    MINIFLOAT_BITS,
    MINIFLOAT_MAX_CODE,
    UE8M0_NAN,
    UE8M0_RULES,
)

_MANTISSA = (1 << BF16_MANTISSA_BITS) - 1
_IMPLICIT = 1 << BF16_MANTISSA_BITS


def pinned(value: Any, dtype: str = "int32") -> Any:
    """`value` computed once, here."""
    return T.alloc_var(dtype, init=value)[0]


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, else `no`; only the chosen side is evaluated."""
    return T.if_then_else(condition, yes, no)


def fp32_of_bits(bits: Any) -> Any:
    return T.reinterpret(bits, "float32")


def bits_of_fp32(value: Any) -> Any:
    return T.reinterpret(value, "int32")


def fp32_bits(value: float) -> int:
    """Bits of a positive constant rounded to fp32."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def widened(bits: Any) -> Any:
    """fp32 of bf16 bits (int32 in [0, 0xFFFF])."""
    return fp32_of_bits(T.cast(bits, "uint32") << T.uint32(BF16_SHIFT))


def capped_amax(magnitude: Any) -> Any:
    """What an element adds to its group's amax: NaN nothing, Inf the largest finite value."""
    return choose(magnitude > BF16_INF, 0, T.min(magnitude, BF16_MAX_FINITE))


def _minifloat(dtype: str) -> tuple[int, int]:
    """Mantissa bits and smallest normal exponent."""
    return MINIFLOAT_BITS[dtype][1], 1 - MINIFLOAT_BIAS[dtype]


def _rounded_code(significand: Any, exponent: Any, width: int, dtype: str) -> Any:
    """Code of `significand * 2**(exponent - width)`, nearest even, saturating.

    `significand` is an int32 below `2**(width + 1)`, and at least `2**width` unless the value is below the smallest
    normal one. A carry out of the kept bits lands in the exponent field, which is the right code.
    """
    mantissa, lowest = _minifloat(dtype)
    above = pinned(exponent - lowest)
    # Dropping width + 2 bits leaves zero for every significand, so a larger shift need not be expressed.
    drop = pinned(T.min(width - mantissa - T.min(above, 0), width + 2))
    half_even = (T.int32(1) << (drop - 1)) - 1 + ((significand >> drop) & 1)
    code = ((significand + half_even) >> drop) + (T.min(T.max(above, 0), 1 << 5) << mantissa)
    return T.min(code, MINIFLOAT_MAX_CODE[dtype])


def encode_fp32(bits: Any, dtype: str) -> Any:
    """Code without sign of the magnitude of fp32 bits (int32 of the value, not NaN)."""
    magnitude = pinned(bits & FP32_MAGNITUDE)
    exponent = pinned(magnitude >> FP32_MANTISSA_BITS)
    implicit = 1 << FP32_MANTISSA_BITS
    significand = pinned((magnitude & (implicit - 1)) | choose(exponent > 0, implicit, 0))
    return _rounded_code(significand, exponent - FP32_BIAS, FP32_MANTISSA_BITS, dtype)


def encode_shifted(magnitude: Any, scale: Any, dtype: str) -> Any:
    """Code without sign of a finite bf16 magnitude times `2**(127 - scale)`, exact also for subnormal input."""
    exponent = pinned(magnitude >> BF16_MANTISSA_BITS)
    significand = pinned((magnitude & _MANTISSA) | choose(exponent > 0, _IMPLICIT, 0))
    return _rounded_code(significand, T.max(exponent, 1) - scale, BF16_MANTISSA_BITS, dtype)


def code_of(bits: Any, scale: Any, dtype: str, sf_format: str) -> Any:
    """Code with sign of one element.

    Args:
        bits: int32 bf16 bits.
        scale: the ue8m0 byte of the group as int32, or its fp32 multiplier.
    """
    width = MINIFLOAT_BITS[dtype][0]
    whole = pinned(bits & BF16_MAGNITUDE)
    magnitude = pinned(T.min(whole, BF16_MAX_FINITE))
    if sf_format == "ue8m0":
        code = encode_shifted(magnitude, scale, dtype)
    else:
        code = encode_fp32(bits_of_fp32(widened(magnitude) * scale), dtype)
    signed = code | ((bits >> (16 - width)) & (1 << (width - 1)))
    # A NaN in an e2m1 group is the caller's: the whole group is replaced.
    return choose(whole > BF16_INF, E4M3_NAN, signed) if dtype == "e4m3" else signed


def ue8m0_of_amax(amax: Any, dtype: str) -> Any:
    """Scale byte of an amax, as int32."""
    floor, shift, mantissa = UE8M0_RULES[dtype]
    return T.max(floor, (amax >> BF16_MANTISSA_BITS) - shift + choose((amax & _MANTISSA) > mantissa, 1, 0))


def e4m3_of_amax(amax: Any) -> Any:
    """Scale code of an amax, as int32. One fp32 multiplication, of normal numbers."""
    largest = T.max(widened(amax), T.float32(E4M3_SF_AMAX_FLOOR))
    return encode_fp32(bits_of_fp32(T.min(largest * T.float32(E4M3_SF_RECIPROCAL), T.float32(E4M3_MAX))), "e4m3")


def poisoned_scale(sf_format: str) -> int:
    """Scale byte of a group that holds a NaN and cannot express it in its codes."""
    return UE8M0_NAN if sf_format == "ue8m0" else E4M3_NAN


def reciprocal_of_e4m3(code: Any) -> Any:
    """fp32 `1 / value` of a positive e4m3 code, correctly rounded.

    The value is `s * 2**(e - 10)` with s in 8..15 after normalising, so eight constants and an exponent are all there is.
    """
    value = pinned(bits_of_fp32(decoded_fp32(code, "e4m3")))
    digit = pinned((value >> 20) & 7)
    table = [fp32_bits(8.0 / s) for s in range(8, 16)]
    result = table[0]
    for index in range(1, 8):
        result = choose(digit == index, table[index], result)
    # 1 / (s/8 * 2**k) = (8/s) * 2**-k, with k = exponent field - 127
    return fp32_of_bits(result - ((value >> FP32_MANTISSA_BITS) - FP32_BIAS << FP32_MANTISSA_BITS))


def bf16_of_code(magnitude: Any, dtype: str) -> Any:
    """bf16 bits of a code without sign, exact; the NaN code of e4m3 is the caller's."""
    if dtype == "e2m1":
        half = (FP32_BIAS - 1) << BF16_MANTISSA_BITS  # 0.5, the smallest value
        return choose(magnitude > 1, (magnitude << 6) + half, magnitude * half)
    normal = (magnitude << 4) + ((FP32_BIAS - MINIFLOAT_BIAS["e4m3"]) << BF16_MANTISSA_BITS)
    # A subnormal is an integer times 2**-9, and the conversion of an integer is exact.
    subnormal = (bits_of_fp32(T.cast(magnitude, "float32")) >> BF16_SHIFT) - (9 << BF16_MANTISSA_BITS)
    return choose(magnitude > 7, normal, choose(magnitude > 0, subnormal, 0))


def decoded_fp32(code: Any, dtype: str) -> Any:
    """fp32 of a code with sign; e4m3's NaN codes give NaN."""
    width = MINIFLOAT_BITS[dtype][0]
    magnitude = pinned(code & ((1 << (width - 1)) - 1))
    bits = bf16_of_code(magnitude, dtype)
    if dtype == "e4m3":
        bits = choose(magnitude == E4M3_NAN, BF16_NAN, bits)
    return widened(bits | ((code >> (width - 1)) << 15))


def scaled_bf16(code: Any, scale: Any, dtype: str) -> Any:
    """bf16 bits (int32) of a code times `2**(scale - 127)`, for a scale byte that `is_plain_scale` accepts."""
    width = MINIFLOAT_BITS[dtype][0]
    magnitude = pinned(code & ((1 << (width - 1)) - 1))
    bits = pinned(bf16_of_code(magnitude, dtype))
    shifted = choose(bits > 0, bits + ((scale - FP32_BIAS) << BF16_MANTISSA_BITS), 0)
    signed = shifted | ((code >> (width - 1)) << 15)
    return choose(magnitude == E4M3_NAN, BF16_NAN, signed) if dtype == "e4m3" else signed


def is_plain_scale(scale: Any) -> Any:
    """No product of a code and `2**(scale - 127)` leaves bf16's normal range."""
    return (scale > 9) & (scale < 246)


def scaled_bf16_any(code: Any, scale: Any, dtype: str) -> Any:
    """`scaled_bf16` for every scale byte: subnormal results round to nearest even, 255 is Inf, 0 is zero."""
    width = MINIFLOAT_BITS[dtype][0]
    magnitude = pinned(code & ((1 << (width - 1)) - 1))
    bits = pinned(bf16_of_code(magnitude, dtype))
    exponent = pinned((bits >> BF16_MANTISSA_BITS) + scale - FP32_BIAS)
    drop = pinned(T.min(T.max(1 - exponent, 1), BF16_MANTISSA_BITS + 2))
    significand = (bits & _MANTISSA) | _IMPLICIT
    subnormal = (significand + (T.int32(1) << (drop - 1)) - 1 + ((significand >> drop) & 1)) >> drop
    normal = (exponent << BF16_MANTISSA_BITS) | (bits & _MANTISSA)
    finite = choose(exponent > 0, normal, subnormal)
    product = choose((scale == UE8M0_NAN) | (exponent > 254), BF16_INF, choose(scale == 0, 0, finite))
    signed = choose(bits == 0, 0, product) | ((code >> (width - 1)) << 15)
    nan = (bits == 0) & (scale == UE8M0_NAN)
    return choose(nan | (magnitude == E4M3_NAN), BF16_NAN, signed) if dtype == "e4m3" else choose(nan, BF16_NAN, signed)


def rounded_bf16(value: Any) -> Any:
    """bf16 bits (int32 in [0, 0xFFFF]) of fp32, nearest even, every NaN 0x7FFF."""
    bits = pinned(bits_of_fp32(value))
    kept = T.cast(T.cast(bits, "uint32") + T.uint32(0x7FFF) + T.cast((bits >> BF16_SHIFT) & 1, "uint32"), "uint32")
    rounded = T.cast(kept >> T.uint32(BF16_SHIFT), "int32")
    return choose((bits & FP32_MAGNITUDE) > FP32_INF, BF16_NAN, rounded)
