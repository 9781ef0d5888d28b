"""Rows of bf16 and fp32 values that find wrong codecs: each scale group gets one of the patterns below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvhal.formats import BF16_INF, BF16_MAX_FINITE, KVCacheFormat

SIGN = 0x8000
Array = np.ndarray[Any, Any]
Fill = Callable[[np.random.Generator, int], Array]


def bf16_bits(values: Any) -> Array:
    """bf16 bits (uint16) of finite fp32 values, truncated: inputs need no rounding rule."""
    bits: Array = np.asarray(values, np.float32).view(np.uint32) >> 16
    return bits.astype(np.uint16)


def _signs(rng: np.random.Generator, n: int) -> Array:
    return (rng.integers(0, 2, n) * SIGN).astype(np.uint16)


def _with_signs(rng: np.random.Generator, magnitudes: Array) -> Array:
    bits: Array = magnitudes.astype(np.uint16)
    return bits | _signs(rng, len(bits))  # type: ignore[no-any-return]


def _gauss(rng: np.random.Generator, n: int) -> Array:
    return bf16_bits(rng.standard_normal(n))


def _zeros(rng: np.random.Generator, n: int) -> Array:
    return np.zeros(n, np.uint16)


def _signed_zeros(rng: np.random.Generator, n: int) -> Array:
    return _signs(rng, n)


def _subnormal(rng: np.random.Generator, n: int) -> Array:
    return _with_signs(rng, rng.integers(1, 0x80, n))


def _outlier(rng: np.random.Generator, n: int) -> Array:
    bits = bf16_bits(rng.standard_normal(n) * 2.0**-12)
    bits[rng.integers(n)] = bf16_bits(700.0)
    return bits


def _powers(rng: np.random.Generator, n: int) -> Array:
    return _with_signs(rng, rng.integers(90, 160, n) << 7)


def _around(mantissas: tuple[int, ...]) -> Fill:
    """The group's amax is a mantissa at which the scale's exponent steps, or its neighbour."""

    def fill(rng: np.random.Generator, n: int) -> Array:
        exponent = int(rng.integers(100, 180))
        bits: Array = rng.integers(exponent - 12, exponent, n) << 7 | rng.integers(0, 128, n)
        bits[rng.integers(n)] = exponent << 7 | int(rng.choice(mantissas))
        return _with_signs(rng, bits)

    return fill


def _saturated(rng: np.random.Generator, n: int) -> Array:
    return _with_signs(rng, BF16_MAX_FINITE - rng.integers(0, 3, n))


def _ties(steps: tuple[float, ...], largest: float) -> Fill:
    """Values halfway between two codes, under a scale that the largest code fixes."""

    def fill(rng: np.random.Generator, n: int) -> Array:
        unit = 2.0 ** int(rng.integers(-10, 11))
        bits = bf16_bits(rng.choice(np.array(steps), n) * unit)
        bits[rng.integers(n)] = bf16_bits(largest * unit)
        return _with_signs(rng, bits)

    return fill


def _floor(rng: np.random.Generator, n: int) -> Array:
    """Around the smallest scales: 1e-4 for e4m3 data, 6 * 2^-9 for e4m3 scales, 6 * 2^-126 for e2m1 data."""
    largest = int(rng.choice([0x38D0, 0x38D1, 0x38D2, 0x3C3F, 0x3C40, 0x3C41, 0x013F, 0x0140, 0x0141, 0x00C0]))
    return _with_signs(rng, rng.integers(0, largest + 1, n))


def _nan(rng: np.random.Generator, n: int) -> Array:
    bits = _gauss(rng, n)
    bits[rng.integers(n)] = rng.choice([0x7FC0, 0x7F81, 0x7FFF, 0xFFC0, 0xFF81, 0xFFFF])
    return bits


def _inf(rng: np.random.Generator, n: int) -> Array:
    bits = _gauss(rng, n)
    bits[rng.integers(n)] = rng.choice([BF16_INF, BF16_INF | SIGN])
    return bits


def _inf_and_nan(rng: np.random.Generator, n: int) -> Array:
    return rng.choice([0x7F80, 0xFF80, 0x7FC1, 0xFFC1, 0x3F80, 0x7F7F], n).astype(np.uint16)


def _all_nan(rng: np.random.Generator, n: int) -> Array:
    return _with_signs(rng, np.full(n, 0x7FC0))


def _any(rng: np.random.Generator, n: int) -> Array:
    return rng.integers(0, 0x10000, n).astype(np.uint16)


def _any_finite(rng: np.random.Generator, n: int) -> Array:
    return _with_signs(rng, rng.integers(0, BF16_MAX_FINITE + 1, n))


_E4M3_TIES = (1.0625, 1.1875, 17.0, 19.0, 232.0, 248.0, 432.0, 2.0**-10, 3 * 2.0**-10, 15 * 2.0**-10, 5 * 2.0**-10)
_E2M1_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

#: 19 patterns, a prime number, so that every pattern meets every group of a record
PATTERNS: tuple[Fill, ...] = (
    _gauss,
    _zeros,
    _outlier,
    _nan,
    _signed_zeros,
    _ties(_E4M3_TIES, 448.0),
    _inf,
    _subnormal,
    _around((95, 96, 97)),
    _any,
    _powers,
    _ties(_E2M1_TIES, 6.0),
    _floor,
    _all_nan,
    _around((63, 64, 65)),
    _saturated,
    _any_finite,
    _inf_and_nan,
    _gauss,
)


def adversarial_rows(rng: np.random.Generator, rows: int, layout: KVCacheFormat) -> Array:
    """bf16 bits (uint16) ``[rows, elements]``; group g of row r has pattern ``(r + g) mod 19``."""
    out = np.empty((rows, layout.elements), np.uint16)
    size = layout.elements_per_sf or 32
    for row in range(rows):
        for group, begin in enumerate(range(0, layout.elements, size)):
            end = min(begin + size, layout.elements)
            out[row, begin:end] = PATTERNS[(row + group) % len(PATTERNS)](rng, end - begin)
    return out


def plain_rows(rng: np.random.Generator, rows: int, elements: int) -> Array:
    """bf16 bits (uint16) ``[rows, elements]`` of normally distributed values."""
    return bf16_bits(rng.standard_normal((rows, elements)))
