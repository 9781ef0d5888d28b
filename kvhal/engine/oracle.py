"""The same model without a cache: every position recomputed, attention as a dense masked product.

It shares weights and arithmetic with the engine, and nothing of what the engine is there to show: no cache, slot, block, ring,
plan, chunk or operation of kvhal. Records go through `kvhal.numerics` and `kvhal.stages` alone.

How far quantisation moves the logits, as |quantised - bf16| / |bf16| over a text, where top_k covers every group: at most 0.06
with FP8 records, 0.14 with FP4 compressed ones, 0.21 with FP4 ones alone (default width, 3 or 4 layers; tests hold it). Where
the indexer has to choose, a quantised key can change a choice, and no such bound exists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvhal import numerics, stages
from kvhal.engine.arithmetic import (
    ACTIVATION_BITS,
    ATTENTION_BITS,
    RECORD_BITS,
    attention_weights,
    index_scores,
    snap,
)
from kvhal.engine.config import VOCABULARY, EngineConfig
from kvhal.engine.model import Model
from kvhal.engine.weights import Weights
from kvhal.formats import KVCacheFormat

_QUERY_TILE = 256  #: queries at a time; it bounds the dense score matrix


@torch.no_grad()
def no_cache_logits(config: EngineConfig, weights: Weights, tokens: list[int] | Tensor, *, quantized: bool = True) -> Tensor:
    """Logits of every position of one sequence.

    Args:
        config: the model; its formats say what a record is rounded to.
        weights: of the model, on the device to compute on.
        tokens: ``[t]``, at most max_seq_len.
        quantized: True: each record is quantised and dequantised as its format says, which an engine with caches matches to
            the last bit. False: records are bf16, which is what the model computes without quantisation.

    Returns:
        fp32 ``[t, vocabulary]``.
    """
    model, device = Model(config, weights), weights.embedding.device
    ids = torch.as_tensor(tokens, dtype=torch.int64, device=device)
    if ids.shape[0] == 0:
        return torch.empty((0, VOCABULARY), device=device)
    positions = torch.arange(ids.shape[0], dtype=torch.int32, device=device)
    distance = positions[:, None] - positions
    in_window = (distance >= 0) & (distance < config.window_size)
    x = model.embed(ids)
    records, visible = x, in_window  # of the group; layer 0 is a source and makes them
    for layer, part in enumerate(weights.layers):
        h = model.hidden(x, part.norm)
        if config.source_layer(layer) == layer:
            records, picked = _compressed(model, layer, h, positions, quantized)
            visible = torch.cat((in_window, picked), 1)
        rows = _rotated(model, model.latent(part, h), part.latent_norm, positions)
        window = _stored(rows, config.swa_format if quantized else None)
        values = _dense_attention(model, model.queries(part, h, positions), torch.cat((window, records)), visible)
        x = x + model.attention_output(part, values)
        x = x + model.feed_forward(part, x)
    return model.logits(x)


def _compressed(model: Model, layer: int, h: Tensor, positions: Tensor, quantized: bool) -> tuple[Tensor, Tensor]:
    """Pooled records bf16 ``[groups, latent]``, and which of them each query picks, bool ``[t, groups]``."""
    config, compressor = model.config, model.source(layer)
    groups = h.shape[0] // config.ratio
    pooled = model.pool(compressor, h[: groups * config.ratio].view(groups, config.ratio, config.hidden_size))
    first = positions[:: config.ratio][:groups]
    rows = _rotated(model, model.compressed(compressor, pooled), compressor.latent_norm, first)
    records = _stored(rows, config.main_format if quantized else None)
    key_rows = stages.hadamard(_rotated(model, model.index_keys(compressor, pooled), compressor.index_norm, first))
    keys = snap(_stored(key_rows, config.index_format if quantized else None), RECORD_BITS, model.dtype)
    queries, head_weights = model.index_queries(compressor, h, positions)
    complete = (first + config.ratio) <= positions[:, None] + 1
    scores = [index_scores(queries[tile], head_weights[tile], keys) for tile in _tiles(h.shape[0])]
    ranked = torch.cat(scores).masked_fill(~complete, -torch.inf).argsort(dim=1, descending=True, stable=True)
    picked = torch.zeros_like(complete).scatter_(1, ranked[:, : config.top_k], True)
    return records, picked & complete


def _rotated(model: Model, rows: Tensor, norm: Tensor, positions: Tensor) -> Tensor:
    """fp32 rows, normalised and rotated."""
    return stages.rope(stages.rms_norm(rows, norm, model.config.norm_eps), model.rope_args(positions))


def _stored(rows: Tensor, layout: KVCacheFormat | None) -> Tensor:
    """bf16 of fp32 rows, as a record of `layout` reads back; None keeps it at the one rounding."""
    rounded = numerics.round_bf16(rows)
    return rounded if layout is None else numerics.dequantize(*numerics.quantize(rounded, layout), layout)


def _dense_attention(model: Model, queries: Tensor, records: Tensor, visible: Tensor) -> Tensor:
    """Values fp32 ``[t, heads, value]`` of all records, those that are not visible weighted by zero."""
    keys = snap(records, RECORD_BITS, model.dtype)
    parts = []
    for tile in _tiles(queries.shape[0]):
        scores = (snap(queries[tile], ACTIVATION_BITS, keys.dtype) @ keys.T).float() * queries.shape[-1] ** -0.5
        weights = attention_weights(scores, visible[tile, None], keys.dtype)
        total = weights.sum(-1, keepdim=True).clamp(min=2.0**-ATTENTION_BITS)
        parts.append((weights @ keys[:, : model.config.value_size] / total).float())
    return torch.cat(parts)


def _tiles(rows: int) -> list[slice]:
    return [slice(begin, min(begin + _QUERY_TILE, rows)) for begin in range(0, rows, _QUERY_TILE)]
