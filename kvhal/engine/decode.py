"""Decode: one token of every sequence, as a step that can be captured as a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from kvhal.engine.arithmetic import RECORD_BITS, attend, index_scores, pick_top, snap
from kvhal.engine.caches import Caches, Sequence, SourceCaches
from kvhal.engine.config import VOCABULARY
from kvhal.engine.metadata import DecodeMetadata
from kvhal.engine.model import Model, greedy
from kvhal.engine.prefill import store_group
from kvhal.engine.runtime import CrossLayerRuntime
from kvhal.interface import CastArgs, KVCacheOutArgs
from kvhal.ops import (
    convert_kv_index,
    fused_norm_rope_hadamard_cast_store_kvcache,
    get_kv_swa_index_decode,
    load_kv_slots,
)


class Decoder:
    """The decode step and its fixed tensors.

    `plan` is the host's part. `step` is the device's: static shapes, no value read on the host, every input in `metadata` and
    every output in `logits` and `next_tokens`. To capture it: run it once (kernels are built), then capture `step` alone and
    replay it after each `plan`.

    Args:
        model: configuration and weights, on `device`.
        caches: where records are.
        batch_size: rows of a step; a graph is captured for one of them.
        device: where the step runs.

    Attributes:
        metadata: inputs, updated in place by `plan`.
        logits: fp32 ``[batch_size, vocabulary]``, rows of sequences that were planned are valid.
        next_tokens: int64 ``[batch_size]``, their greedy choice.
    """

    def __init__(self, model: Model, caches: Caches, batch_size: int, device: torch.device) -> None:
        config = model.config
        self._model, self._caches = model, caches
        self.metadata = DecodeMetadata(config, batch_size, device)
        self.logits = torch.zeros((batch_size, VOCABULARY), device=device)
        self.next_tokens = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._groups = torch.arange(
            config.blocks_per_sequence * config.records_per_block, dtype=torch.int32, device=device
        ).expand(batch_size, 1, -1)
        self._zeros = torch.zeros((batch_size, 1), dtype=torch.int32, device=device)

    def plan(self, sequences: list[Sequence], tokens: Tensor) -> None:
        """Makes `tokens` the input of the next step, one of each sequence; blocks must have been reserved."""
        self.metadata.update(self._caches, sequences, tokens)

    def step(self) -> None:
        """All layers for the planned tokens: stores their records, attends, writes `logits` and `next_tokens`."""
        model, step = self._model, self.metadata
        runtime = CrossLayerRuntime()
        window = get_kv_swa_index_decode(step.swa_windows, model.config.window_size, model.config.swa_block_size)
        x = model.embed(step.tokens)
        for layer, weights in enumerate(model.weights.layers):
            h = model.hidden(x, weights.norm)
            if model.config.source_layer(layer) == layer:
                source = self._caches.sources[layer]
                self._compress(source, layer, h)
                runtime.publish(layer, source.main, self._pick(source, layer, h))
            main, picked = runtime.of(model.config.source_layer(layer))
            self._store_window(layer, h)
            values = self._attend(model.queries(weights, h, step.positions), layer, window, main, picked)
            x = x + model.attention_output(weights, values)
            x = x + model.feed_forward(weights, x)
        self.logits.copy_(model.logits(x))
        self.next_tokens.copy_(greedy(self.logits))

    def _compress(self, source: SourceCaches, layer: int, h: Tensor) -> None:
        """Keeps the token for its group, and stores the group where this token completes it.

        The pooling runs every time: shapes stay the same, and a slot of -1 makes the store skip an incomplete group.
        """
        step, config = self.metadata, self._model.config
        source.pending.index_copy_(0, step.pending_slot, h)
        members = source.pending[step.pending_members.view(-1)].view(-1, config.ratio, config.hidden_size)
        pooled = self._model.pool(self._model.source(layer), members)
        store_group(self._model, source, layer, pooled, step.group_positions, step.group_slots)

    def _pick(self, source: SourceCaches, layer: int, h: Tensor) -> Tensor:
        """Slots int32 ``[batch_size, top_k]`` of the compressed records that the indexer picks, -1 behind the last one."""
        model, step, config = self._model, self.metadata, self._model.config
        slots = convert_kv_index(self._groups.clone(), step.block_tables, step.visible, config.records_per_block)
        keys = load_kv_slots(source.index, slots.squeeze(1), layout=config.index_format)
        queries, head_weights = model.index_queries(model.source(layer), h, step.positions)
        scores = index_scores(queries, head_weights, snap(keys, RECORD_BITS, model.dtype))
        picks = pick_top(scores, self._zeros, step.visible, config.top_k)
        return convert_kv_index(picks.unsqueeze(1), step.block_tables, step.picks, config.records_per_block).squeeze(1)

    def _store_window(self, layer: int, h: Tensor) -> None:
        """Stores the token in the ring; it takes the slot of the oldest one, which its window no longer holds."""
        model, step, layout = self._model, self.metadata, self._model.config.swa_format
        weights = model.weights.layers[layer]
        fused_norm_rope_hadamard_cast_store_kvcache(
            model.latent(weights, h),
            norm_args=model.norm_args(weights.latent_norm),
            rope_args=model.rope_args(step.positions),
            cast_args=CastArgs.for_layout(layout),
            out_args=KVCacheOutArgs(self._caches.swa[layer], step.swa_slots, layout),
        )

    def _attend(self, queries: Tensor, layer: int, window: Tensor, main: Tensor, picked: Tensor) -> Tensor:
        """Values fp32 ``[batch_size, heads, value]`` over the window's slots and the picked ones."""
        model, config = self._model, self._model.config
        recent = load_kv_slots(self._caches.swa[layer], window, layout=config.swa_format)
        pooled = load_kv_slots(main, picked, layout=config.main_format)
        records = snap(torch.cat((recent, pooled), 1), RECORD_BITS, model.dtype)
        return attend(queries, records, torch.cat((window, picked), 1) >= 0, config.value_size)
