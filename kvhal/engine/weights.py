"""The weights, drawn from a seed with integers alone: the same numbers on every machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvhal.engine.arithmetic import WEIGHT_BITS, snap
from kvhal.engine.config import VOCABULARY, EngineConfig

_DRAW = 1 << 15


@dataclass(frozen=True, eq=False)
class CompressorWeights:
    """What a source layer has beyond its attention: the pooling and the indexer.

    Attributes:
        pool: accumulating dtype ``[ratio, hidden]``, the share of each token of a group.
        latent, latent_norm: ``[hidden, latent]`` and fp32 ``[latent]``, the pooled record.
        index_key, index_norm: ``[hidden, index]`` and fp32 ``[index]``, its indexer key.
        index_query: ``[hidden, index_heads * index]``.
        index_weight: ``[hidden, index_heads]``.
    """

    pool: Tensor
    latent: Tensor
    latent_norm: Tensor
    index_key: Tensor
    index_norm: Tensor
    index_query: Tensor
    index_weight: Tensor


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer. Matrices are ``[in, out]`` of the accumulating dtype, norms fp32.

    Attributes:
        norm, ffn_norm: ``[hidden]``.
        query, query_norm: ``[hidden, heads * latent]`` and ``[latent]``.
        latent, latent_norm: ``[hidden, latent]`` and ``[latent]``, the sliding window's record.
        output: ``[heads * value, hidden]``.
        gate, up, down: ``[hidden, ffn]`` twice and ``[ffn, hidden]``.
        compressor: source layers only.
    """

    norm: Tensor
    query: Tensor
    query_norm: Tensor
    latent: Tensor
    latent_norm: Tensor
    output: Tensor
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    compressor: CompressorWeights | None


@dataclass(frozen=True, eq=False)
class Weights:
    """The whole model.

    Attributes:
        embedding: fp32 ``[vocabulary, hidden]``.
        layers: one entry a layer.
        norm: fp32 ``[hidden]``.
        head: accumulating dtype ``[hidden, vocabulary]``.
        cos_sin: fp32 ``[max_seq_len, rope_dim]``, cosines first.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    cos_sin: Tensor


class _Source:
    """Draws in a fixed order; everything is made on the CPU and then moved."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(config.seed)
        self._dtype = torch.float64 if config.accumulate == "float64" else torch.float32
        self._device = device

    def _uniform(self, *shape: int) -> Tensor:
        """fp64 in [-1, 1), multiples of 2**-15."""
        return torch.randint(-_DRAW, _DRAW, shape, generator=self._generator).double() / _DRAW

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Keeps the variance of what it multiplies, roughly; accumulating dtype."""
        values = snap(self._uniform(rows, columns) * math.sqrt(3.0 / rows), WEIGHT_BITS, torch.float64)
        return values.to(self._device, self._dtype)

    def norm(self, size: int) -> Tensor:
        """fp32 around 1, so that a forgotten weight shows."""
        return (1.0 + self._uniform(size) / 4.0).to(self._device, torch.float32)

    def pool(self, ratio: int, size: int) -> Tensor:
        """Shares around 1 / ratio that differ by place, so that a wrong order shows."""
        values = snap((1.0 + self._uniform(ratio, size)) / ratio, WEIGHT_BITS, torch.float64)
        return values.to(self._device, self._dtype)

    def embedding(self, rows: int, columns: int) -> Tensor:
        return self._uniform(rows, columns).to(self._device, torch.float32)


def make_weights(config: EngineConfig, device: torch.device | str = "cpu") -> Weights:
    """The weights of `config.seed` on `device`."""
    device = torch.device(device)
    source = _Source(config, device)
    hidden = config.hidden_size
    embedding = source.embedding(VOCABULARY, hidden)
    layers = tuple(_layer(source, config, config.source_layer(i) == i) for i in range(config.num_layers))
    cos_sin = _cos_sin(config).to(device)
    return Weights(embedding, layers, source.norm(hidden), source.matrix(hidden, VOCABULARY), cos_sin)


def _layer(source: _Source, config: EngineConfig, is_source: bool) -> LayerWeights:
    hidden, latent, index = config.hidden_size, config.latent_size, config.index_size
    compressor = None
    if is_source:
        compressor = CompressorWeights(
            pool=source.pool(config.ratio, hidden),
            latent=source.matrix(hidden, latent),
            latent_norm=source.norm(latent),
            index_key=source.matrix(hidden, index),
            index_norm=source.norm(index),
            index_query=source.matrix(hidden, config.index_heads * index),
            index_weight=source.matrix(hidden, config.index_heads),
        )
    return LayerWeights(
        norm=source.norm(hidden),
        query=source.matrix(hidden, config.num_heads * latent),
        query_norm=source.norm(latent),
        latent=source.matrix(hidden, latent),
        latent_norm=source.norm(latent),
        output=source.matrix(config.num_heads * config.value_size, hidden),
        ffn_norm=source.norm(hidden),
        gate=source.matrix(hidden, config.ffn_size),
        up=source.matrix(hidden, config.ffn_size),
        down=source.matrix(config.ffn_size, hidden),
        compressor=compressor,
    )


def _cos_sin(config: EngineConfig) -> Tensor:
    half = config.rope_dim // 2
    frequency = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(config.max_seq_len, dtype=torch.float64)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), 1).float()
