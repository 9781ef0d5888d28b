"""Arithmetic whose results do not depend on order, shape or device.

A library's matrix product may sum in another order when a chunk has another number of rows, and every device has its own.
Chunked and unchunked prefill would then differ by rounding, which a quantised record can turn into another byte and a
greedy choice into another token. So every dot product here is **exact**: its operands are first rounded to multiples of
a power of two ("snapped"), which makes each product a multiple of 2**-36 or coarser, and float64 adds such numbers without
any rounding as long as the sum of their magnitudes stays below 2**17. Norms bound it: |q| |k| <= 512 for records of 512
normalised elements, and attention weights are at most 1 each. What is left (elementwise +, -, *, /, and an exponential made of
them) is rounded the same way everywhere by IEEE 754.

With float32 as the accumulating dtype everything works alike, but sums are rounded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Multiples of 2**-bits that operands are rounded to; any two that meet in a product have at most 36 together.
ACTIVATION_BITS = 16
WEIGHT_BITS = 16
RECORD_BITS = 20
ATTENTION_BITS = 16

_LOG2E = 1.0 / math.log(2.0)
_LN2_HIGH, _LN2_LOW = 355.0 / 512.0, math.log(2.0) - 355.0 / 512.0  #: power * high is exact in fp32
_EXP_TERMS = 9  #: of the Taylor series on |r| <= ln(2) / 2; the next one is below 1e-10
_EXP_LIMIT = 87.0  #: keeps 2**k a normal fp32
_FP32_BIAS, _FP32_MANTISSA_BITS = 127, 23
_FP32_MAGNITUDE = 0x7FFFFFFF
_NOT_VISIBLE = torch.iinfo(torch.int64).min


def snap(x: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """`x` rounded to multiples of ``2**-bits`` (ties to even), as `dtype`, which accumulates; same shape, a new tensor."""
    return (x.to(dtype) * 2.0**bits).round_().mul_(2.0**-bits)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight``, rounded once.

    Args:
        x: fp32 ``[..., in]``.
        weight: accumulating dtype ``[in, out]``, multiples of ``2**-WEIGHT_BITS``.

    Returns:
        fp32 ``[..., out]``.
    """
    return (snap(x, ACTIVATION_BITS, weight.dtype) @ weight).float()


def exponential(x: Tensor) -> Tensor:
    """exp of fp32, from multiplications and additions alone, to about 2e-7; arguments are clamped to +-87."""
    x = x.clamp(-_EXP_LIMIT, _EXP_LIMIT)
    power = (x * _LOG2E).round_()
    rest = (x - power * _LN2_HIGH) - power * _LN2_LOW
    series = torch.ones_like(x)
    for term in range(_EXP_TERMS - 1, 0, -1):
        series.mul_(rest).mul_(1.0 / term).add_(1.0)
    scale = ((power.to(torch.int32) + _FP32_BIAS) << _FP32_MANTISSA_BITS).view(torch.float32)
    return series.mul_(scale)


def silu(x: Tensor) -> Tensor:
    """``x / (1 + exp(-x))`` of fp32."""
    return x / (exponential(-x) + 1.0)


def attention_weights(scores: Tensor, visible: Tensor, dtype: torch.dtype) -> Tensor:
    """``exp(score - largest visible score)`` where visible, exact zeros elsewhere; not yet divided by their sum.

    Args:
        scores: fp32 ``[..., keys]``.
        visible: bool, broadcasts to scores; a row without any gives zeros.
        dtype: accumulating dtype.

    Returns:
        `dtype` ``[..., keys]``, multiples of ``2**-ATTENTION_BITS`` in [0, 1].
    """
    scores = scores.masked_fill(~visible, torch.finfo(torch.float32).min)
    weights = exponential(scores - scores.amax(-1, keepdim=True))
    return snap(weights.masked_fill_(~visible, 0.0), ATTENTION_BITS, dtype)


def attend(queries: Tensor, records: Tensor, visible: Tensor, value_size: int) -> Tensor:
    """Attention of each query to its own records, which are keys and, without their rotary end, values.

    Args:
        queries: fp32 ``[n, heads, elements]``.
        records: accumulating dtype ``[n, keys, elements]``, snapped to RECORD_BITS.
        visible: bool ``[n, keys]``.
        value_size: leading elements that are summed.

    Returns:
        fp32 ``[n, heads, value_size]``; zeros for a query that sees nothing.
    """
    products = snap(queries, ACTIVATION_BITS, records.dtype) @ records.transpose(1, 2)
    scores = products.float() * queries.shape[-1] ** -0.5
    weights = attention_weights(scores, visible[:, None], records.dtype)
    total = weights.sum(-1, keepdim=True).clamp(min=2.0**-ATTENTION_BITS)
    return (weights @ records[..., :value_size] / total).float()


def index_scores(queries: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """The indexer's score of every key: ``sum over heads of weight * relu(query . key)``.

    Args:
        queries: fp32 ``[n, heads, elements]``.
        head_weights: fp32 ``[n, heads]``.
        keys: accumulating dtype ``[m, elements]`` shared by all queries, or ``[n, m, elements]``; snapped to RECORD_BITS.

    Returns:
        fp32 ``[n, m]``.
    """
    products = snap(queries, ACTIVATION_BITS, keys.dtype) @ keys.transpose(-1, -2)
    positive = snap(products.float().clamp(min=0.0), ACTIVATION_BITS, keys.dtype)
    weights = snap(head_weights, ACTIVATION_BITS, keys.dtype)
    # + 0.0 turns a -0.0 into 0.0: the two are equal and must not order two keys
    return (positive * weights[..., None]).sum(1).float() + 0.0


def pick_top(scores: Tensor, begin: Tensor, end: Tensor, count: int) -> Tensor:
    """The columns of the `count` best scores within [begin, end) of each row; of equal scores, the lower column.

    Args:
        scores: fp32 ``[n, m]``, no NaN and no -0.0.
        begin, end: integer ``[n, 1]``.
        count: picks a row.

    Returns:
        int32 ``[n, count]``, best first; -1 behind the last one where a row has fewer.
    """
    columns = torch.arange(scores.shape[1], device=scores.device)
    bits = scores.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & _FP32_MAGNITUDE)).to(torch.int64)
    # one integer a column, all different: what topk does with equal values is not specified
    rank = (ordered << 32) - columns
    rank = rank.masked_fill((columns < begin) | (columns >= end), _NOT_VISIBLE)
    best = rank.topk(min(count, scores.shape[1]), dim=1)
    picks = torch.where(best.values == _NOT_VISIBLE, -1, best.indices).to(torch.int32)
    return torch.nn.functional.pad(picks, (0, count - picks.shape[1]), value=-1)
