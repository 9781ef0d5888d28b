"""Slot mappings for stores, and the compact index tables that attention kernels expand."""

from __future__ import annotations

import numpy as np
import torch

from kvhal.plan import inputs
from kvhal.plan.inputs import Ints, IntTable, IntVector


def build_paged_slot_mapping(
    seqlens_k: IntVector, seqlens_q: IntVector, block_tables: IntTable, *, block_size: int
) -> torch.Tensor:
    """The slot of every chunk token in a paged cache.

    A token at position p of sequence i has ``block_tables[i, p // block_size] * block_size + p % block_size``.

    seqlens_k, seqlens_q: [b]. block_tables: [b, width] block ids, any row stride.
    Returns [sum(seqlens_q)] int32, or int64 when a slot of the batch exceeds int32.
    Raises ValueError if a chunk reaches past its sequence's blocks, or a block id in its range is negative.
    """
    return build_compressed_slot_mapping(seqlens_k, seqlens_q, block_tables, block_size=block_size, ratio=1)


def build_compressed_slot_mapping(
    seqlens_k: IntVector, seqlens_q: IntVector, block_tables: IntTable, *, block_size: int, ratio: int
) -> torch.Tensor:
    """One slot per chunk token: that of the compressed token which this token completes, -1 where it completes none.

    A token at position p completes compressed token ``p // ratio`` when ``(p + 1) % ratio == 0``. One entry per chunk
    token keeps the shape independent of the group boundaries, so it can be captured in a graph at decode and a store of
    per-token rows skips the rest. An engine that pools only the completed groups takes the entries >= 0: they are in
    the order of the groups, and their indices are the rows of the completing tokens.

    seqlens_k, seqlens_q: [b]. block_tables: [b, width] block ids, any row stride. block_size: source tokens a block
        stands for, a multiple of `ratio`; the compressed cache holds ``block_size // ratio`` tokens a block.
    Returns [sum(seqlens_q)] int32, or int64 when a slot of the batch exceeds int32.
    Raises ValueError if a completed group lies past its sequence's blocks, or a block id in the range is negative.
    """
    size, ratio = inputs.compressed_block_size(block_size, ratio), inputs.scalar("ratio", ratio)
    k, q = inputs.chunk_lengths(seqlens_k, seqlens_q)
    table = inputs.block_table("block_tables", block_tables, len(k))
    inputs.check_table_width("block_tables", table.shape[1], (k - q) // ratio, k // ratio, size, ratio)
    sequence, position = _chunk_tokens(k, q)
    group, phase = np.divmod(position + 1, ratio)
    completes = phase == 0
    sequence, token = sequence[completes], group[completes] - 1
    column = token // size
    ids = table[sequence, column].astype(np.int64)
    inputs.check_block_ids("block_tables", ids, lambda at: (int(sequence[at]), int(column[at])))
    slots = np.full(len(position), -1, np.int64)
    slots[completes] = ids * size + token % size
    return _as_slots(slots)


def build_swa_slot_mapping(
    seqlens_k: IntVector, seqlens_q: IntVector, state_ids: IntVector, *, swa_block_size: int
) -> torch.Tensor:
    """The ring slot of every chunk token: ``state_ids[i] * swa_block_size + pos % swa_block_size``.

    A token more than `swa_block_size` from its chunk's end gets -1: a later token of the same chunk has its slot, and
    a store with two writers to one slot has no defined winner.

    seqlens_k, seqlens_q, state_ids: [b]. swa_block_size: tokens a ring block holds.
    Returns [sum(seqlens_q)] int32, or int64 when a slot of the batch exceeds int32.
    """
    ring = inputs.scalar("swa_block_size", swa_block_size)
    k, q = inputs.chunk_lengths(seqlens_k, seqlens_q)
    states = inputs.vector("state_ids", state_ids, len(k), -1)
    inputs.check_ring_ids(states, q > 0)
    sequence, position = _chunk_tokens(k, q)
    slots = states[sequence] * ring + position % ring
    slots[position < (k - ring)[sequence]] = -1
    return _as_slots(slots)


def build_prefill_swa_pivots(
    seqlens_k: IntVector, seqlens_q: IntVector, *, window_size: int, swa_valid_starts: IntVector | None = None
) -> torch.Tensor:
    """What each query row sees of ``[SWA history | this chunk | compressed]``, for `expand_swa_index`.

    A query at position p sees the last `window_size` positions up to and including p, but none below
    ``swa_valid_starts[i]``: the rule depends on positions only, so chunking does not change what is seen. The history
    of sequence i is buffer rows [i * window_size, (i + 1) * window_size) as `build_swa_load_plan` writes them; its
    chunk begins at row ``b * window_size + cu_seqlens_q[i]``. Under context parallelism the chunk rows are gathered
    back to that order (`mirror_cp_reverse_index`), and a rank takes its queries' rows of this table with
    `mirror_cp_index`.

    seqlens_k, seqlens_q: [b]. swa_valid_starts: [b], default 0.
    Returns int32 [sum(seqlens_q), 4]: (history row, history length, chunk row, chunk length).
    """
    window = inputs.scalar("window_size", window_size)
    k, q = inputs.chunk_lengths(seqlens_k, seqlens_q)
    b, rows = len(k), int(q.sum())
    if b * window + rows > inputs.INT32_MAX:
        raise ValueError(
            f"window_size is {window} for {b} sequences and {rows} chunk tokens, needs at most {inputs.INT32_MAX}"
            f" buffer rows in all; split the batch"
        )
    valid = inputs.valid_starts(swa_valid_starts, b)
    sequence, position = _chunk_tokens(k, q)
    lowest, start = _window_start(position, window, valid[sequence]), (k - q)[sequence]
    history_length = np.maximum(start - lowest, 0)
    own_row = b * window + np.arange(rows)
    chunk_length = position + 1 - np.maximum(lowest, start)
    pivots = np.empty((rows, 4), np.int32)
    pivots[:, 0] = (sequence + 1) * window - history_length
    pivots[:, 1] = history_length
    pivots[:, 2] = own_row + 1 - chunk_length
    pivots[:, 3] = chunk_length
    return torch.from_numpy(pivots)


def build_decode_swa_index(
    seqlens_k: IntVector,
    state_ids: IntVector,
    *,
    window_size: int,
    swa_block_size: int,
    seqlens_q: IntVector | None = None,
    swa_valid_starts: IntVector | None = None,
) -> torch.Tensor:
    """What each decoded token sees of the ring cache, for `get_kv_swa_index_decode`.

    A query at position p sees the last `window_size` positions up to and including its own (already stored) one, but
    none below ``swa_valid_starts[i]``. The slots are consecutive from start_slot and wrap inside its ring block.

    seqlens_k, state_ids: [b]. seqlens_q: [b] tokens decoded together (speculative decoding), default 1 each. As all of
        them are stored before the first one reads, the ring must hold ``window_size + max(seqlens_q) - 1`` tokens.
    swa_valid_starts: [b], default 0.
    Returns int32 [sum(seqlens_q), 2]: (start_slot, valid_length).
    """
    window, ring = inputs.ring_window(window_size, swa_block_size)
    k = inputs.vector("seqlens_k", seqlens_k)
    k, q = inputs.chunk_lengths(k, np.ones_like(k) if seqlens_q is None else seqlens_q)
    states = inputs.vector("state_ids", state_ids, len(k), -1)
    inputs.check_ring_ids(states, q > 0)
    need = window + int(q.max(initial=1)) - 1
    if need > ring:
        raise ValueError(
            f"swa_block_size is {ring}, needs {need} (window_size {window} + {need - window} more tokens of one step):"
            f" a step's later tokens would overwrite what its first one sees; enlarge it or decode fewer tokens a step"
        )
    valid = inputs.valid_starts(swa_valid_starts, len(k))
    sequence, position = _chunk_tokens(k, q)
    lowest = _window_start(position, window, valid[sequence])
    slots = states[sequence] * ring + lowest % ring
    if slots.size and slots.max() > inputs.INT32_MAX:
        i = int(sequence[slots.argmax()])
        raise ValueError(
            f"state_ids[{i}] is {states[i]} with swa_block_size {ring}: slot {slots.max()}, needs at most"
            f" {inputs.INT32_MAX} in an int32 index; use lower ring block ids"
        )
    return torch.from_numpy(np.stack([slots, position + 1 - lowest], axis=1).astype(np.int32))


def _chunk_tokens(k: Ints, q: Ints) -> tuple[Ints, Ints]:
    """Of each chunk token, [sum(q)]: its sequence, and its position there. They may fill memory: refuse first."""
    position = np.arange(int(q.sum())) + np.repeat(k - q - inputs.starts_of(q), q)
    return np.repeat(np.arange(len(q)), q), position


def _window_start(position: Ints, window: int, valid: Ints) -> Ints:
    """First position each chunk token sees, none below its `valid`; one past its own where it sees none."""
    return np.minimum(np.maximum(position + 1 - window, valid), position + 1)


def _as_slots(slots: Ints) -> torch.Tensor:
    """int32 unless a slot needs more: caches of that many tokens are rare, and half the bytes go to the device."""
    wide = slots.size > 0 and slots.max() > inputs.INT32_MAX
    return torch.from_numpy(slots if wide else slots.astype(np.int32))
