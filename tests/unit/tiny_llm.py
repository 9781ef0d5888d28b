"""A tiny random model of the language model's kind, for tests that need no download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvhal.llm import LayerWeights, Model, ModelConfig, Weights

CONFIG = ModelConfig(
    layers=2,
    hidden=48,
    heads=6,
    kv_heads=3,
    head_dim=64,
    feed_forward=80,
    vocabulary=260,
    context_length=512,
    rope_base=100000.0,
    norm_eps=1e-5,
)

Matrices = dict[str, np.ndarray[Any, Any]]


def matrices(config: ModelConfig = CONFIG, seed: int = 0) -> Matrices:
    """Random weights by GGUF name, with Q and K in the order that rotates halves: element i turns with i + head_dim / 2."""
    random = np.random.default_rng(seed)
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {
        "attn_q": (q_rows, config.hidden),
        "attn_k": (kv_rows, config.hidden),
        "attn_v": (kv_rows, config.hidden),
        "attn_output": (config.hidden, q_rows),
        "ffn_gate": (config.feed_forward, config.hidden),
        "ffn_up": (config.feed_forward, config.hidden),
        "ffn_down": (config.hidden, config.feed_forward),
    }
    made = {"token_embd": random.standard_normal((config.vocabulary, config.hidden))}
    for layer in range(config.layers):
        for name, shape in shapes.items():
            made[f"blk.{layer}.{name}"] = random.standard_normal(shape) * 2 / np.sqrt(shape[1])
        for name in ("attn_norm", "ffn_norm"):
            made[f"blk.{layer}.{name}"] = 1 + 0.1 * random.standard_normal(config.hidden)
    made["output_norm"] = 1 + 0.1 * random.standard_normal(config.hidden)
    return {name: value.astype(np.float32) for name, value in made.items()}


def neighbours(rows: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Rows of Q or K from the order that rotates halves to GGUF's: i and i + d / 2 become the neighbours 2i and 2i + 1."""
    order = np.arange(head_dim).reshape(2, head_dim // 2).T.ravel()
    return rows.reshape(-1, head_dim, rows.shape[1])[:, order].reshape(rows.shape)


def permuted(made: Matrices, config: ModelConfig = CONFIG) -> Matrices:
    """The matrices as a GGUF file has them."""
    turned = ("attn_q", "attn_k")
    return {name: neighbours(value, config.head_dim) if name.endswith(turned) else value for name, value in made.items()}


def tiny_model(config: ModelConfig = CONFIG, seed: int = 0) -> Model:
    """The model of `matrices`, without a file in between."""
    made = {name: torch.from_numpy(value) for name, value in permuted(matrices(config, seed), config).items()}
    layers = []
    for index in range(config.layers):
        part = {name.rpartition(".")[2]: value for name, value in made.items() if name.startswith(f"blk.{index}.")}
        layers.append(
            LayerWeights(
                part["attn_norm"],
                torch.cat([part["attn_q"], part["attn_k"], part["attn_v"]]),
                part["attn_output"],
                part["ffn_norm"],
                torch.cat([part["ffn_gate"], part["ffn_up"]]),
                part["ffn_down"],
            )
        )
    return Model(config, Weights(made["token_embd"], tuple(layers), made["output_norm"], made["token_embd"]))


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Random token ids, one list a length."""
    random = np.random.default_rng(seed)
    return [random.integers(4, CONFIG.vocabulary, length).tolist() for length in lengths]


def vocabulary() -> list[str]:
    """Three control tokens, the 256 bytes as byte-level BPE writes them, one merge."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "th"]


def write_gguf(path: Path, tensors: Matrices, config: ModelConfig = CONFIG, **overrides: Any) -> Path:
    """A GGUF file of the model with a byte-level tokenizer.

    Args:
        path: the file.
        tensors: as `permuted` gives them.
        config: the shape that the metadata states.
        overrides: other values for architecture, splitting and template.
    """
    import gguf

    writer = gguf.GGUFWriter(path, overrides.get("architecture", "llama"))
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.feed_forward)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(overrides.get("splitting", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(2)
    writer.add_chat_template(overrides.get("template", "<|im_start|>{{ messages[0]['content'] }}<|im_end|>"))
    for name, value in tensors.items():
        writer.add_tensor(f"{name}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain_forward(made: Matrices, tokens: Sequence[int], config: ModelConfig = CONFIG) -> np.ndarray[Any, Any]:
    """Logits ``[n, vocabulary]`` in float64 numpy from unpermuted matrices, K and V rounded to bf16 as records are."""
    positions = np.arange(len(tokens))[:, None]
    angles = positions * config.rope_base ** (-np.arange(config.head_dim // 2) * 2 / config.head_dim)
    cos, sin = np.cos(angles), np.sin(angles)
    hidden = np.arange(len(tokens))[:, None] >= np.arange(len(tokens))[None]

    def norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * weight

    def turn(x: Any) -> Any:
        a, b = np.split(x, 2, -1)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    x = made["token_embd"].astype(np.float64)[list(tokens)]
    for layer in range(config.layers):
        part = {name.rpartition(".")[2]: value for name, value in made.items() if name.startswith(f"blk.{layer}.")}
        y = norm(x, part["attn_norm"])
        heads = []
        for head in range(config.heads):
            own = slice(head * config.head_dim, (head + 1) * config.head_dim)
            shared_head = head // (config.heads // config.kv_heads)
            shared = slice(shared_head * config.head_dim, (shared_head + 1) * config.head_dim)
            query, key = turn(y @ part["attn_q"][own].T), _bf16(turn(y @ part["attn_k"][shared].T))
            scores = np.where(hidden, query @ key.T / np.sqrt(config.head_dim), -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ _bf16(y @ part["attn_v"][shared].T))
        x = x + np.concatenate(heads, -1) @ part["attn_output"].T
        y = norm(x, part["ffn_norm"])
        gate = y @ part["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ part["ffn_up"].T)) @ part["ffn_down"].T
    return norm(x, made["output_norm"]) @ made["token_embd"].astype(np.float64).T


def _bf16(x: Any) -> Any:
    return torch.from_numpy(x).to(torch.bfloat16).double().numpy()
