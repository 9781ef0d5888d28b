"""The decoder's row-wise parts: everything that needs no cache, shared by prefill, decode and the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from kvhal import stages
from kvhal.engine.arithmetic import ACTIVATION_BITS, linear, silu, snap
from kvhal.engine.config import BYTE_TOKENS, EngineConfig
from kvhal.engine.weights import CompressorWeights, LayerWeights, Weights
from kvhal.interface import NormArgs, RopeArgs


class Model:
    """Configuration and weights, and what they compute of one row at a time.

    Rows are tokens; no result depends on which other rows are in the call. Norms, rotations and Hadamard transforms of
    activations are those of `kvhal.stages`; those of records are left to the fused store.
    """

    def __init__(self, config: EngineConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.head.dtype

    def source(self, layer: int) -> CompressorWeights:
        """The compressor of the group that `layer` belongs to.

        Raises:
            ValueError: the weights were made for another grouping of layers.
        """
        compressor = self.weights.layers[self.config.source_layer(layer)].compressor
        if compressor is None:
            raise ValueError(f"weights: layer {self.config.source_layer(layer)} has no compressor, needs one: it is a source")
        return compressor

    def embed(self, tokens: Tensor) -> Tensor:
        """fp32 ``[n, hidden]`` of integer tokens ``[n]``."""
        return self.weights.embedding[tokens]

    def hidden(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of the residual stream, fp32 ``[n, hidden]``."""
        return stages.rms_norm(x, weight, self.config.norm_eps)

    def queries(self, layer: LayerWeights, h: Tensor, positions: Tensor) -> Tensor:
        """Attention queries, fp32 ``[n, heads, latent]``, normalised and rotated; positions ``[n]``."""
        config = self.config
        rows = linear(h, layer.query).view(-1, config.latent_size)
        rows = stages.rms_norm(rows, layer.query_norm, config.norm_eps)
        return self._rotate(rows, positions, config.num_heads).view(-1, config.num_heads, config.latent_size)

    def latent(self, layer: LayerWeights, h: Tensor) -> Tensor:
        """The sliding window's records before the fused store, fp32 ``[n, latent]``."""
        return linear(h, layer.latent)

    def compressed(self, compressor: CompressorWeights, pooled: Tensor) -> Tensor:
        """Compressed records of pooled groups before the fused store, fp32 ``[groups, latent]``."""
        return linear(pooled, compressor.latent)

    def index_keys(self, compressor: CompressorWeights, pooled: Tensor) -> Tensor:
        """Indexer keys of pooled groups before the fused store, fp32 ``[groups, index]``."""
        return linear(pooled, compressor.index_key)

    def index_queries(self, compressor: CompressorWeights, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The indexer's queries fp32 ``[n, index_heads, index]`` and head weights fp32 ``[n, index_heads]``.

        The same Hadamard transform as on the keys leaves every product as it is and spreads what quantisation rounds.
        """
        config = self.config
        rows = linear(h, compressor.index_query).view(-1, config.index_size)
        rows = stages.hadamard(self._rotate(rows, positions, config.index_heads))
        return rows.view(-1, config.index_heads, config.index_size), linear(h, compressor.index_weight)

    def pool(self, compressor: CompressorWeights, members: Tensor) -> Tensor:
        """One row for each complete group: fp32 ``[groups, ratio, hidden]``, oldest token first, to ``[groups, hidden]``."""
        shares = snap(members, ACTIVATION_BITS, compressor.pool.dtype) * compressor.pool
        return shares.sum(1).float()

    def attention_output(self, layer: LayerWeights, values: Tensor) -> Tensor:
        """fp32 ``[n, hidden]`` of attended values ``[n, heads, value]``."""
        return linear(values.flatten(1), layer.output)

    def feed_forward(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """The gated feed-forward's contribution to the residual stream, fp32 ``[n, hidden]``."""
        h = self.hidden(x, layer.ffn_norm)
        return linear(silu(linear(h, layer.gate)) * linear(h, layer.up), layer.down)

    def logits(self, x: Tensor) -> Tensor:
        """fp32 ``[n, vocabulary]`` of the residual stream behind the last layer."""
        return linear(self.hidden(x, self.weights.norm), self.weights.head)

    def norm_args(self, weight: Tensor) -> NormArgs:
        """The norm of a record, for the fused store."""
        return NormArgs(weight, self.config.norm_eps)

    def rope_args(self, positions: Tensor) -> RopeArgs:
        """The rotation of a record, for the fused store."""
        return RopeArgs(positions, self.weights.cos_sin, self.config.rope_dim)

    def _rotate(self, rows: Tensor, positions: Tensor, heads: int) -> Tensor:
        return stages.rope(rows, self.rope_args(positions.repeat_interleave(heads)))


def greedy(logits: Tensor) -> Tensor:
    """The likeliest byte of each row, int64 ``[n]``; of equal ones the lowest.

    The choice is among bytes: the weights are untrained and know no end of a text, so outputs have the length asked for.
    """
    return torch.argmax(logits[:, :BYTE_TOKENS], dim=1)
