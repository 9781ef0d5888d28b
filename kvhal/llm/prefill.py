"""Prompts through the model in chunks: store a chunk's records, then attend to what the cache gives back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvhal.llm.cache import BlockTables, PagedCache
from kvhal.llm.model import Attend, Model, causal, grouped_attention
from kvhal.plan import build_compressed_load_plan, build_paged_slot_mapping

CHUNK_TOKENS = 512  #: tokens a pass takes: enough to keep the matrix products busy, few enough to bound the logits


class Piece(NamedTuple):
    """Tokens [begin, end) of one sequence."""

    sequence: int
    begin: int
    end: int


def prefill(
    model: Model, cache: PagedCache, prompts: Sequence[Sequence[int]], tables: BlockTables, chunk: int = CHUNK_TOKENS
) -> Iterator[tuple[list[Piece], Tensor]]:
    """Every token of every prompt, in passes of at most `chunk` tokens that may span several prompts.

    Args:
        model: the model.
        cache: where the records go and what is attended to.
        prompts: token ids, each prompt at least one.
        tables: the prompts' block tables, from `PagedCache.reserve`.
        chunk: tokens a pass.

    Yields:
        the pieces of a pass, and the hidden states ``[tokens of the pass, hidden]`` of their tokens in the same order.
    """
    for pieces in split(list(map(len, prompts)), chunk):
        tokens = [token for piece in pieces for token in prompts[piece.sequence][piece.begin : piece.end]]
        positions = np.concatenate([np.arange(piece.begin, piece.end) for piece in pieces])
        attend = _attend(model, cache, pieces, tables[[piece.sequence for piece in pieces]])
        ids = torch.tensor(tokens, device=model.device)
        yield pieces, model.hidden(ids, torch.from_numpy(positions).to(model.device), attend)


def split(lengths: Sequence[int], chunk: int) -> Iterator[list[Piece]]:
    """Pieces of sequences of these lengths, in order, `chunk` tokens a pass; only the last pass may have fewer."""
    pieces: list[Piece] = []
    room = chunk
    for sequence, length in enumerate(lengths):
        begin = 0
        while begin < length:
            end = min(length, begin + room)
            pieces.append(Piece(sequence, begin, end))
            room -= end - begin
            begin = end
            if room == 0:
                yield pieces
                pieces, room = [], chunk
    if pieces:
        yield pieces


def _attend(model: Model, cache: PagedCache, pieces: list[Piece], tables: BlockTables) -> Attend:
    """Attention of one pass. The plans are made here, once for all layers."""
    ends = [piece.end for piece in pieces]
    lengths = [piece.end - piece.begin for piece in pieces]
    size, device = cache.block_size, cache.device
    slots = build_paged_slot_mapping(ends, lengths, tables, block_size=size).to(device)
    plan = build_compressed_load_plan(ends, tables, block_size=size, ratio=1).to(device)
    visible = [causal(piece.begin, piece.end, device) for piece in pieces]

    def attend(layer: int, queries: Tensor, records: Tensor) -> Tensor:
        cache.store(layer, records, slots)
        contexts = torch.split(cache.load(layer, plan), ends)
        own = torch.split(queries, lengths)
        parts = [
            grouped_attention(part.unsqueeze(0), context.unsqueeze(0), mask, model.config)[0]
            for part, context, mask in zip(own, contexts, visible, strict=True)
        ]
        return torch.cat(parts)

    return attend
