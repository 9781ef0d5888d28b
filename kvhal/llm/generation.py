"""Greedy generation for a batch of prompts that share one pool of blocks."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvhal.llm.cache import BlockTables, PagedCache
from kvhal.llm.decode import DecodeBatch
from kvhal.llm.errors import LLMError
from kvhal.llm.model import Model
from kvhal.llm.prefill import CHUNK_TOKENS, prefill

#: one step: each sequence's new token, None for those that have ended
Step = list[int | None]


@dataclass
class Generation:
    """Generates for batches of prompts, and counts.

    Attributes:
        model, cache: what generates, and where its records live.
        graph: decode steps are replayed as CUDA graphs.
        chunk: tokens a prefill pass.
        prompt_tokens, prefill_seconds: of all prompts so far.
        decode_tokens, decode_seconds: tokens that decode steps gave, and their time. An answer's first token is the prefill's.
    """

    model: Model
    cache: PagedCache
    graph: bool = False
    chunk: int = CHUNK_TOKENS
    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Collection[int] = ()) -> Iterator[Step]:
        """Continues every prompt with the likeliest tokens.

        Args:
            prompts: token ids.
            max_tokens: tokens an answer has at most.
            stop: tokens that end an answer; they are given, too.

        Yields:
            one `Step` as soon as it is known, until every answer has ended.

        Raises:
            LLMError: a prompt is empty, too long for the model, or the batch does not fit into the cache.
        """
        check_prompts(prompts, max_tokens, self.model)
        lengths = [len(prompt) for prompt in prompts]
        tables = self.cache.reserve([length + max_tokens for length in lengths])
        try:
            yield from self._steps(prompts, tables, max_tokens, frozenset(stop))
        finally:
            self.cache.pool.give_back(tables)

    def _steps(
        self, prompts: Sequence[Sequence[int]], tables: BlockTables, max_tokens: int, stop: frozenset[int]
    ) -> Iterator[Step]:
        began = time.perf_counter()
        batch = self._prefill(prompts, tables)
        tokens = batch.tokens.tolist()  # waits for the device
        self.prefill_seconds += time.perf_counter() - began
        batch.prepare(max_tokens - 1)
        self.prompt_tokens += sum(map(len, prompts))
        step: Step = list(tokens)
        for count in range(1, max_tokens + 1):
            yield step
            active = [token is not None and token not in stop for token in step]
            if count == max_tokens or not any(active):
                return
            began = time.perf_counter()
            batch.step()
            tokens = batch.tokens.tolist()
            self.decode_seconds += time.perf_counter() - began
            self.decode_tokens += sum(active)
            step = [token if alive else None for token, alive in zip(tokens, active, strict=True)]

    def _prefill(self, prompts: Sequence[Sequence[int]], tables: BlockTables) -> DecodeBatch:
        """The prompts' records in the cache, and the first token of every answer."""
        last: list[torch.Tensor] = []
        lengths = [len(prompt) for prompt in prompts]
        for pieces, hidden in prefill(self.model, self.cache, prompts, tables, self.chunk):
            ends = torch.tensor([piece.end - piece.begin for piece in pieces]).cumsum(0).tolist()
            last += [hidden[end - 1] for piece, end in zip(pieces, ends, strict=True) if piece.end == lengths[piece.sequence]]
        first = self.model.logits(torch.stack(last)).argmax(-1)
        return DecodeBatch(self.model, self.cache, tables, lengths, first, graph=self.graph)


def check_prompts(prompts: Sequence[Sequence[int]], max_tokens: int, model: Model) -> None:
    """What `Generation.run` refuses whatever its cache: a caller that makes a cache for the prompts asks before.

    Raises:
        LLMError: see there.
    """
    if not prompts:
        raise LLMError("prompts: has none, needs at least one")
    if max_tokens < 1:
        raise LLMError(f"max_tokens: has {max_tokens}, needs at least 1")
    limit = model.config.context_length
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise LLMError(f"prompt {index + 1}: has no tokens, needs at least one")
        if len(prompt) + max_tokens > limit:
            raise LLMError(
                f"prompt {index + 1}: has {len(prompt)} tokens and an answer of {max_tokens} to come, "
                f"needs at most {limit} together, the model's context"
            )
