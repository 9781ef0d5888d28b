"""Kernels that put the codec's device functions next to each other, for the tests over every input."""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal.backends.portable_triton.codec import encode_e4m3, power_of_two_bits, reciprocal, round_bf16, widen
from kvhal.backends.portable_triton.codec_e2m1 import E2M1_TOP, reciprocal_of_scale, round_e2m1, scale_e2m1
from kvhal.backends.portable_triton.launch import prefetch_rows
from kvhal.backends.portable_triton.packed import multiplied_codes, scaled_codes
from kvhal.backends.portable_triton.stages import inverse_root

FIRST_SCALE = tl.constexpr(105)  #: the smallest ue8m0 byte of e4m3 data


@triton.jit
def count_e4m3_mismatches(count_ptr, size: tl.constexpr):
    """Adds how many of this program's fp32 bit patterns the hardware encodes otherwise than the integers do."""
    bits = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    value = bits.to(tl.int32).to(tl.float32, bitcast=True)
    wrong = encode_e4m3(value, True) != encode_e4m3(value, False)
    tl.atomic_add(count_ptr, tl.sum(wrong.to(tl.int32)))


@triton.jit
def count_bf16_mismatches(count_ptr, size: tl.constexpr):
    """The same of rounding fp32 to bf16."""
    bits = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    value = bits.to(tl.int32).to(tl.float32, bitcast=True)
    wrong = round_bf16(value, True) != round_bf16(value, False)
    tl.atomic_add(count_ptr, tl.sum(wrong.to(tl.int32)))


@triton.jit
def count_root_mismatches(count_ptr, size: tl.constexpr):
    """The same of 1 / sqrt of fp32 without a sign bit, against the compiler's own steps; NaNs count as equal."""
    bits = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    value = bits.to(tl.int32).to(tl.float32, bitcast=True)
    have, need = inverse_root(value, True, True), reciprocal(tl.sqrt_rn(value), True)
    wrong = (have.to(tl.int32, bitcast=True) != need.to(tl.int32, bitcast=True)) & ((have == have) | (need == need))
    tl.atomic_add(count_ptr, tl.sum((wrong & (bits.to(tl.int32) >= 0)).to(tl.int32)))


@triton.jit
def every_pair(size: tl.constexpr):
    """Pairs of bf16 (program 0 has `size`), each bf16 in both halves, as int32; the power of two of a scale byte a row."""
    low = (tl.program_id(0) * size + tl.arange(0, size)) & 0xFFFF
    high = (low * 40503 + 12345) & 0xFFFF  # every bf16 once more, in another order
    return low, high, power_of_two_bits(FIRST_SCALE + tl.program_id(1) + tl.zeros((size,), tl.int32))


@triton.jit
def codes_of_pairs(scaled_ptr, multiplied_ptr, size: tl.constexpr):
    """Four codes of `every_pair` and its exchanged halves, as both packed functions make them."""
    low, high, power = every_pair(size)
    pair, exchanged = low | (high << 16), high | (low << 16)
    half = power.to(tl.int32, bitcast=True) >> 16
    at = tl.program_id(1) * 65536 + tl.program_id(0) * size + tl.arange(0, size)
    tl.store(scaled_ptr + at, scaled_codes(pair, exchanged, half | (half << 16)))
    tl.store(multiplied_ptr + at, multiplied_codes(pair, exchanged, power))


@triton.jit
def codes_of_halves(out_ptr, size: tl.constexpr):
    """The same by integers, one element after another; a kernel of its own, as hardware codes must not be used again."""
    low, high, power = every_pair(size)
    first = encode_e4m3((low << 16).to(tl.float32, bitcast=True) * power, False).to(tl.int32)
    second = encode_e4m3((high << 16).to(tl.float32, bitcast=True) * power, False).to(tl.int32)
    at = tl.program_id(1) * 65536 + tl.program_id(0) * size + tl.arange(0, size)
    tl.store(out_ptr + at, first | (second << 8) | (second << 16) | (first << 24))


@triton.jit
def both_reciprocals(value_ptr, out_ptr, size: tl.constexpr):
    """out[0]: the hardware's, out[1]: the true division's, of fp32 [size]."""
    at = tl.arange(0, size)
    value = tl.load(value_ptr + at)
    tl.store(out_ptr + at, reciprocal_of_scale(value, True))
    tl.store(out_ptr + size + at, reciprocal_of_scale(value, False))


@triton.jit
def encode_e2m1_pairs(bits_ptr, amax_ptr, scale_ptr, words_ptr, count, rec: tl.constexpr, size: tl.constexpr):
    """e2m1 words of bf16 bits under the scale of each program's amax, saturating; and that scale byte."""
    scale_at = tl.program_id(1)
    at = tl.program_id(0) * size + tl.arange(0, size)
    bits = tl.load(bits_ptr + at, mask=at < count, other=0)
    amax = tl.load(amax_ptr + scale_at + tl.zeros((1,), tl.int32)).to(tl.int32) << 16
    scale, multiplier = scale_e2m1(amax, rec)
    value = tl.clamp(widen(bits) * multiplier, -E2M1_TOP, E2M1_TOP)
    words = tl.reshape(round_e2m1(value[None, :], rec.ptx), (size // 8,))
    word_at = tl.program_id(0) * (size // 8) + tl.arange(0, size // 8)
    tl.store(words_ptr + scale_at * (count // 8) + word_at, words, mask=word_at < count // 8)
    tl.store(scale_ptr + scale_at + tl.zeros((1,), tl.int32), scale)


@triton.jit
def prefetch_and_no_more(
    rows_ptr, stride, n, tokens: tl.constexpr, width: tl.constexpr, elements: tl.constexpr, early: tl.constexpr
):
    """What a store does before it waits."""
    row = tl.program_id(0) * tokens + tl.arange(0, tokens)
    prefetch_rows(early, rows_ptr + row * stride, row < n, width, elements)
