"""Prefill: one chunk of every sequence through all layers."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from kvhal import numerics
from kvhal.engine.arithmetic import RECORD_BITS, attend, index_scores, pick_top, snap
from kvhal.engine.caches import Caches, SourceCaches
from kvhal.engine.metadata import PrefillMetadata
from kvhal.engine.model import Model
from kvhal.engine.parallel import ContextParallel
from kvhal.engine.runtime import CrossLayerRuntime
from kvhal.formats import BF16_FORMAT, KVCacheFormat
from kvhal.interface import CastArgs, HadamardArgs, KVCacheOutArgs, NormArgs, RopeArgs
from kvhal.ops import (
    KVCacheTensors,
    expand_swa_index,
    fused_norm_rope_hadamard_cast_store_kvcache,
    kv_index_cat,
    load_paged_kv_cache,
)

QUERY_TILE = 128  #: queries attended at a time: it bounds the gathered records


def prefill_chunk(model: Model, caches: Caches, step: PrefillMetadata, parallel: ContextParallel | None = None) -> Tensor:
    """Runs the chunk and stores its records.

    Args:
        model: configuration and weights, on the caches' device.
        caches: written in place.
        step: the chunk, on the same device; at least one token.
        parallel: the ranks that `step` is shared between, None for one process.

    Returns:
        fp32 ``[n, vocabulary]``, the logits of every token of the chunk.
    """
    runtime = CrossLayerRuntime()
    window = expand_swa_index(step.swa_pivots, model.config.window_size)
    x = model.embed(step.tokens)
    for layer, weights in enumerate(model.weights.layers):
        h = model.hidden(x, weights.norm)
        if model.config.source_layer(layer) == layer:
            _compress(model, caches.sources[layer], step, layer, _whole(h, step, parallel))
            kv, index = _load_group(model, caches.sources[layer], step, layer, h, window)
            runtime.publish(layer, kv, index)
        kv, index = runtime.of(model.config.source_layer(layer))
        _load_history(model, caches, step, layer, kv)
        _store_window(model, caches, step, layer, h, kv, parallel)
        values = _attend(model, model.queries(weights, h, step.positions), kv, index)
        x = x + model.attention_output(weights, values)
        x = x + model.feed_forward(weights, x)
    return _whole(model.logits(x), step, parallel)


def _whole(rows: Tensor, step: PrefillMetadata, parallel: ContextParallel | None) -> Tensor:
    """Rows of the whole chunk from those that this rank has computed."""
    return rows if parallel is None or step.order is None else parallel.gather(rows, step.order)


def _compress(model: Model, source: SourceCaches, step: PrefillMetadata, layer: int, h: Tensor) -> None:
    """Pools the groups that the chunk completes, out of its hidden rows `h`, and stores their records and indexer keys.

    They are stored before the load, unlike the window's: a block is only ever appended to, so no slot that the chunk
    reads is overwritten, and the chunk's own groups are read back as every later step will read them.
    """
    compressor, config = model.source(layer), model.config
    rows = torch.cat((source.pending[step.pending_read], h))
    pooled = model.pool(compressor, rows[step.members.view(-1)].view(-1, config.ratio, config.hidden_size))
    source.pending[step.pending_to] = h[step.pending_from]
    store_group(model, source, layer, pooled, step.group_positions, step.group_slots)


def _load_group(
    model: Model, source: SourceCaches, step: PrefillMetadata, layer: int, h: Tensor, window: Tensor
) -> tuple[Tensor, Tensor]:
    """The group's buffer with its compressed part loaded, and the table of what each query attends to."""
    config, compressor = model.config, model.source(layer)
    main_offset = step.history_rows + step.chunk_rows
    kv = h.new_empty((main_offset + step.compressed_rows, config.latent_size), dtype=torch.bfloat16)
    load_paged_kv_cache(source.main, step.compressed, step.compressed_rows, out=kv[main_offset:], layout=config.main_format)
    raw = load_paged_kv_cache(source.index, step.compressed, step.compressed_rows, layout=config.index_format)
    keys = snap(_index_keys(raw, config.index_format), RECORD_BITS, model.dtype)
    queries, head_weights = model.index_queries(compressor, h, step.positions)
    picks = [
        pick_top(
            index_scores(queries[tile], head_weights[tile], keys),
            step.visible_begin[tile],
            step.visible_end[tile],
            config.top_k,
        )
        for tile in _tiles(h.shape[0])
    ]
    return kv, kv_index_cat(window, torch.cat(picks), step.history_rows, step.chunk_rows)


def _index_keys(raw: KVCacheTensors, layout: KVCacheFormat) -> Tensor:
    """bf16 ``[rows, index]`` of loaded indexer keys: index layouts are loaded raw, their scorer dequantises."""
    if raw.sf is None:
        return raw.kv
    rows = raw.kv.shape[0]
    data, sf = raw.kv.view(torch.uint8), raw.sf.reshape(rows, -1).view(torch.uint8)
    return numerics.dequantize(data, sf, layout)


def _load_history(model: Model, caches: Caches, step: PrefillMetadata, layer: int, kv: Tensor) -> None:
    """The layer's window before the chunk, to the front of the buffer."""
    load_paged_kv_cache(
        caches.swa[layer], step.history, step.history_rows, out=kv[: step.history_rows], layout=model.config.swa_format
    )


def _store_window(
    model: Model,
    caches: Caches,
    step: PrefillMetadata,
    layer: int,
    h: Tensor,
    kv: Tensor,
    parallel: ContextParallel | None,
) -> None:
    """Stores the chunk's records in the ring and puts what a load would return into the buffer.

    Only after `_load_history`: the ring slots that this chunk takes may hold the history that its first queries see.
    """
    weights, layout = model.weights.layers[layer], model.config.swa_format
    latent = model.latent(weights, h)
    norm: NormArgs | None = model.norm_args(weights.latent_norm)
    rope: RopeArgs | None = model.rope_args(step.positions)
    if parallel is not None:
        # the stages on this rank's rows, up to the one rounding to bf16; what is left is the store of that bf16
        bf16 = CastArgs.for_layout(BF16_FORMAT, cast_back=True)
        rounded = fused_norm_rope_hadamard_cast_store_kvcache(latent, norm_args=norm, rope_args=rope, cast_args=bf16)
        latent, norm, rope = _whole(cast(Tensor, rounded), step, parallel), None, None
    back = fused_norm_rope_hadamard_cast_store_kvcache(
        latent,
        norm_args=norm,
        rope_args=rope,
        cast_args=CastArgs.for_layout(layout, cast_back=True),
        out_args=KVCacheOutArgs(caches.swa[layer], step.swa_slots, layout),
    )
    kv[step.history_rows : step.history_rows + step.chunk_rows].copy_(cast(Tensor, back))


def _attend(model: Model, queries: Tensor, kv: Tensor, index: Tensor) -> Tensor:
    """Values fp32 ``[n, heads, value]`` of queries ``[n, heads, latent]`` over the buffer rows in `index` ``[n, columns]``."""
    records = snap(kv, RECORD_BITS, model.dtype)
    values = [
        attend(queries[tile], records[index[tile].clamp(min=0)], index[tile] >= 0, model.config.value_size)
        for tile in _tiles(queries.shape[0])
    ]
    return torch.cat(values)


def _tiles(rows: int) -> list[slice]:
    return [slice(begin, min(begin + QUERY_TILE, rows)) for begin in range(0, rows, QUERY_TILE)]


def store_group(model: Model, source: SourceCaches, layer: int, pooled: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Stores pooled groups as compressed records and as indexer keys.

    Args:
        model: configuration and weights.
        source: the caches to write.
        layer: their layer.
        pooled: fp32 ``[g, hidden]``.
        positions: int32 ``[g]``, the position of each group's first token.
        slots: int32 or int64 ``[g]``; -1 stores nothing.
    """
    compressor, config = model.source(layer), model.config
    rope = model.rope_args(positions)
    fused_norm_rope_hadamard_cast_store_kvcache(
        model.compressed(compressor, pooled),
        norm_args=model.norm_args(compressor.latent_norm),
        rope_args=rope,
        cast_args=CastArgs.for_layout(config.main_format),
        out_args=KVCacheOutArgs(source.main, slots, config.main_format),
    )
    fused_norm_rope_hadamard_cast_store_kvcache(
        model.index_keys(compressor, pooled),
        norm_args=model.norm_args(compressor.index_norm),
        rope_args=rope,
        hadamard_args=HadamardArgs(),
        cast_args=CastArgs.for_layout(config.index_format),
        out_args=KVCacheOutArgs(source.index, slots, config.index_format),
    )
