"""The fp32 stages of the fused store as Triton device functions, in the order of operations that docs/numerics.md fixes.

Sums are trees over adjacent pairs, never a reduction over more than two elements, and products are rounded before they are
added.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from kvhal.backends.portable_triton.codec import reciprocal
from kvhal.backends.portable_triton.packed import addresses, first_of_lane, item_of_lane, rows_of


@dataclass(frozen=True)
class Stages:
    """What a fused kernel does, as a compile-time constant.

    Attributes:
        norm, hadamard, store, back: the stage or output is on.
        rope_dim, rope_offset, neox: the rotated elements; rope_dim 0 is no rotation.
        scale: fp32 factor of the Hadamard transform.
    """

    norm: bool
    rope_dim: int
    rope_offset: int
    neox: bool
    hadamard: bool
    store: bool
    back: bool
    scale: float


@triton.jit
def sum_of_pairs(values, rec: tl.constexpr):
    """Sum of each row of fp32 [T, tile] by the tree over adjacent pairs."""
    levels: tl.constexpr = rec.levels
    for _ in tl.static_range(levels):
        values = tl.sum(tl.reshape(values, (values.shape[0], values.shape[1] // 2, 2)), axis=2)
    return tl.reshape(values, (values.shape[0],))


@triton.jit
def rms_norm(x, weight, eps, rec: tl.constexpr):
    """``(x * (1 / sqrt(mean(x^2) + eps))) * weight`` of fp32 [T, tile] and fp32 [T or 1, tile]."""
    total = sum_of_pairs(x * x, rec)
    if rec.tile == rec.elements:  # a power of two: the product is as exact as the quotient
        mean = total * (1.0 / rec.elements)
    else:
        mean = tl.div_rn(total, tl.full(total.shape, rec.elements, tl.float32))
    inverse = inverse_root(mean + eps, rec.native, rec.ptx)
    return (x * inverse[:, None]) * weight


@triton.jit
def inverse_root(value, native: tl.constexpr, ptx: tl.constexpr):
    """``1 / sqrt(value)`` of fp32 >= 0 (or NaN), both steps rounded to nearest even."""
    if native:
        # the steps of the compiler's own sqrt and reciprocal, without its calls for rare values: small ones are scaled by a
        # power of four first (tests/triton compares every fp32)
        small = value < 2.0**-100
        scaled = tl.where(small, value * 2.0**64, value)
        guess = tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=r,r", [scaled], tl.float32, is_pure=True, pack=1)
        root = scaled * guess
        root = tl.fma(tl.fma(-root, root, scaled), guess * 0.5, root)
        guess = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [root], tl.float32, is_pure=True, pack=1)
        result = tl.fma(guess, tl.fma(-root, guess, 1.0), guess)
        result = tl.where(small, result * 2.0**32, result)
        result = tl.where(value == 0.0, float("inf"), result)
        result = tl.where(value == float("inf"), 0.0, result)
    else:
        result = reciprocal(tl.sqrt_rn(value), ptx)
    return result


@triton.jit
def pair_turns(cos_sin, ok, rec: tl.constexpr, stages: tl.constexpr):
    """Cosines and sines fp32 [T, tile / 2] of the pairs (2i, 2i + 1); zeros where nothing rotates."""
    first: tl.constexpr = stages.rope_offset // 2
    half: tl.constexpr = stages.rope_dim // 2
    if rec.pairs:
        pair = first_of_lane(4) + item_of_lane(rec, 4) - first
        mask = ok[None, :, None, None] & (pair >= 0) & (pair < half)
        table = addresses(cos_sin - first, rec, 4)
        cos = rows_of(tl.load(table, mask=mask, other=0.0))
        sin = rows_of(tl.load(table + half, mask=mask, other=0.0))
    else:
        pair = tl.arange(0, rec.tile // 2)[None, :] - first
        mask = ok[:, None] & (pair >= 0) & (pair < half)
        cos = tl.load(cos_sin[:, None] + pair, mask=mask, other=0.0)
        sin = tl.load(cos_sin[:, None] + (half + pair), mask=mask, other=0.0)
    return cos, sin


@triton.jit
def rotate_pairs(x, cos, sin, stages: tl.constexpr):
    """Rotates pairs (2i, 2i + 1) of fp32 [T, tile] by `pair_turns`."""
    half: tl.constexpr = x.shape[1] // 2
    a, b = tl.split(tl.reshape(x, (x.shape[0], half, 2)))
    pair = tl.arange(0, half) - stages.rope_offset // 2
    rotated = ((pair >= 0) & (pair < stages.rope_dim // 2))[None, :]
    first = tl.where(rotated, a * cos - b * sin, a)
    second = tl.where(rotated, b * cos + a * sin, b)
    return tl.reshape(tl.join(first, second), x.shape)


@triton.jit
def rotate_any(x, cos_sin, ok, stages: tl.constexpr):
    """Rotates the pairs of any style at any offset of fp32 [T, tile], fetching each element's partner."""
    half: tl.constexpr = stages.rope_dim // 2
    column = tl.arange(0, x.shape[1])
    place = column - stages.rope_offset
    rotated = (place >= 0) & (place < stages.rope_dim)
    if stages.neox:
        is_first, pair = place < half, place % half
        partner = tl.where(is_first, column + half, column - half)
    else:
        is_first, pair = place % 2 == 0, place // 2
        partner = tl.where(is_first, column + 1, column - 1)
    partner = tl.where(rotated, partner, column)
    other = tl.gather(x, tl.broadcast_to(partner[None, :], x.shape), axis=1)
    mask = rotated[None, :] & ok[:, None]
    cos = tl.load(cos_sin[:, None] + pair[None, :], mask=mask, other=0.0)
    sin = tl.load(cos_sin[:, None] + (half + pair)[None, :], mask=mask, other=0.0)
    turned = tl.where(is_first[None, :], x * cos - other * sin, x * cos + other * sin)
    return tl.where(rotated[None, :], turned, x)


@triton.jit
def hadamard(x, rec: tl.constexpr, scale: tl.constexpr):
    """Normalised Walsh-Hadamard transform of each row of fp32 [T, tile]."""
    rows: tl.constexpr = x.shape[0]
    tile: tl.constexpr = x.shape[1]
    levels: tl.constexpr = rec.levels
    for level in tl.static_range(levels):
        pairs = tl.reshape(x, (rows, tile // (2 << level), 2, 1 << level))
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (rows, tile))
    return x * scale
