"""Time on the host CPU: storing and loading 100,000 tokens with the reference backend, and planning a large batch.

Speed is not what the reference is for; this shows that its cost is linear and that planning stays out of a step's way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import bench_plan
import torch

import kvhal
from kvhal import plan
from kvhal.formats import BUILTIN_FORMATS, KVCacheFormat

BLOCK_SIZE = 64


class Timing(NamedTuple):
    name: str
    items: int
    unit: str
    median_ms: float
    best_ms: float


def measure(tokens: int = 100_000, repeats: int = 3) -> Iterator[Timing]:
    """Store and load of each built-in format, pages shuffled; the first call of each, which binds, is not counted."""
    with kvhal.use_backend("reference_torch"):
        for name, layout in BUILTIN_FORMATS.items():
            store, load = _calls(layout, tokens)
            yield _time(f"store {name}", tokens, store, repeats)
            yield _time(f"load {name}", tokens, load, repeats)


def _calls(layout: KVCacheFormat, tokens: int) -> tuple[Callable[[], object], Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    blocks = -(-tokens // BLOCK_SIZE)
    table = torch.randperm(blocks, generator=generator).to(torch.int32)[None]
    slots = plan.build_paged_slot_mapping([tokens], [tokens], table, block_size=BLOCK_SIZE)
    load = plan.build_compressed_load_plan([tokens], table, block_size=BLOCK_SIZE, ratio=1)
    cache = kvhal.alloc_kv_cache(blocks, BLOCK_SIZE, layout, "cpu")
    rows = torch.randn((tokens, layout.elements), generator=generator).to(torch.bfloat16)
    return (
        lambda: kvhal.store_kv_cache(rows, cache, slots, layout=layout),
        lambda: kvhal.load_paged_kv_cache(cache, load.segments, load.total_k, layout=layout),
    )


def _time(name: str, tokens: int, call: Callable[[], object], repeats: int) -> Timing:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return Timing(name, tokens, "tokens", statistics.median(times), min(times))


def _planning() -> Iterator[Timing]:
    for timing in bench_plan.measure():
        yield Timing(f"plan: {timing.name}", timing.items, "items", timing.median_ms, timing.best_ms)


def main() -> None:
    """Prints a line a measurement, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON on stdout, and nothing else")
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens stored and loaded")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    timings = []
    for timing in itertools.chain(measure(arguments.tokens), _planning()):
        timings.append(timing._asdict())
        if not arguments.json:
            print(
                f"{timing.name:44}{timing.items:10,} {timing.unit:6}{timing.median_ms:10.2f} ms{timing.best_ms:10.2f} ms best"
            )
    if arguments.json:
        facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "block_size": BLOCK_SIZE}
        print(json.dumps({**facts, "timings": timings}, indent=2))


if __name__ == "__main__":
    main()
