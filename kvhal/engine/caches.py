"""Where records live between steps: the pool of blocks, the caches of every layer, the state of a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvhal.engine.config import EngineConfig
from kvhal.layout import alloc_kv_cache


class PoolExhausted(RuntimeError):
    """No free block or ring is left for what was asked; release a sequence, or configure a larger pool."""


class BlockPool:
    """Ids of free blocks; every block belongs to one sequence at a time, in any order."""

    def __init__(self, name: str, size: int) -> None:
        self._name, self._size = name, size
        self._free = list(range(size))[::-1]

    def take(self, count: int) -> list[int]:
        """`count` ids.

        Raises:
            PoolExhausted: fewer are free; none is taken.
        """
        if count > len(self._free):
            raise PoolExhausted(
                f"{self._name}: {len(self._free)} of {self._size} are free, needs {count}; release sequences or enlarge it"
            )
        return [self._free.pop() for _ in range(count)]

    def give(self, ids: Iterable[int]) -> None:
        """Makes ids free again."""
        self._free.extend(ids)

    @property
    def free(self) -> int:
        """How many ids are free."""
        return len(self._free)


@dataclass(eq=False)
class Sequence:
    """A sequence whose records are cached.

    Attributes:
        state_id: its ring block in every sliding-window cache, and its row of every pending state.
        length: tokens whose records are stored.
        blocks: its blocks of every compressed and index cache, in order.
        released: its blocks and ring were given back.
    """

    state_id: int
    length: int = 0
    blocks: list[int] = field(default_factory=list)
    released: bool = False


@dataclass(frozen=True, eq=False)
class SourceCaches:
    """What a source layer keeps for its group.

    Attributes:
        main: compressed records ``[blocks, records_per_block, 1, .]``.
        index: indexer keys, same blocks and slots as `main`.
        pending: fp32 ``[(max_batch + 1) * ratio, hidden]``: the normed hidden rows of each sequence's last tokens, position p
            at row ``state_id * ratio + p % ratio``, out of which a group is pooled when it is complete. The last `ratio`
            rows take what the inactive rows of a decode step write.
    """

    main: Tensor
    index: Tensor
    pending: Tensor


class Caches:
    """All caches of an engine, and who owns which part of them.

    Zeroed at the start, so that whole caches can be compared between backends.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.config = config
        self.blocks = BlockPool("blocks", config.pool_blocks)
        self.states = BlockPool("ring blocks", config.max_batch)
        self.swa = tuple(
            alloc_kv_cache(config.max_batch, config.swa_block_size, config.swa_format, device).zero_()
            for _ in range(config.num_layers)
        )
        self.sources = {
            layer: SourceCaches(
                alloc_kv_cache(config.pool_blocks, config.records_per_block, config.main_format, device).zero_(),
                alloc_kv_cache(config.pool_blocks, config.records_per_block, config.index_format, device).zero_(),
                torch.zeros(((config.max_batch + 1) * config.ratio, config.hidden_size), device=device),
            )
            for layer in range(0, config.num_layers, config.layers_per_group)
        }

    def open(self) -> Sequence:
        """A new, empty sequence.

        Raises:
            PoolExhausted: max_batch sequences are alive.
        """
        return Sequence(self.states.take(1)[0])

    def reserve(self, sequences: list[Sequence], counts: list[int]) -> None:
        """Blocks for `counts[i]` more tokens of each sequence; all of them or none.

        Raises:
            ValueError: a sequence was released, occurs twice, or would be longer than max_seq_len.
            PoolExhausted: too few blocks are free.
        """
        if len({id(sequence) for sequence in sequences}) != len(sequences):
            raise ValueError("sequences: one occurs twice, needs each at most once a step")
        missing = []
        for i, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            length = sequence.length + count
            if sequence.released:
                raise ValueError(f"sequences[{i}]: was released, needs a sequence that is alive")
            if length > self.config.max_seq_len:
                limit = self.config.max_seq_len
                raise ValueError(f"sequences[{i}]: would have {length} tokens, needs at most max_seq_len {limit}")
            records = length // self.config.ratio
            missing.append(-(-records // self.config.records_per_block) - len(sequence.blocks))
        taken = self.blocks.take(sum(missing))
        for sequence, count in zip(sequences, missing, strict=True):
            sequence.blocks += [taken.pop(0) for _ in range(count)]

    def release(self, sequence: Sequence) -> None:
        """Gives the sequence's blocks and ring back. Releasing twice is harmless."""
        if sequence.released:
            return
        sequence.released = True
        self.blocks.give(sequence.blocks)
        self.states.give([sequence.state_id])

    def block_tables(self, sequences: list[Sequence]) -> npt.NDArray[np.int32]:
        """int32 ``[b, blocks_per_sequence]``, -1 behind a sequence's last block."""
        tables = np.full((len(sequences), self.config.blocks_per_sequence), -1, np.int32)
        for row, sequence in zip(tables, sequences, strict=True):
            row[: len(sequence.blocks)] = sequence.blocks
        return tables

    def tensors(self) -> dict[str, Tensor]:
        """Every paged cache by name (``swa.0``, ``main.0``, ``index.0``, ...): what parity checks compare."""
        named = {f"swa.{layer}": cache for layer, cache in enumerate(self.swa)}
        for layer, source in self.sources.items():
            named |= {f"main.{layer}": source.main, f"index.{layer}": source.index}
        return named
