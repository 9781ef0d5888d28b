"""Host time of planning a large batch. Run as a script, or call `measure` and print its rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from kvhal import plan


class PlanTiming(NamedTuple):
    name: str
    items: int  # segments of a plan, rows of an index
    median_ms: float
    best_ms: float


def measure(
    num_sequences: int = 256, seqlen: int = 131072, block_size: int = 64, window_size: int = 4096, repeats: int = 15
) -> Iterator[PlanTiming]:
    """Time each builder on `num_sequences` sequences of `seqlen` tokens whose pages are shuffled.

    The first one is the plan whose budget is set (the whole cache, ratio 1); the others are what an engine asks for in
    the same step, with a chunk of 16 tokens a sequence.
    """
    width = -(-seqlen // block_size)
    pages = torch.randperm(num_sequences * width, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    # A slice of a wider table, as engines preallocate them.
    tables = torch.full((num_sequences, width + 8), -1, dtype=torch.int32)[:, :width]
    tables.copy_(pages.view(num_sequences, width))
    k = torch.full((num_sequences,), seqlen, dtype=torch.int32)
    q = torch.full_like(k, 16)
    states = torch.arange(num_sequences, dtype=torch.int32)

    def full() -> int:
        return len(plan.build_compressed_load_plan(k, tables, block_size=block_size, ratio=1).segments)

    def compressed() -> int:
        return len(plan.build_compressed_load_plan(k, tables, block_size=block_size, ratio=4).segments)

    def swa() -> int:
        return len(plan.build_swa_load_plan(k, q, states, window_size=window_size, swa_block_size=window_size).segments)

    def slots() -> int:
        return len(plan.build_paged_slot_mapping(k, q, tables, block_size=block_size))

    def ring_slots() -> int:
        return len(plan.build_swa_slot_mapping(k, q, states, swa_block_size=window_size))

    def pivots() -> int:
        return len(plan.build_prefill_swa_pivots(k, q, window_size=window_size))

    def decode() -> int:
        return len(plan.build_decode_swa_index(k, states, window_size=window_size, swa_block_size=window_size))

    def mirror() -> int:
        return len(plan.mirror_cp_reverse_index(q, 8)) + plan.mirror_cp_index(q, 8).numel()

    yield _time("load plan, every token", full, repeats)
    yield _time("load plan, ratio 4", compressed, repeats)
    yield _time("load plan, SWA", swa, repeats)
    yield _time("slots, paged", slots, repeats)
    yield _time("slots, SWA ring", ring_slots, repeats)
    yield _time("pivots, prefill", pivots, repeats)
    yield _time("index, decode", decode, repeats)
    yield _time("context parallel, both indices", mirror, repeats)


def _time(name: str, build: Callable[[], int], repeats: int) -> PlanTiming:
    items = build()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        build()
        times.append((time.perf_counter() - start) * 1e3)
    return PlanTiming(name, items, statistics.median(times), min(times))


if __name__ == "__main__":
    for timing in measure():
        print(f"{timing.name:32}{timing.items:10,} items{timing.median_ms:9.3f} ms median{timing.best_ms:9.3f} ms best")
