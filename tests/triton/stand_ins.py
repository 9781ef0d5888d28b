"""What the PTX in portable_triton's packed path says, in operations that Triton's interpreter has."""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal.backends.portable_triton.codec import encode_e4m3, reciprocal, round_bf16


@triton.jit
def pair_bf16(low, high):
    return (round_bf16(low, False).to(tl.int32) & 0xFFFF) | (round_bf16(high, False).to(tl.int32) << 16)


@triton.jit
def lower_halves(left, right):
    return (left & 0xFFFF) | (right << 16)


@triton.jit
def upper_halves(left, right):
    return ((left >> 16) & 0xFFFF) | (right & -0x10000)


@triton.jit
def larger_of_pairs(left, right):
    low = tl.maximum(left & 0x7FFF, right & 0x7FFF)
    high = tl.maximum((left >> 16) & 0x7FFF, (right >> 16) & 0x7FFF)
    low = tl.where(low > 0x7F80, 0x7FFF, low)
    return low | (tl.where(high > 0x7F80, 0x7FFF, high) << 16) | -0x7FFF8000  # with some sign


@triton.jit
def larger_halves(left, right):
    low = tl.maximum(left & 0xFFFF, right & 0xFFFF)
    return low | (tl.maximum((left >> 16) & 0xFFFF, (right >> 16) & 0xFFFF) << 16)


@triton.jit
def multiplied_codes(first, second, multiplier):
    low = first << 16
    code = encode_e4m3(low.to(tl.float32, bitcast=True) * multiplier, False).to(tl.int32)
    code |= encode_e4m3((first & -0x10000).to(tl.float32, bitcast=True) * multiplier, False).to(tl.int32) << 8
    code |= encode_e4m3((second << 16).to(tl.float32, bitcast=True) * multiplier, False).to(tl.int32) << 16
    return code | (encode_e4m3((second & -0x10000).to(tl.float32, bitcast=True) * multiplier, False).to(tl.int32) << 24)


@triton.jit
def scaled_codes(first, second, multiplier):
    return multiplied_codes(first, second, (multiplier << 16).to(tl.float32, bitcast=True))


@triton.jit
def smaller_halves(left, right):
    low = tl.minimum(left & 0xFFFF, right & 0xFFFF)
    return low | (tl.minimum((left >> 16) & 0xFFFF, (right >> 16) & 0xFFFF) << 16)


@triton.jit
def e2m1_code(bits, multiplier, place: tl.constexpr):
    """The code of one element, fp32 bits, in nibble `place`."""
    value = tl.clamp(bits.to(tl.float32, bitcast=True) * multiplier, -6 * 2.0**-14, 6 * 2.0**-14)
    half = value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    magnitude = half & 0x7FFF
    code = (magnitude + 0xFF + ((magnitude >> 9) & 1)) >> 9
    return (code | ((half >> 12) & 8)) << (4 * place)


@triton.jit
def octet_codes(first, second, third, fourth, multiplier):
    word = e2m1_code(first << 16, multiplier, 0) | e2m1_code(first & -0x10000, multiplier, 1)
    word |= e2m1_code(second << 16, multiplier, 2) | e2m1_code(second & -0x10000, multiplier, 3)
    word |= e2m1_code(third << 16, multiplier, 4) | e2m1_code(third & -0x10000, multiplier, 5)
    return word | e2m1_code(fourth << 16, multiplier, 6) | e2m1_code(fourth & -0x10000, multiplier, 7)


@triton.jit
def reciprocal_of_scale(value, native: tl.constexpr):
    return reciprocal(value, False)


@triton.jit
def inverse_root(value, native: tl.constexpr, ptx: tl.constexpr):
    return reciprocal(tl.sqrt_rn(value), False)


@triton.jit
def prefetch(addresses, wanted):
    """Leaves a mark at each address; a test of its own puts it in place."""
    tl.store(addresses, 1.0, mask=wanted)


#: (module, name) -> what stands in for it; a module sees its own imports
REPLACED = {
    "packed": (lower_halves, upper_halves, larger_of_pairs, larger_halves, multiplied_codes, scaled_codes),
    "packed_e2m1": (smaller_halves, larger_halves, octet_codes, reciprocal_of_scale),
    "fused": (pair_bf16,),
    "stages": (inverse_root,),
}
