"""The work of one benchmark cell: the call, the bytes it must move, and copies of its buffers to rotate through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvhal.formats import KVCacheFormat
from kvhal.interface import CastArgs, HadamardArgs, KVCacheOutArgs, NormArgs, Op, RopeArgs
from kvhal.layout import alloc_kv_cache
from kvhal.ops import (
    convert_kv_index,
    expand_load_plan,
    expand_swa_index,
    fused_norm_rope_hadamard_cast_store_kvcache,
    get_kv_swa_index_decode,
    kv_index_cat,
    load_kv_slots,
    load_paged_kv_cache,
    store_kv_cache,
)
from kvhal.ops.cache import new_load_output

#: where the tokens of a call lie: one after another, in shuffled blocks, or anywhere
PATTERNS = ("consecutive", "pages", "random")
ROPE_DIM = 64
TOP_K = 2048
WINDOW = 512
PLAN_BLOCKS = 2048  #: blocks of a sequence that is planned: 131,072 tokens in blocks of 64
FILL_BYTES = 1 << 26  #: random bytes made at a time


@dataclass(frozen=True, eq=False)
class Work:
    """One call on its own buffers.

    Attributes:
        call: makes the public call.
        bytes: what it must move: every input read once and every output written once, tables shared by many tokens left out.
        written: the tensors it writes, to be poisoned before and compared after.
    """

    call: Callable[[], Any]
    bytes: int
    written: tuple[torch.Tensor, ...]


def make_work(
    op: Op, layout: KVCacheFormat | None, tokens: int, block_size: int, pattern: str, device: torch.device, seed: int
) -> Work:
    """Random data and metadata for one call; two calls with equal arguments make equal work.

    Args:
        op: the operation.
        layout: its format, None for index operations.
        tokens: rows; for index operations table entries, rounded up to whole rows.
        block_size: tokens a block.
        pattern: one of `PATTERNS`.
        device: where the tensors live.
        seed: of the random numbers.
    """
    random = torch.Generator(device).manual_seed(seed)
    if layout is None:
        return _INDEX_WORK[op](tokens, block_size, random, device)
    blocks = -(-tokens // block_size)
    cache = alloc_kv_cache(blocks, block_size, layout, device)
    step = max(1, FILL_BYTES // (cache.stride(0) * cache.element_size()))
    for begin in range(0, blocks, step):
        part = cache[begin : begin + step].view(torch.uint8)
        # every byte below 0x78 is a number in each format
        part.copy_(torch.randint(0, 0x78, part.shape, dtype=torch.uint8, device=device, generator=random))
    order = _slots(tokens, blocks, block_size, pattern, random, device)
    return _FORMAT_WORK[op](layout, cache, order, block_size, random, device)


def _slots(
    tokens: int, blocks: int, block_size: int, pattern: str, random: torch.Generator, device: torch.device
) -> torch.Tensor:
    """Slots int32 ``[tokens]``."""
    every = torch.arange(blocks * block_size, device=device, dtype=torch.int32)
    if pattern == "pages":
        every = every.view(blocks, block_size)[torch.randperm(blocks, generator=random, device=device)].view(-1)
        return every[every < tokens]  # the last page may be a short one
    if pattern == "random":
        return torch.randperm(tokens, generator=random, device=device, dtype=torch.int32)
    return every[:tokens]


def _rows(tokens: int, elements: int, random: torch.Generator, device: torch.device) -> torch.Tensor:
    rows = torch.empty((tokens, elements), dtype=torch.bfloat16, device=device)
    step = max(1, FILL_BYTES // (4 * elements))
    for begin in range(0, tokens, step):
        part = rows[begin : begin + step]
        part.copy_(torch.randn(part.shape, generator=random, device=device))
    return rows


def _store(
    layout: KVCacheFormat, cache: torch.Tensor, slots: torch.Tensor, _: int, random: torch.Generator, device: torch.device
) -> Work:
    kv = _rows(slots.shape[0], layout.elements, random, device)
    moved = slots.shape[0] * (2 * layout.elements + layout.bytes_per_token + slots.element_size())
    return Work(lambda: store_kv_cache(kv, cache, slots, layout=layout), moved, (cache,))


def _load(
    layout: KVCacheFormat, cache: torch.Tensor, slots: torch.Tensor, size: int, _: torch.Generator, device: torch.device
) -> Work:
    """A load covers runs of a block; the "random" pattern makes every run one token long."""
    tokens = slots.shape[0]
    first = torch.ones(tokens, dtype=torch.bool, device=device)
    first[1:] = (slots[1:] != slots[:-1] + 1) | (slots[1:] % size == 0)
    begin = torch.nonzero(first).flatten()
    end = torch.cat((begin[1:], begin.new_tensor([tokens])))
    block, at = slots[begin] // size, slots[begin] % size
    segments = torch.stack((block, at, at + end - begin, begin), 1).to(torch.int32)
    out = new_load_output(layout, tokens, device)
    result = layout.bytes_per_token if layout.is_index else 2 * layout.elements
    moved = tokens * (layout.bytes_per_token + result) + segments.numel() * 4
    written = (out.kv,) if out.sf is None else (out.kv, out.sf)
    return Work(lambda: load_paged_kv_cache(cache, segments, tokens, out, layout=layout), moved, written)


def _load_slots(
    layout: KVCacheFormat, cache: torch.Tensor, slots: torch.Tensor, _: int, __: torch.Generator, device: torch.device
) -> Work:
    out = torch.empty((slots.shape[0], layout.elements), dtype=torch.bfloat16, device=device)
    moved = slots.shape[0] * (layout.bytes_per_token + 2 * layout.elements + slots.element_size())
    return Work(lambda: load_kv_slots(cache, slots, out, layout=layout), moved, (out,))


def _fused(
    layout: KVCacheFormat, cache: torch.Tensor, slots: torch.Tensor, _: int, random: torch.Generator, device: torch.device
) -> Work:
    """Norm and rotary embedding for main records; indexer keys get a Hadamard transform as well."""
    tokens, rope_dim = slots.shape[0], min(ROPE_DIM, layout.elements // 2 * 2)
    kv = _rows(tokens, layout.elements, random, device)
    weight = torch.rand(layout.elements, generator=random, device=device)
    angles = torch.randn((max(tokens, 1), rope_dim), generator=random, device=device)
    positions = torch.arange(tokens, dtype=torch.int32, device=device)
    arguments: dict[str, Any] = {
        "norm_args": NormArgs(weight),
        "rope_args": RopeArgs(positions, angles, rope_dim),
        "hadamard_args": HadamardArgs() if layout.is_index and layout.elements.bit_count() == 1 else None,
        "cast_args": CastArgs.for_layout(layout),
        "out_args": KVCacheOutArgs(cache, slots, layout),
    }
    record = 2 * layout.elements + layout.bytes_per_token
    moved = tokens * (record + rope_dim * 4 + slots.element_size() + positions.element_size())
    return Work(lambda: fused_norm_rope_hadamard_cast_store_kvcache(kv, **arguments), moved, (cache,))


def _integers(shape: tuple[int, ...], high: int, random: torch.Generator, device: torch.device) -> torch.Tensor:
    return torch.randint(0, high, shape, dtype=torch.int32, device=device, generator=random)


def _convert(entries: int, block_size: int, random: torch.Generator, device: torch.device) -> Work:
    """The tables map every block to itself: a conversion in place can be repeated and always finds valid entries."""
    queries, width = -(-entries // TOP_K), 1024
    topk = _integers((queries, 1, TOP_K), width * block_size, random, device)
    tables = torch.arange(width, dtype=torch.int32, device=device).repeat(queries, 1)
    lens = torch.full((queries, 1), TOP_K, dtype=torch.int32, device=device)
    return Work(lambda: convert_kv_index(topk, tables, lens, block_size), topk.numel() * 8, (topk,))


def _cat(entries: int, _: int, random: torch.Generator, device: torch.device) -> Work:
    rows = -(-entries // (WINDOW + TOP_K))
    left, right = _integers((rows, WINDOW), 1 << 20, random, device), _integers((rows, TOP_K), 1 << 20, random, device)
    out = torch.empty((rows, WINDOW + TOP_K), dtype=torch.int32, device=device)
    return Work(lambda: kv_index_cat(left, right, 4096, 1024, out), out.numel() * 8, (out,))


def _expand(entries: int, _: int, random: torch.Generator, device: torch.device) -> Work:
    rows = -(-entries // WINDOW)
    pivots = _integers((rows, 4), WINDOW // 2, random, device)
    out = torch.empty((rows, WINDOW), dtype=torch.int32, device=device)
    return Work(lambda: expand_swa_index(pivots, WINDOW, out), out.numel() * 4 + pivots.numel() * 4, (out,))


def _decode(entries: int, _: int, random: torch.Generator, device: torch.device) -> Work:
    rows = -(-entries // WINDOW)
    windows = torch.stack((_integers((rows,), 1 << 20, random, device), _integers((rows,), WINDOW + 1, random, device)), 1)
    out = torch.empty((rows, WINDOW), dtype=torch.int32, device=device)
    windows = windows.contiguous()
    return Work(lambda: get_kv_swa_index_decode(windows, WINDOW, WINDOW, out), out.numel() * 4 + windows.numel() * 4, (out,))


def _expand_plan(segments: int, block_size: int, random: torch.Generator, device: torch.device) -> Work:
    """Whole sequences, as `kvhal.plan` makes spans of them."""
    count = -(-segments // PLAN_BLOCKS)
    tables = _integers((count, PLAN_BLOCKS), 1 << 20, random, device)
    sequence = torch.arange(count, dtype=torch.int32, device=device)
    first, tokens = sequence * PLAN_BLOCKS, torch.full_like(sequence, PLAN_BLOCKS * block_size)
    spans = torch.stack((first, first * block_size, sequence, torch.zeros_like(first), tokens), 1)
    out = torch.empty((count * PLAN_BLOCKS, 4), dtype=torch.int32, device=device)
    moved = (out.numel() + tables.numel() + spans.numel()) * 4
    return Work(lambda: expand_load_plan(spans, tables, block_size, out.shape[0], out), moved, (out,))


_FORMAT_WORK: dict[Op, Callable[..., Work]] = {
    Op.STORE: _store,
    Op.LOAD: _load,
    Op.LOAD_SLOTS: _load_slots,
    Op.FUSED_STORE: _fused,
}
_INDEX_WORK: dict[Op, Callable[..., Work]] = {
    Op.CONVERT_INDEX: _convert,
    Op.INDEX_CAT: _cat,
    Op.EXPAND_SWA_INDEX: _expand,
    Op.DECODE_SWA_INDEX: _decode,
    Op.EXPAND_LOAD_PLAN: _expand_plan,
}
