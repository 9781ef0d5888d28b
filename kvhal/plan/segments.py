"""Load plans: the segments that `load_paged_kv_cache` copies from a paged or ring cache to consecutive rows."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from kvhal.plan import inputs
from kvhal.plan.device import expand_compressed, send
from kvhal.plan.inputs import Ints, IntTable, IntVector
from kvhal.platform import usable_device

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

    def to(self, device: torch.device | str) -> Self:
        """The same plan with its tensors on `device`; from the host to an accelerator nothing waits for the copy.

        Raises ValueError if this machine has no such device, CaptureError while a graph is being captured.
        """
        target = usable_device(device)
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        moved: dict[str, Any] = {name: send(tensor, target) for name, tensor in tensors.items()}
        return dataclasses.replace(self, **moved)


@dataclasses.dataclass(frozen=True, eq=False)
class CompressedLoadPlan(LoadPlan):
    """A load plan and where each sequence's rows begin.

    cu_compressed_seqlens: int32 [b + 1]; sequence i owns output rows [cu[i], cu[i + 1]), at least one.
    """

    cu_compressed_seqlens: torch.Tensor


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
        inputs.check_total(self.total_k + int(ends[0]))
        self._append(_cut_at_blocks(np.zeros_like(ends), ends, self.source_block_size).segments)

    def append_paged_range(self, block_table: IntVector, begin: int, end: int) -> None:
        """Tokens [begin, end) of the sequence whose block ids are `block_table` [width].

        Raises ValueError if the range reaches past the table or an entry that is not a block id.
        """
        ids = inputs.vector("block_table", block_table, low=inputs.INT32_MIN)
        begin, end = _range("begin", begin, "end", end, inputs.INT32_MAX)
        begins, ends, size = np.array([begin]), np.array([end]), self.source_block_size
        inputs.check_table_width("block_table", len(ids), begins, ends, size)
        segments = _cut_at_blocks(begins, ends, size).segments
        first = begin // size
        used = ids[first : first + len(segments)]
        inputs.check_block_ids("block_table", used, lambda at: (0, first + at))
        segments[:, 0] = used
        self._append(segments)

    def append_ring_range(self, block_id: int, begin: int, end: int) -> None:
        """Tokens [begin, end) of a sequence kept in one ring block (token t at offset t % source_block_size).

        At most two segments. Raises ValueError if the range is longer than the ring.
        """
        block = inputs.scalar("block_id", block_id, 0)
        begin, end = _range("begin", begin, "end", end, inputs.INT32_MAX)
        ring = self.source_block_size
        if end - begin > ring:
            raise ValueError(
                f"end is {end}, needs at most begin + {ring}: [{begin}, {end}) has {end - begin} tokens and the ring"
                f" keeps only its last {ring}"
            )
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
    seqlens_k: IntVector, block_tables: IntTable, *, block_size: int, ratio: int, device: torch.device | str | None = None
) -> CompressedLoadPlan:
    """Loads every complete compressed token of each sequence, sequences one after another.

    Sequence i has ``seqlens_k[i] // ratio`` compressed tokens, this chunk's included (they must be stored before the
    load); its last, partial group is not stored anywhere yet. A sequence without any gets one row of zeros, so that no
    range of ``cu_compressed_seqlens`` is empty; masking that row is the index table's business.

    seqlens_k: [b] source tokens. block_tables: [b, width] block ids, any row stride; entries past a sequence's range
        are not looked at. block_size: source tokens a block stands for, a multiple of `ratio`; the compressed cache
        holds ``block_size // ratio`` tokens a block. ratio: source tokens per compressed token; 1 gives a plain plan.
    device: None makes the plan on the host. A device makes the same plan there, where `block_tables`, int32, must be: a
        few numbers a sequence go there, one kernel (`kvhal.expand_load_plan`) does the rest, and the host does not wait.
    Raises ValueError if a sequence needs more blocks than its table has, or a block id in its range is negative. With a
    device lengths, widths, shape, dtype and device are checked, but ids only in strict mode (InvalidMetadata, and a wait):
    otherwise an id that is no block goes into the plan, and loads read it as zeros. CaptureError while a graph is captured.
    """
    size, ratio = inputs.compressed_block_size(block_size, ratio), inputs.scalar("ratio", ratio)
    tokens = inputs.vector("seqlens_k", seqlens_k) // ratio
    if device is not None:
        return CompressedLoadPlan(*expand_compressed(tokens, block_tables, size, ratio, usable_device(device)))
    table = inputs.block_table("block_tables", block_tables, len(tokens))
    begins = np.zeros_like(tokens)
    inputs.check_table_width("block_tables", table.shape[1], begins, tokens, size, ratio)
    output_rows = np.maximum(tokens, 1)
    inputs.check_total(int(output_rows.sum()))
    cut = _cut_at_blocks(begins, output_rows, size)
    segments = cut.segments
    if table.shape[1]:  # a table without columns has only sequences without tokens: all zeros already
        # A mask takes less time and far less memory than one index per segment, and fresh memory is what costs here.
        used = np.arange(cut.counts.max(initial=0)) < cut.counts[:, None]
        ids = table[:, : used.shape[1]][used]
        zero_rows = cut.starts[tokens == 0]
        ids[zero_rows] = 0  # whatever the table has there is padding, not to be checked
        inputs.check_block_ids("block_tables", ids, lambda at: tuple(np.argwhere(used)[at]))
        segments[:, 0] = ids
        segments[zero_rows, 0] = -1
    total = _set_offsets(segments, 0)
    cu = np.concatenate(([0], np.cumsum(output_rows))).astype(np.int32)
    return CompressedLoadPlan(torch.from_numpy(segments), total, torch.from_numpy(cu))


def build_swa_load_plan(
    seqlens_k: IntVector,
    seqlens_q: IntVector,
    state_ids: IntVector,
    *,
    window_size: int,
    swa_block_size: int,
    swa_valid_starts: IntVector | None = None,
    device: torch.device | str | None = None,
) -> LoadPlan:
    """Loads the window of tokens before each chunk from the ring cache, oldest first, `window_size` rows a sequence.

    Output row ``i * window_size + r`` is position ``seqlens_k[i] - seqlens_q[i] - window_size + r`` of sequence i;
    positions below 0 or below ``swa_valid_starts[i]`` are zeros. At most three segments a sequence (zeros, ring up to
    its end, ring from its start). Load before this chunk is stored: its slots may be the ones to read.

    seqlens_k, seqlens_q: [b]. state_ids: [b] the ring block of each sequence; -1 only where nothing is read.
    swa_block_size: tokens a ring block holds, >= window_size. swa_valid_starts: [b] first position whose record is in
        the ring, default 0. device: where the plan's tensors are to be, None for the host. The few segments are made on
        the host and go there without a wait (CaptureError while a graph is captured).
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
    plan = LoadPlan(torch.from_numpy(segments), _set_offsets(segments, 0))
    return plan if device is None else plan.to(device)


def _range(begin_name: str, begin: int, end_name: str, end: int, high: int) -> tuple[int, int]:
    begin = inputs.scalar(begin_name, begin, 0, high)
    return begin, inputs.scalar(end_name, end, begin, high)


def _rows(block: npt.ArrayLike, begin: npt.ArrayLike, end: npt.ArrayLike) -> Segments:
    """Segments without destination, empty ones left out."""
    rows = np.stack([block, begin, end, np.zeros_like(begin)], axis=1).astype(np.int32)
    return rows[rows[:, 2] > rows[:, 1]]


class _Cut(NamedTuple):
    segments: Segments  # [sum(counts), 4], every block -1, destinations not set
    counts: Ints  # [b] segments of each range
    starts: Ints  # [b] and where they begin in `segments`


def _cut_at_blocks(begins: Ints, ends: Ints, block_size: int) -> _Cut:
    """Ranges [begins[i], ends[i]) cut at block boundaries, one range after another."""
    first_block = begins // block_size
    counts = np.where(ends > begins, -(-ends // block_size) - first_block, 0)
    starts = inputs.starts_of(counts)
    # Only the first and the last segment of a range can be less than a block.
    segments = np.empty((int(counts.sum()), 4), np.int32)
    segments[:, 0] = -1
    segments[:, 1] = 0
    segments[:, 2] = block_size
    used = counts > 0
    segments[starts[used], 1] = (begins - first_block * block_size)[used]
    segments[(starts + counts - 1)[used], 2] = (ends - (first_block + counts - 1) * block_size)[used]
    return _Cut(segments, counts, starts)


def _set_offsets(segments: Segments, first_row: int) -> int:
    """Fill in the destinations, each where the previous segment ended; returns the total number of rows."""
    lengths = segments[:, 2] - segments[:, 1]
    total = first_row + int(lengths.sum(dtype=np.int64))
    inputs.check_total(total)
    segments[:1, 3] = 0
    np.cumsum(lengths[:-1], dtype=np.int32, out=segments[1:, 3])
    if first_row:
        segments[:, 3] += np.int32(first_row)
    return total
