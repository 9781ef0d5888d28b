"""The fp32 stages of a fused store as executable specification: RMSNorm, rotary embedding, Hadamard.

docs/numerics.md, "Fused norm, rotary embedding, Hadamard": one fp32 operation at a time, in a fixed order, so no fused
multiply-add, no `torch.sum`, no `rsqrt`, and no scalar divisor (see `kvhal.numerics`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvhal.interface import RopeArgs
from kvhal.numerics import widen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``(x * (1 / sqrt(mean(x^2) + eps))) * weight`` with the sum taken as a tree over adjacent pairs.

    Args:
        x: fp32 ``[n, elements]``.
        weight: bf16 or fp32 ``[elements]``.
        eps: rounded to fp32.

    Returns:
        fp32 ``[n, elements]``.
    """
    n, elements = x.shape
    padded = 1 << (elements - 1).bit_length()
    total = x.new_zeros((n, padded))
    total[:, :elements] = x * x
    while total.shape[1] > 1:
        total = total[:, 0::2] + total[:, 1::2]
    mean = total / torch.full_like(total, float(elements))
    root = _sqrt(mean + torch.full_like(mean, eps))
    return (x * (torch.ones_like(root) / root)) * widen(weight)


def _sqrt(x: Tensor) -> Tensor:
    """fp32 square root, rounded to nearest even. torch's own fp32 one is an ulp off on some CPUs; through fp64 it
    cannot be: the root of a 24-bit number is at least four fp64 ulps away from every midpoint of two fp32 numbers."""
    return x.to(torch.float64).sqrt().to(torch.float32)


def rope(x: Tensor, args: RopeArgs) -> Tensor:
    """Rotates some elements of each row.

    Args:
        x: fp32 ``[n, elements]``.
        args: which elements, and how; a position outside the cache reads cos = sin = 0.

    Returns:
        fp32 ``[n, elements]``, a new tensor.
    """
    positions, cos_sin_cache, rope_dim = args.positions, args.cos_sin_cache, args.rope_dim
    half, count, begin = rope_dim // 2, cos_sin_cache.shape[0], args.first(x.shape[1])
    valid = ((positions >= 0) & (positions < count)).unsqueeze(1)
    if count:
        cos_sin = cos_sin_cache[positions.to(torch.int64).clamp(0, count - 1)].masked_fill(~valid, 0.0)
    else:
        cos_sin = x.new_zeros((x.shape[0], rope_dim))
    cos, sin = cos_sin[:, :half], cos_sin[:, half:]
    out = x.clone()
    rotated = out[:, begin : begin + rope_dim]
    first, second = (rotated[:, :half], rotated[:, half:]) if args.is_neox_style else (rotated[:, 0::2], rotated[:, 1::2])
    a, b = first.clone(), second.clone()
    first.copy_(a * cos - b * sin)
    second.copy_(b * cos + a * sin)
    return out


def hadamard(x: Tensor) -> Tensor:
    """Normalised Walsh-Hadamard transform of each row.

    Args:
        x: fp32 ``[n, elements]``, elements a power of two.

    Returns:
        fp32 ``[n, elements]``.

    Raises:
        ValueError: the element count is no power of two.
    """
    n, elements = x.shape
    if elements & (elements - 1):
        raise ValueError(f"x: has {elements} elements a row, a Hadamard transform needs a power of two")
    h = 1
    while h < elements:
        pairs = x.reshape(n, elements // (2 * h), 2, h)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack((a + b, a - b), 2).reshape(n, elements)
        h *= 2
    scale: float = elements**-0.5
    return x * scale
