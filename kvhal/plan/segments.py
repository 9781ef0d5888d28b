"""Load plans: the segments that `load_paged_kv_cache` copies from a paged or ring cache to consecutive rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvhal.plan import inputs
from kvhal.plan.inputs import Ints, IntTable, IntVector

Segments = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, eq=False)
class LoadPlan:
    """What to load, in output order.

    segments: int32 [s, 4] rows ``[src_block, src_begin, src_end, dst_offset]``, in tokens, ranges half-open;
        src_block -1 writes zeros. Segments cover output rows 0..total_k-1 once, in order.
    total_k: number of output rows.
    """

    segments: torch.Tensor
    total_k: int

    def to(self, device: torch.device | str) -> LoadPlan:
        """The same plan with its tensors on `device`, copied without waiting where the source memory allows it."""
        return dataclasses.replace(self, segments=self.segments.to(device, non_blocking=True))


@dataclasses.dataclass(frozen=True, eq=False)
class CompressedLoadPlan(LoadPlan):
    """A load plan and where each sequence's rows begin.

    cu_compressed_seqlens: int32 [b + 1]; sequence i owns output rows [cu[i], cu[i + 1]), at least one.
    """

    cu_compressed_seqlens: torch.Tensor

    def to(self, device: torch.device | str) -> CompressedLoadPlan:
        return dataclasses.replace(
            self,
            segments=self.segments.to(device, non_blocking=True),
            cu_compressed_seqlens=self.cu_compressed_seqlens.to(device, non_blocking=True),
        )


class BlockLoadPlanBuilder:
    """Appends ranges one after another; each range lands where the previous one ended.

    The batch functions of this module are the fast way for the usual plans; the builder is for everything else.

    source_block_size: tokens a block of the source cache holds. No segment is longer than that.
    """

    def __init__(self, source_block_size: int) -> None:
        self.source_block_size = inputs.scalar("source_block_size", source_block_size)
        self.total_k = 0
        self._parts: list[Segments] = []

    def append_segment(self, src_block: int, src_begin: int, src_end: int) -> None:
        """Tokens [src_begin, src_end) of one block; block -1 gives zeros. An empty range appends nothing."""
        block = inputs.scalar("src_block", src_block, -1)
        begin, end = _range("src_begin", src_begin, "src_end", src_end, self.source_block_size)
        self._append(_rows([block], [begin], [end]))

    def append_zero_fill(self, num_tokens: int) -> None:
        """`num_tokens` rows of zeros, in segments of at most a block."""
        ends = np.array([inputs.scalar("num_tokens", num_tokens, 0)])
        self._append(_paged_rows(None, np.zeros_like(ends), ends, self.source_block_size))

    def append_paged_range(self, block_table: IntVector, begin: int, end: int) -> None:
        """Tokens [begin, end) of the sequence whose block ids are `block_table` [width].

        Raises ValueError if the range reaches past the table or an entry that is not a block id.
        """
        ids = inputs.vector("block_table", block_table, low=inputs.INT32_MIN)
        begin, end = _range("begin", begin, "end", end, inputs.INT32_MAX)
        table, begins, ends = ids.reshape(1, -1), np.array([begin]), np.array([end])
        self._append(_paged_rows(table, begins, ends, self.source_block_size))

    def append_ring_range(self, block_id: int, begin: int, end: int) -> None:
        """Tokens [begin, end) of a sequence kept in one ring block (token t at offset t % source_block_size).

        At most two segments. Raises ValueError if the range is longer than the ring.
        """
        block = inputs.scalar("block_id", block_id, 0)
        begin, end = _range("begin", begin, "end", end, inputs.INT32_MAX)
        ring = self.source_block_size
        if end - begin > ring:
            raise ValueError(f"range [{begin}, {end}) has {end - begin} tokens, needs at most the ring's {ring}")
        first = begin % ring
        split = min(ring, first + end - begin)
        self._append(_rows([block, block], [first, 0], [split, first + end - begin - split]))

    def build(self) -> LoadPlan:
        """The plan so far. Later appends do not change it."""
        segments = np.concatenate(self._parts) if self._parts else np.empty((0, 4), np.int32)
        return LoadPlan(torch.from_numpy(segments), self.total_k)

    def _append(self, segments: Segments) -> None:
        self.total_k = _set_offsets(segments, self.total_k)
        self._parts.append(segments)


def build_compressed_load_plan(
    seqlens_k: IntVector, block_tables: IntTable, *, block_size: int, ratio: int
) -> CompressedLoadPlan:
    """Loads every complete compressed token of each sequence, sequences one after another.

    Sequence i has ``seqlens_k[i] // ratio`` compressed tokens, this chunk's included (they must be stored before the
    load); its last, partial group is not stored anywhere yet. A sequence without any gets one row of zeros, so that no
    range of ``cu_compressed_seqlens`` is empty; masking that row is the index table's business.

    seqlens_k: [b] source tokens. block_tables: [b, width] block ids, any row stride; entries past a sequence's range
        are not looked at. block_size: source tokens a block stands for, a multiple of `ratio`; the compressed cache
        holds ``block_size // ratio`` tokens a block. ratio: source tokens per compressed token; 1 gives a plain plan.
    Raises ValueError if a sequence needs more blocks than its table has, or a block id in its range is negative.
    """
    size = inputs.compressed_block_size(block_size, ratio)
    tokens = inputs.vector("seqlens_k", seqlens_k) // inputs.scalar("ratio", ratio)
    table = inputs.block_table("block_tables", block_tables, len(tokens))
    segments = _paged_rows(table, np.zeros_like(tokens), tokens, size)
    empty = tokens == 0
    if empty.any():
        first_segment = inputs.starts_of(-(-tokens // size))
        segments = np.insert(segments, first_segment[empty], [-1, 0, 1, 0], axis=0)
    total = _set_offsets(segments, 0)
    cu = np.concatenate(([0], np.cumsum(np.maximum(tokens, 1)))).astype(np.int32)
    return CompressedLoadPlan(torch.from_numpy(segments), total, torch.from_numpy(cu))


def build_swa_load_plan(
    seqlens_k: IntVector,
    seqlens_q: IntVector,
    state_ids: IntVector,
    *,
    window_size: int,
    swa_block_size: int,
    swa_valid_starts: IntVector | None = None,
) -> LoadPlan:
    """Loads the window of tokens before each chunk from the ring cache, oldest first, `window_size` rows a sequence.

    Output row ``i * window_size + r`` is position ``seqlens_k[i] - seqlens_q[i] - window_size + r`` of sequence i;
    positions below 0 or below ``swa_valid_starts[i]`` are zeros. At most three segments a sequence (zeros, ring up to
    its end, ring from its start). Load before this chunk is stored: its slots may be the ones to read.

    seqlens_k, seqlens_q: [b]. state_ids: [b] the ring block of each sequence; -1 only where nothing is read.
    swa_block_size: tokens a ring block holds, >= window_size. swa_valid_starts: [b] first position whose record is in
        the ring, default 0.
    """
    window, ring = inputs.ring_window(window_size, swa_block_size)
    k, q = inputs.chunk_lengths(seqlens_k, seqlens_q)
    states = inputs.vector("state_ids", state_ids, len(k), -1)
    end = k - q
    padding = np.clip(inputs.valid_starts(swa_valid_starts, len(k)) - (end - window), 0, window)
    length = window - padding
    inputs.check_ring_ids(states, length > 0)
    first = (end - length) % ring
    split = np.minimum(ring, first + length)
    zero = np.zeros_like(k)
    segments = _rows(
        np.stack([zero - 1, states, states], axis=1).ravel(),
        np.stack([zero, first, zero], axis=1).ravel(),
        np.stack([padding, split, first + length - split], axis=1).ravel(),
    )
    return LoadPlan(torch.from_numpy(segments), _set_offsets(segments, 0))


def _range(begin_name: str, begin: int, end_name: str, end: int, high: int) -> tuple[int, int]:
    begin = inputs.scalar(begin_name, begin, 0, high)
    return begin, inputs.scalar(end_name, end, begin, high)


def _rows(block: npt.ArrayLike, begin: npt.ArrayLike, end: npt.ArrayLike) -> Segments:
    """Segments without destination, empty ones left out."""
    rows = np.stack([block, begin, end, np.zeros_like(begin)], axis=1).astype(np.int32)
    return rows[rows[:, 2] > rows[:, 1]]


def _paged_rows(
    tables: npt.NDArray[np.integer[Any]] | None, begins: Ints, ends: Ints, block_size: int
) -> Segments:
    """Segments without destination for range [begins[i], ends[i]) of table row i, cut at block boundaries.

    Without tables every segment is zeros. Columns are filled in place: this is the bulk of a long plan's time.
    """
    first_block = begins // block_size
    counts = np.where(ends > begins, -(-ends // block_size) - first_block, 0)
    starts = inputs.starts_of(counts)
    used = counts > 0
    total = int(counts.sum())
    segments = np.empty((total, 4), np.int32)
    if tables is None:
        segments[:, 0] = -1
    else:
        inputs.check_table_width(tables.shape[1], begins, ends, block_size, "tokens")
        segments[:, 0] = _block_ids(tables, first_block, counts, starts)
    segments[:, 1] = 0
    segments[:, 2] = block_size
    segments[starts[used], 1] = (begins - first_block * block_size)[used]
    segments[(starts + counts - 1)[used], 2] = (ends - (first_block + counts - 1) * block_size)[used]
    return segments


def _block_ids(
    tables: npt.NDArray[np.integer[Any]], first_block: Ints, counts: Ints, starts: Ints
) -> npt.NDArray[np.integer[Any]]:
    """Entries [first_block[i], first_block[i] + counts[i]) of each table row, concatenated."""
    rows, width = tables.shape
    # One flat gather is three times as fast as indexing with (row, column) pairs.
    index = np.arange(int(counts.sum())) + np.repeat(np.arange(rows) * width + first_block - starts, counts)
    ids = tables.ravel()[index]
    if ids.size and (ids.min() < 0 or ids.max() > inputs.INT32_MAX):
        inputs.check_block_ids(ids, index // width, index % width)
    return ids


def _set_offsets(segments: Segments, first_row: int) -> int:
    """Fill in the destinations, each where the previous segment ended; returns the total number of rows."""
    lengths = segments[:, 2] - segments[:, 1]
    total = first_row + int(lengths.sum(dtype=np.int64))
    if total > inputs.INT32_MAX:
        raise ValueError(f"the plan has {total} rows, needs at most {inputs.INT32_MAX} for int32 offsets; split the batch")
    segments[:, 3] = np.cumsum(lengths, dtype=np.int32) - lengths + np.int32(first_row)
    return total
