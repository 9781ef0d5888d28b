"""A model out of a GGUF file: its shape, its weights dequantised, its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from kvhal.llm.errors import LLMError
from kvhal.llm.model import LayerWeights, Model, ModelConfig, Weights
from kvhal.llm.tokenizer import TextTokenizer, make_tokenizer

#: keys that would change the forward pass
_UNSUPPORTED_KEYS = ("llama.rope.scaling.type", "llama.expert_count", "llama.attention.sliding_window")


def load_gguf(
    path: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Model, TextTokenizer]:
    """The model and the tokenizer of a GGUF file.

    Args:
        path: the file; architecture "llama" with a byte-level BPE tokenizer of the SmolLM family.
        device: where the weights go.
        dtype: what they are dequantised to, and what the model computes in.

    Raises:
        LLMError: the file is missing, is no GGUF file, or needs something that is not implemented here.
    """
    try:
        reader = _Reader(path)
    except OSError as error:
        raise LLMError(f"model: cannot read {path}: {error.strerror}") from error
    except (ValueError, IndexError, UnicodeDecodeError) as error:
        raise LLMError(f"model: {path} is not a complete GGUF file: {error}") from error
    fields = _Fields(reader, path)
    config = read_config(fields)
    weights = read_weights(reader, config, path, device, dtype)
    return Model(config, weights), make_tokenizer(fields)


class _Reader(gguf.GGUFReader):
    """GGUFReader over a plain array: it slices once a string, and slicing a numpy memmap costs three times as much."""

    @property
    def data(self) -> Any:
        return self._plain

    @data.setter
    def data(self, mapped: Any) -> None:
        self._plain = np.asarray(mapped)


class _Fields:
    """The file's metadata by key."""

    def __init__(self, reader: gguf.GGUFReader, path: Path) -> None:
        self._reader, self._path = reader, path

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise LLMError(f"model: {self._path} has no {key!r} in its metadata")
        return value


def read_config(fields: Any) -> ModelConfig:
    """The shape of the model.

    Raises:
        LLMError: another architecture, or a variant of this one that is not implemented.
    """
    architecture = fields["general.architecture"]
    if architecture != "llama":
        raise LLMError(f"model: has architecture {architecture!r}, needs 'llama'")
    for key in _UNSUPPORTED_KEYS:
        if fields.get(key):
            raise LLMError(f"model: has {key} = {fields.get(key)!r}, which is not implemented")
    heads, hidden = int(fields["llama.attention.head_count"]), int(fields["llama.embedding_length"])
    head_dim = int(fields.get("llama.attention.key_length", hidden // heads))
    rotated = int(fields.get("llama.rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise LLMError(f"model: rotates {rotated} of {head_dim} elements of a head, needs all of them")
    return ModelConfig(
        layers=int(fields["llama.block_count"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(fields.get("llama.attention.head_count_kv", heads)),
        head_dim=head_dim,
        feed_forward=int(fields["llama.feed_forward_length"]),
        vocabulary=len(fields["tokenizer.ggml.tokens"]),
        context_length=int(fields["llama.context_length"]),
        rope_base=float(fields.get("llama.rope.freq_base", 10000.0)),
        norm_eps=float(fields["llama.attention.layer_norm_rms_epsilon"]),
    )


def read_weights(
    reader: gguf.GGUFReader, config: ModelConfig, path: Path, device: torch.device | str, dtype: torch.dtype
) -> Weights:
    """Every tensor, dequantised.

    GGUF keeps the rows of Q and K in the order that rotates neighbours, which is what `Model` expects: they are not reordered.

    Raises:
        LLMError: a tensor is missing, has another shape, or is left over.
    """
    left = {tensor.name: tensor for tensor in reader.tensors}

    def take(name: str, *shape: int) -> Tensor:
        tensor = left.pop(f"{name}.weight", None)
        if tensor is None:
            raise LLMError(f"model: {path} has no tensor {name}.weight")
        value = gguf.dequantize(tensor.data, tensor.tensor_type)
        if value.shape != shape:
            raise LLMError(f"model: tensor {name}.weight has shape {value.shape}, needs {shape}")
        return torch.from_numpy(value.copy()).to(device, dtype)

    embedding = take("token_embd", config.vocabulary, config.hidden)
    layers = tuple(_read_layer(take, f"blk.{index}", config) for index in range(config.layers))
    norm = take("output_norm", config.hidden)
    # A file without an output matrix uses the embedding's.
    output = take("output", config.vocabulary, config.hidden) if "output.weight" in left else embedding
    if left:
        raise LLMError(f"model: {path} has tensors that are not implemented, such as {min(left)}")
    return Weights(embedding, layers, norm, output)


def _read_layer(take: Callable[..., Tensor], name: str, config: ModelConfig) -> LayerWeights:
    hidden, inner = config.hidden, config.feed_forward
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    qkv = [take(f"{name}.attn_{part}", rows, hidden) for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))]
    return LayerWeights(
        attention_norm=take(f"{name}.attn_norm", hidden),
        qkv=torch.cat(qkv),
        attention_out=take(f"{name}.attn_output", hidden, q_rows),
        feed_forward_norm=take(f"{name}.ffn_norm", hidden),
        gate_up=torch.cat([take(f"{name}.ffn_{part}", inner, hidden) for part in ("gate", "up")]),
        down=take(f"{name}.ffn_down", hidden, inner),
    )
