"""The forward pass of a Llama-shaped decoder, with attention left to the caller: the model never sees a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

#: (layer, queries [n, heads, head_dim], records bf16 [n, record_elements]) -> attention output [n, heads * head_dim]
Attend = Callable[[int, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """The model's shape.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, feed_forward, vocabulary: counts.
        context_length: positions the model was trained for.
        rope_base: base of the rotary frequencies.
        norm_eps: epsilon of the RMS norms.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    context_length: int
    rope_base: float
    norm_eps: float

    @property
    def record_elements(self) -> int:
        """Elements of one token's record in one layer: the rotated K of every KV head, then the V of every KV head."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer, matrices as ``[out, in]``.

    Attributes:
        attention_norm, feed_forward_norm: ``[hidden]``.
        qkv: the rows of Q, K and V one below the other; Q and K in the order that rotates neighbours (2i, 2i + 1).
        attention_out: ``[hidden, heads * head_dim]``.
        gate_up: gate, then up: ``[2 * feed_forward, hidden]``.
        down: ``[hidden, feed_forward]``.
    """

    attention_norm: Tensor
    qkv: Tensor
    attention_out: Tensor
    feed_forward_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, eq=False)
class Weights:
    """All weights, of one dtype and on one device; embedding and output are ``[vocabulary, hidden]``."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    output_norm: Tensor
    output: Tensor


class Model:
    """A decoder. It computes in its weights' dtype; records are bf16 whatever that is."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        angles = _angles(config)
        self._cos = angles.cos().to(self.device, torch.float32)
        self._sin = angles.sin().to(self.device, torch.float32)

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The normed output of the last layer.

        Args:
            tokens: int64 ``[n]``, of any sequences.
            positions: int64 ``[n]``, each token's position in its sequence, < context_length.
            attend: called once a layer, in order.

        Returns:
            ``[n, hidden]`` of the weights' dtype. Nothing is read on the host, so a call can be captured in a graph.
        """
        config = self.config
        rotation = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        x = F.embedding(tokens, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            normed = F.rms_norm(x, (config.hidden,), layer.attention_norm, config.norm_eps)
            queries, records = self._project(normed, layer, rotation)
            x = x + F.linear(attend(index, queries, records), layer.attention_out)
            normed = F.rms_norm(x, (config.hidden,), layer.feed_forward_norm, config.norm_eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.rms_norm(x, (config.hidden,), self.weights.output_norm, config.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 ``[n, vocabulary]`` of hidden ``[n, hidden]``."""
        return F.linear(hidden, self.weights.output).float()

    def _project(self, x: Tensor, layer: LayerWeights, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated queries ``[n, heads, head_dim]`` and the bf16 records ``[n, record_elements]`` of normed rows."""
        config, n = self.config, x.shape[0]
        heads = F.linear(x, layer.qkv).view(n, -1, config.head_dim)
        rotated, values = heads[:, : config.heads + config.kv_heads], heads[:, config.heads + config.kv_heads :]
        rotated = rotate(rotated, *rotation)
        records = torch.cat((rotated[:, config.heads :], values), 1)
        return rotated[:, : config.heads], records.flatten(1).to(torch.bfloat16)


def _angles(config: ModelConfig) -> Tensor:
    """float64 ``[context_length, head_dim / 2]``: what each position turns each pair by."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    frequencies = config.rope_base ** (-pairs / config.head_dim)
    return torch.outer(torch.arange(config.context_length, dtype=torch.float64), frequencies)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns every pair of neighbours (2i, 2i + 1), in fp32.

    Args:
        x: ``[n, heads, head_dim]``.
        cos, sin: fp32 ``[n, 1, head_dim / 2]``.

    Returns:
        the shape and dtype of x.
    """
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)


def grouped_attention(queries: Tensor, records: Tensor, visible: Tensor, config: ModelConfig) -> Tensor:
    """Softmax attention of queries over records; the queries that share a KV head are taken as more rows of it.

    Args:
        queries: ``[b, t, heads, head_dim]``.
        records: bf16 ``[b, l, record_elements]``.
        visible: bool ``[b, t, l]``; every query sees at least one record.
        config: the model's shape.

    Returns:
        ``[b, t, heads * head_dim]`` of the queries' dtype.
    """
    b, t, heads, d = queries.shape
    kv_heads, group = config.kv_heads, heads // config.kv_heads
    key, value = records.to(queries.dtype).view(b, -1, 2, kv_heads, d).permute(2, 0, 3, 1, 4).unbind(0)
    rows = queries.view(b, t, kv_heads, group, d).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, group * t, d)
    mask = visible.unsqueeze(1).expand(b, group, t, -1).reshape(b, 1, group * t, -1)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask)
    return out.view(b, kv_heads, group, t, d).permute(0, 3, 1, 2, 4).reshape(b, t, heads * d)


def causal(begin: int, end: int, device: torch.device) -> Tensor:
    """bool ``[1, end - begin, end]``: what the tokens at positions [begin, end) see of positions [0, end)."""
    return torch.ones((1, end - begin, end), dtype=torch.bool, device=device).tril(begin)


def dense_attention(config: ModelConfig) -> Attend:
    """Attention of one whole sequence without any cache: records are used as they were computed."""

    def attend(layer: int, queries: Tensor, records: Tensor) -> Tensor:
        visible = causal(0, queries.shape[0], queries.device)
        return grouped_attention(queries.unsqueeze(0), records.unsqueeze(0), visible, config)[0]

    return attend
