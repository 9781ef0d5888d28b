"""The paged cache of a model: one kvhal cache a layer, and one pool of blocks that all sequences take from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import kvhal
from kvhal.formats import KVCacheFormat
from kvhal.layout import cache_geometry
from kvhal.llm.errors import LLMError
from kvhal.ops.checks import check_int
from kvhal.plan import LoadPlan

BlockTables = npt.NDArray[np.int32]


class BlockPool:
    """Block ids that are free. A block belongs to one sequence at a time, in every layer's cache alike."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def take(self, counts: Sequence[int]) -> BlockTables:
        """Blocks for several sequences at once, all or none.

        Args:
            counts: blocks each sequence needs.

        Returns:
            int32 ``[b, max(counts)]`` block ids, the rest -1.

        Raises:
            LLMError: fewer blocks are free.
        """
        if sum(counts) > self.free:
            raise LLMError(f"cache: has {self.free} free blocks of {self.num_blocks}, needs {sum(counts)}")
        tables = np.full((len(counts), max(counts, default=0)), -1, np.int32)
        for row, count in zip(tables, counts, strict=True):
            row[:count] = [self._free.pop() for _ in range(count)]
        return tables

    def give_back(self, tables: BlockTables) -> None:
        """Frees the blocks that `take` gave."""
        self._free.extend(int(block) for block in tables[tables >= 0])


BEYOND_ANY = 1 << 128  #: blocks; a device is asked for fewer, and says itself that it does not have them


class PagedCache:
    """Records of every layer. All reads and writes of K and V go through kvhal here, and nowhere else.

    Args:
        layers: caches to make.
        num_blocks, block_size: of each of them.
        layout: the record.
        device: where they live.

    Raises:
        TypeError, ValueError: a count is no int in its range.
        LLMError: there is no memory for them.
    """

    def __init__(
        self, layers: int, num_blocks: int, block_size: int, layout: KVCacheFormat, device: torch.device | str
    ) -> None:
        self.layout = layout
        self.block_size = check_int("block_size", block_size, 1)
        self.device = torch.device(device)
        layers, num_blocks = check_int("layers", layers, 1), check_int("num_blocks", num_blocks, 0, BEYOND_ANY)
        try:
            self._caches = [kvhal.alloc_kv_cache(num_blocks, block_size, layout, device) for _ in range(layers)]
            self.pool = BlockPool(num_blocks)
        except (MemoryError, RuntimeError, TypeError) as error:  # torch: RuntimeError, TypeError beyond int64
            size = layers * num_blocks * cache_geometry(layout, block_size).block_stride
            raise LLMError(
                f"cache: has {num_blocks} blocks of {block_size} tokens, {size} bytes, needs fewer: {device} does not give "
                f"them ({str(error).partition(chr(10))[0]})"
            ) from error

    @property
    def bytes_per_token(self) -> float:
        """Bytes a token takes in all layers, block padding included."""
        stride = cache_geometry(self.layout, self.block_size).block_stride
        return len(self._caches) * stride / self.block_size

    def reserve(self, lengths: Sequence[int]) -> BlockTables:
        """Block tables for sequences of these many tokens; see `BlockPool.take`.

        Raises:
            LLMError: the pool cannot hold them; the message counts tokens.
        """
        counts = [math.ceil(length / self.block_size) for length in lengths]
        if sum(counts) > self.pool.free:
            has, needs = (blocks * self.block_size for blocks in (self.pool.free, sum(counts)))
            raise LLMError(
                f"cache: has room for {has} tokens, needs {needs} ({sum(lengths)} tokens of prompt and answer in blocks of "
                f"{self.block_size}); shorten the prompts or the answers, or make the cache larger"
            )
        return self.pool.take(counts)

    def store(self, layer: int, records: Tensor, slots: Tensor) -> None:
        """Quantises bf16 records ``[n, elements]`` into slots ``[n]``."""
        kvhal.store_kv_cache(records, self._caches[layer], slots, layout=self.layout)

    def load(self, layer: int, plan: LoadPlan) -> Tensor:
        """bf16 ``[plan.total_k, elements]``: the records of whole sequences, one after another."""
        return kvhal.load_paged_kv_cache(self._caches[layer], plan.segments, plan.total_k, layout=self.layout).kv

    def load_slots(self, layer: int, slots: Tensor) -> Tensor:
        """bf16 ``[*slots.shape, elements]``, zeros where a slot is -1."""
        return kvhal.load_kv_slots(self._caches[layer], slots, layout=self.layout)
