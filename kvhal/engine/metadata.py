"""Everything a step needs to know about its tokens, made on the host before the step: no layer plans anything."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvhal import plan
from kvhal.engine.caches import Caches, Sequence
from kvhal.engine.config import EngineConfig

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PrefillMetadata:
    """One chunk of every sequence, concatenated in batch order: n tokens of b sequences, g groups that they complete.

    Attributes:
        tokens, positions: int64 ``[n]`` and int32 ``[n]``.
        history, compressed: int32 ``[., 4]`` load segments, and `history_rows`, `compressed_rows` their rows.
        swa_slots: ``[n]`` ring slots.
        swa_pivots: int32 ``[n, 4]`` for `expand_swa_index`.
        members: int64 ``[g, ratio]``, the rows of ``[pending rows of each sequence (b * ratio) | chunk (n)]`` of each group.
        pending_read: int64 ``[b * ratio]``, rows of the pending state to read.
        pending_from, pending_to: int64 ``[.]``, chunk rows and the rows of the pending state that they replace.
        group_positions: int32 ``[g]``, the position of each group's first token.
        group_slots: ``[g]`` slots of the compressed and index caches.
        visible_begin, visible_end: int32 ``[n, 1]``, the compressed rows that each query may attend to.
        order: None where one process computes all queries. Otherwise tokens, positions, swa_pivots and visible_* hold the rows
            that this rank computes, and `order` int64 ``[n]`` says where each token's row is among those of all ranks.
    """

    tokens: Tensor
    positions: Tensor
    history: Tensor
    history_rows: int
    compressed: Tensor
    compressed_rows: int
    swa_slots: Tensor
    swa_pivots: Tensor
    members: Tensor
    pending_read: Tensor
    pending_from: Tensor
    pending_to: Tensor
    group_positions: Tensor
    group_slots: Tensor
    visible_begin: Tensor
    visible_end: Tensor
    order: Tensor | None = None

    @property
    def chunk_rows(self) -> int:
        """n, also where this rank computes fewer of them."""
        return self.swa_slots.shape[0]

    def to(self, device: torch.device) -> PrefillMetadata:
        """The same with every tensor on `device`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def plan_prefill(caches: Caches, sequences: list[Sequence], chunks: list[list[int]]) -> PrefillMetadata:
    """The metadata of one chunk; blocks must have been reserved, lengths not yet advanced. Tensors are on the CPU.

    Args:
        caches: who owns which blocks.
        sequences: b of them.
        chunks: their next tokens; some, not all, may be empty.
    """
    config = caches.config
    begin = np.array([sequence.length for sequence in sequences], np.int64)
    count = np.array([len(chunk) for chunk in chunks], np.int64)
    states = np.array([sequence.state_id for sequence in sequences], np.int64)
    end, tables = begin + count, caches.block_tables(sequences)
    owner = np.repeat(np.arange(len(sequences)), count)
    positions = np.arange(count.sum()) + np.repeat(begin - (np.cumsum(count) - count), count)

    swa = plan.build_swa_load_plan(end, count, states, window_size=config.window_size, swa_block_size=config.swa_block_size)
    compressed = plan.build_compressed_load_plan(end, tables, block_size=config.block_size, ratio=config.ratio)
    slots = plan.build_compressed_slot_mapping(end, count, tables, block_size=config.block_size, ratio=config.ratio)
    completing = torch.nonzero(slots >= 0).view(-1)
    members, group_positions = _members(config, begin, owner, positions, completing.numpy(), len(sequences))
    ratio, kept = config.ratio, np.nonzero(positions >= end[owner] - config.ratio)[0]
    first = compressed.cu_compressed_seqlens.numpy()[:-1][owner]
    return PrefillMetadata(
        tokens=torch.tensor([token for chunk in chunks for token in chunk], dtype=torch.int64),
        positions=torch.from_numpy(positions.astype(np.int32)),
        history=swa.segments,
        history_rows=swa.total_k,
        compressed=compressed.segments,
        compressed_rows=compressed.total_k,
        swa_slots=plan.build_swa_slot_mapping(end, count, states, swa_block_size=config.swa_block_size),
        swa_pivots=plan.build_prefill_swa_pivots(end, count, window_size=config.window_size),
        members=torch.from_numpy(members),
        pending_read=torch.from_numpy((states[:, None] * ratio + np.arange(ratio)).ravel()),
        pending_from=torch.from_numpy(kept),
        pending_to=torch.from_numpy(states[owner[kept]] * ratio + positions[kept] % ratio),
        group_positions=torch.from_numpy(group_positions.astype(np.int32)),
        group_slots=slots[completing],
        visible_begin=_column(first),
        visible_end=_column(first + (positions + 1) // ratio),
    )


def _members(
    config: EngineConfig, begin: Ints, owner: Ints, positions: Ints, completing: Ints, batch: int
) -> tuple[Ints, Ints]:
    """Member rows [g, ratio] and first positions [g]; tokens before the chunk come from the pending state."""
    offsets = np.arange(config.ratio)
    group_positions = positions[completing] - (config.ratio - 1)
    of_chunk = batch * config.ratio + completing[:, None] - (config.ratio - 1) + offsets
    of_pending = owner[completing][:, None] * config.ratio + offsets
    in_chunk = group_positions[:, None] + offsets >= begin[owner[completing]][:, None]
    return np.where(in_chunk, of_chunk, of_pending), group_positions


def _column(values: Ints) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)[:, None])


class DecodeMetadata:
    """One token of up to `batch_size` sequences, in tensors that are made once and updated in place.

    Shapes never change, so a captured step sees each update. Rows without a sequence are inactive: nothing is stored for
    them and nothing is visible to them.

    Attributes:
        tokens: int64 ``[batch_size]``.
        positions: int32 ``[batch_size]``.
        swa_slots: int64 ``[batch_size]``.
        swa_windows: int32 ``[batch_size, 2]`` for `get_kv_swa_index_decode`.
        pending_slot: int64 ``[batch_size]``, the token's row of the pending state.
        pending_members: int64 ``[batch_size, ratio]``, the rows of its group.
        group_positions: int32 ``[batch_size]``, the position of its group's first token.
        group_slots: int64 ``[batch_size]``, where its group's record goes; -1 while the group is not complete.
        block_tables: int32 ``[batch_size, blocks_per_sequence]``.
        visible: int32 ``[batch_size, 1]``, complete groups, the one that this token completes included.
        picks: int32 ``[batch_size, 1]``, how many of them the indexer can pick.
    """

    def __init__(self, config: EngineConfig, batch_size: int, device: torch.device) -> None:
        self._config, self.batch_size = config, batch_size
        batch, ratio = batch_size, config.ratio

        def tensor(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = tensor(torch.int64, batch)
        self.positions = tensor(torch.int32, batch)
        self.swa_slots = tensor(torch.int64, batch)
        self.swa_windows = tensor(torch.int32, batch, 2)
        self.pending_slot = tensor(torch.int64, batch)
        self.pending_members = tensor(torch.int64, batch, ratio)
        self.group_positions = tensor(torch.int32, batch)
        self.group_slots = tensor(torch.int64, batch)
        self.block_tables = tensor(torch.int32, batch, config.blocks_per_sequence)
        self.visible = tensor(torch.int32, batch, 1)
        self.picks = tensor(torch.int32, batch, 1)

    def update(self, caches: Caches, sequences: list[Sequence], tokens: Tensor) -> None:
        """Row i becomes the next token of `sequences[i]`; blocks must have been reserved, lengths not yet advanced.

        Args:
            caches: who owns which blocks.
            sequences: at most `batch_size`.
            tokens: integer ``[len(sequences)]``, any device; nothing waits for it when it is on the step's device.
        """
        config, active = self._config, len(sequences)
        window, ring, ratio = config.window_size, config.swa_block_size, config.ratio
        start = np.array([sequence.length for sequence in sequences], np.int64)
        state = np.array([sequence.state_id for sequence in sequences], np.int64)
        end, one, tables = start + 1, np.ones_like(start), caches.block_tables(sequences)
        swa_slots = plan.build_swa_slot_mapping(end, one, state, swa_block_size=ring)
        windows = plan.build_decode_swa_index(end, state, window_size=window, swa_block_size=ring)
        group_slots = plan.build_compressed_slot_mapping(end, one, tables, block_size=config.block_size, ratio=ratio)
        pending = self._padded(state, config.max_batch)[:, None] * ratio + np.arange(ratio)
        position = self._padded(start, 0)
        visible = self._padded(end // ratio, 0)[:, None]
        self.tokens[:active].copy_(tokens)
        self.tokens[active:] = 0
        self._fill(self.swa_slots, swa_slots, active)
        self._fill(self.swa_windows, windows, active)
        self.swa_windows[active:, 1] = 0
        self._fill(self.group_slots, group_slots, active)
        self._fill(self.block_tables, torch.from_numpy(tables), active)
        self.positions.copy_(torch.from_numpy(position))
        self.group_positions.copy_(torch.from_numpy(position - position % ratio))
        self.pending_members.copy_(torch.from_numpy(pending))
        self.pending_slot.copy_(torch.from_numpy(pending[:, 0] + position % ratio))
        self.visible.copy_(torch.from_numpy(visible))
        self.picks.copy_(torch.from_numpy(np.minimum(visible, config.top_k)))

    def _padded(self, values: Ints, fill: int) -> Ints:
        """One entry a row of the step, `fill` for inactive rows."""
        padded = np.full(self.batch_size, fill, np.int64)
        padded[: len(values)] = values
        return padded

    @staticmethod
    def _fill(target: Tensor, values: Tensor, active: int) -> None:
        """Values in the active rows; -1, which stores and shows nothing, in the others."""
        target[:active].copy_(values)
        target[active:] = -1
