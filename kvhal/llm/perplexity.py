"""How well the model predicts a text when all it attends to comes back from the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvhal.formats import KVCacheFormat
from kvhal.llm.cache import PagedCache
from kvhal.llm.errors import LLMError
from kvhal.llm.model import Model
from kvhal.llm.prefill import CHUNK_TOKENS, prefill


@dataclass(frozen=True)
class Perplexity:
    """The result for one record format.

    Attributes:
        perplexity: exp of the mean negative log-likelihood, in nats, of every token but the first.
        tokens: tokens of the text, the first included.
        bytes_per_token: of the cache, all layers together.
    """

    perplexity: float
    tokens: int
    bytes_per_token: float


@torch.inference_mode()
def perplexity(
    model: Model, layout: KVCacheFormat, tokens: Sequence[int], *, block_size: int = 64, chunk: int = CHUNK_TOKENS
) -> Perplexity:
    """Perplexity of a text with K and V kept as records of `layout`.

    Args:
        model: the model.
        layout: the record; its elements are the model's `record_elements`.
        tokens: the text, at least two tokens, at most the model's context.
        block_size: tokens a cache block.
        chunk: tokens a pass.

    Raises:
        LLMError: too few or too many tokens.
    """
    limit = model.config.context_length
    if not 2 <= len(tokens) <= limit:
        raise LLMError(f"text: has {len(tokens)} tokens, needs 2 to {limit}, the model's context")
    cache = PagedCache(model.config.layers, math.ceil(len(tokens) / block_size), block_size, layout, model.device)
    tables = cache.reserve([len(tokens)])
    targets = torch.tensor([*tokens[1:], 0], device=model.device)
    total = 0.0
    for pieces, hidden in prefill(model, cache, [tokens], tables, chunk):
        begin, end = pieces[0].begin, min(pieces[0].end, len(tokens) - 1)
        logits = model.logits(hidden[: end - begin])
        total += F.cross_entropy(logits, targets[begin:end], reduction="none").double().sum().item()
    return Perplexity(math.exp(total / (len(tokens) - 1)), len(tokens), cache.bytes_per_token)
