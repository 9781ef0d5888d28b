"""Correctly rounded division and square root of fp32 by integer arithmetic.

Whether the device divides and takes roots to the last bit is not promised anywhere; integers are exact everywhere. Each of
these runs once a scale group or once a row, not once an element.
"""

from typing import Any

from tilelang.ascend import language as T

from kvhal.backends.ascend_tilelang.codec import bits_of_fp32, choose, fp32_bits, fp32_of_bits, pinned
from kvhal.formats import (
    BF16_MANTISSA_BITS,
    BF16_SHIFT,
    E4M3_MAX,
    FP32_BIAS,
    FP32_INF,
    FP32_MANTISSA_BITS,
    FP32_SF_AMAX_FLOOR,
)

_IMPLICIT = 1 << FP32_MANTISSA_BITS


def _composed(quotient: Any, drop: Any, exponent: Any) -> Any:
    """fp32 bits of `quotient * 2**exponent`, an int32 of 24 + drop bits; ties do not occur (see the callers)."""
    rounded = pinned((quotient + (T.int32(1) << (drop - 1))) >> drop)
    # Adding the significand with its leading bit to the field below lets a carry of the rounding reach the exponent.
    return ((exponent + drop + FP32_MANTISSA_BITS + FP32_BIAS - 1) << FP32_MANTISSA_BITS) + rounded


def fp32_of_amax(amax: Any) -> Any:
    """fp32 bits of the scale `max(amax, 1e-4) / 448`, with amax as bf16 bits.

    448 is 7 * 2**6. For an amax `s * 2**(E - 134)` with s in 128..255, `(s << 23) // 7` has 28 or 29 bits, of which 24 are
    kept; a quotient by seven is exact or no tie.
    """
    significand = (amax & ((1 << BF16_MANTISSA_BITS) - 1)) | (1 << BF16_MANTISSA_BITS)
    quotient = pinned(T.truncdiv(significand << 23, 7))
    drop = pinned(choose(quotient >= 1 << 28, 5, 4))
    bits = _composed(quotient, drop, (amax >> BF16_MANTISSA_BITS) - 134 - 23 - 6)
    floor = fp32_bits(FP32_SF_AMAX_FLOOR)
    return choose(amax << BF16_SHIFT > floor, bits, fp32_bits(FP32_SF_AMAX_FLOOR / E4M3_MAX))


def _significand(bits: Any) -> Any:
    return pinned(T.cast((bits & (_IMPLICIT - 1)) | _IMPLICIT, "int64"), "int64")


def _sticky(quotient: Any, exact: Any) -> Any:
    """The quotient as int32 with "something was cut off" in its lowest bit; at least two more bits must be dropped."""
    return T.cast(quotient, "int32") | choose(exact, 0, 1)


def reciprocal_bits(bits: Any) -> Any:
    """fp32 bits of `1 / value` for a positive normal value whose reciprocal is normal.

    With the value `t * 2**(e - 150)`, t in [2**23, 2**24): `2**50 // t` has 27 or 28 bits.
    """
    significand = _significand(bits)
    quotient = pinned(T.truncdiv(T.int64(1 << 50), significand), "int64")
    drop = pinned(choose(quotient >= T.int64(1 << 27), 4, 3))
    kept = _sticky(quotient, quotient * significand == T.int64(1 << 50))
    return _composed(kept, drop, 150 - 50 - (bits >> FP32_MANTISSA_BITS))


def _is_normal(bits: Any, smallest_exponent: int = 1) -> Any:
    """Positive, finite, and of at least this exponent field."""
    return choose(bits >= smallest_exponent << FP32_MANTISSA_BITS, choose(bits < FP32_INF, 1, 0), 0) == 1


def reciprocal(value: Any) -> Any:
    """fp32 `1 / value` of a value that is not negative."""
    bits = pinned(bits_of_fp32(value))
    # Reciprocals of zero, Inf and NaN need no rounding, and neither do the few that would be subnormal: a root is never
    # that large.
    plain = pinned(T.float32(1.0) / value, "float32")
    return fp32_of_bits(choose(_is_normal(bits), reciprocal_bits(bits), bits_of_fp32(plain)))


def divided_by(value: Any, divisor: int) -> Any:
    """fp32 `value / divisor` of a value that is not negative by an integer below 2**24.

    With the divisor shifted up to 24 bits, `(t << 27) // divisor` has 27 or 28 bits.
    """
    if divisor & (divisor - 1) == 0:
        return value * T.float32(1.0 / divisor)
    bits = pinned(bits_of_fp32(value))
    shift = 24 - divisor.bit_length()
    numerator = pinned(_significand(bits) << T.int64(27), "int64")
    quotient = pinned(T.truncdiv(numerator, T.int64(divisor << shift)), "int64")
    drop = pinned(choose(quotient >= T.int64(1 << 27), 4, 3))
    kept = _sticky(quotient, quotient * T.int64(divisor << shift) == numerator)
    result = _composed(kept, drop, (bits >> FP32_MANTISSA_BITS) - 150 - 27 + shift)
    # A quotient that is subnormal is left to the device.
    large = _is_normal(bits, divisor.bit_length() + 1)
    return fp32_of_bits(choose(large, result, bits_of_fp32(value / T.float32(divisor))))


def square_root(value: Any) -> Any:
    """fp32 square root of a value that is not negative.

    The significand is shifted up to 51 or 52 bits, so that its integer root has 26. The device's own root, at whatever
    precision, starts one step of Newton's iteration, which ends at the root or one above it.
    """
    bits = pinned(bits_of_fp32(value))
    scale = pinned((bits >> FP32_MANTISSA_BITS) - 150)
    shift = pinned(choose((scale & 1) == 1, 27, 28))
    radicand = pinned(_significand(bits) << T.cast(shift, "int64"), "int64")
    start = pinned(T.max(T.cast(T.sqrt(T.cast(radicand, "float32")), "int64"), T.int64(1)), "int64")
    above = pinned((start + T.truncdiv(radicand, start)) >> T.int64(1), "int64")
    root = pinned(above - T.cast(choose(above * above > radicand, 1, 0), "int64"), "int64")
    result = _composed(_sticky(root, root * root == radicand), T.int32(2), (scale - shift) >> 1)
    return fp32_of_bits(choose(_is_normal(bits), result, bits_of_fp32(T.sqrt(value))))
