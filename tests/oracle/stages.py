"""The fused stages one number at a time, in numpy fp32 scalars: recursion and loops, no vectorised arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np

F32 = np.float32
Row = list[Any]


def pair_sum(values: Row) -> Any:
    """Sum over the tree of adjacent pairs, zeros filling up to a power of two."""
    if len(values) == 1:
        return values[0]
    size = 1
    while size < len(values):
        size *= 2
    values = values + [F32(0)] * (size - len(values))
    return pair_sum(values[: size // 2]) + pair_sum(values[size // 2 :])


def rms_norm(row: Row, weight: Row, eps: float) -> Row:
    total = pair_sum([x * x for x in row])
    r = F32(1) / np.sqrt(total / F32(len(row)) + F32(eps))
    return [(x * r) * w for x, w in zip(row, weight, strict=True)]


def rope(row: Row, position: int, cache: Any, rope_dim: int, neox: bool, offset: int) -> Row:
    out = list(row)
    for i in range(rope_dim // 2):
        inside = 0 <= position < len(cache)
        c = cache[position][i] if inside else F32(0)
        s = cache[position][rope_dim // 2 + i] if inside else F32(0)
        first = offset + (i if neox else 2 * i)
        second = first + (rope_dim // 2 if neox else 1)
        a, b = row[first], row[second]
        out[first] = a * c - b * s
        out[second] = b * c + a * s
    return out


def hadamard(row: Row) -> Row:
    scale = F32(len(row) ** -0.5)
    return [x * scale for x in _butterflies(row)]


def _butterflies(row: Row) -> Row:
    """The last round pairs the two halves, each of which went through the earlier rounds on its own."""
    if len(row) == 1:
        return row
    low, high = _butterflies(row[: len(row) // 2]), _butterflies(row[len(row) // 2 :])
    return [a + b for a, b in zip(low, high, strict=True)] + [a - b for a, b in zip(low, high, strict=True)]
