"""Time of planning a large batch, on the host and where the block tables live.

python benchmarks/bench_plan.py                             every builder on the host
python benchmarks/bench_plan.py --device cuda --json OUT    also the largest plan on a GPU, by each of its backends
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import kvhal
from kvhal import plan
from kvhal.bench.timing import Clock
from kvhal.platform import detect
from kvhal.registry import backends

SLEEP_CYCLES = 4_000_000  #: some 2 ms: the device is busy while the host puts a plan behind that


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
    tables = shuffled(num_sequences, -(-seqlen // block_size))
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


def shuffled(num_sequences: int, width: int) -> torch.Tensor:
    """Block tables ``[num_sequences, width]``, a slice of a wider table, as engines preallocate them."""
    pages = torch.randperm(num_sequences * width, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    tables = torch.full((num_sequences, width + 8), -1, dtype=torch.int32)[:, :width]
    return tables.copy_(pages.view(num_sequences, width))


def measure_device(
    num_sequences: int = 256, seqlen: int = 131072, block_size: int = 64, repeats: int = 25
) -> Iterator[dict[str, Any]]:
    """The plan of every token of `num_sequences` sequences, on a GPU: by each backend, and made on the host and sent there.

    Times in microseconds, medians: `host` until the builder returns, `device` of all it puts on the stream, one item behind
    the other, `ready` from the call until the segments are there on an idle device, `kernel` of the expansion alone.
    """
    device = torch.device("cuda")
    host_tables = shuffled(num_sequences, -(-seqlen // block_size))
    tables, k = host_tables.to(device), [seqlen] * num_sequences
    need = plan.build_compressed_load_plan(k, host_tables, block_size=block_size, ratio=1)
    clock = Clock(device)

    def on_host() -> plan.LoadPlan:
        return plan.build_compressed_load_plan(k, host_tables, block_size=block_size, ratio=1).to(device)

    def on_device() -> plan.LoadPlan:
        return plan.build_compressed_load_plan(k, tables, block_size=block_size, ratio=1, device=device)

    yield {"backend": "made on the host, sent", "segments": len(need.segments), **_times(on_host, repeats)}
    for name in backends():
        with kvhal.use_backend(name):
            if kvhal.explain("expand_load_plan", device=device).chosen is None:
                continue
            if not torch.equal(on_device().segments.cpu(), need.segments):
                raise SystemExit(f"{name}: other segments than the host's")
            kernel = clock.median_us(_kernels(tables, seqlen, block_size), 16 * len(need.segments))
            yield {"backend": name, "segments": len(need.segments), **_times(on_device, repeats), "kernel": kernel}


def _kernels(tables: torch.Tensor, seqlen: int, block_size: int) -> list[Callable[[], Any]]:
    """The expansion alone, into outputs that together exceed any cache."""
    count, width = tables.shape
    row = torch.arange(count, dtype=torch.int32, device=tables.device)
    spans = torch.stack((row * width, row * seqlen, row, torch.zeros_like(row), torch.full_like(row, seqlen)), 1)
    outs = [torch.empty((count * width, 4), dtype=torch.int32, device=tables.device) for _ in range(32)]
    return [lambda out=out: kvhal.expand_load_plan(spans, tables, block_size, len(out), out) for out in outs]


def _times(build: Callable[[], plan.LoadPlan], repeats: int) -> dict[str, float]:
    found: dict[str, list[float]] = {"host": [], "ready": [], "device": []}
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        build()
        found["host"].append((time.perf_counter() - start) * 1e6)
        torch.cuda.synchronize()
        found["ready"].append((time.perf_counter() - start) * 1e6)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        first.record()
        build()
        last.record()
        torch.cuda.synchronize()
        found["device"].append(first.elapsed_time(last) * 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


def _time(name: str, build: Callable[[], int], repeats: int) -> PlanTiming:
    items = build()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        build()
        times.append((time.perf_counter() - start) * 1e3)
    return PlanTiming(name, items, statistics.median(times), min(times))


def main() -> None:
    """Prints a line a measurement, or writes one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: measure plans made there too")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    options = parser.parse_args()
    host = [timing._asdict() for timing in measure()]
    for row in host:
        print(f"{row['name']:32}{row['items']:10,} items{row['median_ms']:9.3f} ms median{row['best_ms']:9.3f} ms best")
    found: dict[str, Any] = {"torch": torch.__version__, "host": host}
    if options.device == "cuda":
        found["device"] = detect("cuda").device_name
        found["plans"] = list(measure_device())
        for row in found["plans"]:
            times = "".join(f"{name} {row[name]:9.1f} us   " for name in ("host", "device", "ready", "kernel") if name in row)
            print(f"{row['backend']:32}{row['segments']:10,} segments   {times}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
