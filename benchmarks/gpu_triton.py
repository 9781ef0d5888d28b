"""Bandwidth, small-batch and host times of portable_triton on a GPU, beside the device's own copy bandwidth.

    python benchmarks/gpu_triton.py [out.json] [--commit ID]

Every time is a median of CUDA events around single launches; inputs alternate between two buffers larger than the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from kvhal.backends.portable_triton.manifest import BACKEND
from kvhal.formats import BUILTIN_FORMATS, V41_FORMAT, KVCacheFormat
from kvhal.interface import NormArgs, Op, Request, RopeArgs
from kvhal.layout import DATA_DTYPES, alloc_kv_cache, sf_output
from kvhal.platform import detect

TOKENS, BLOCK = 524_288, 64
SMALL = (1, 2, 8, 32, 128)


@triton.jit
def nothing(pointer, number, size: tl.constexpr):
    pass


def median_us(run: Callable[[int], None], repeats: int = 25) -> float:
    """Median device time of run(i)."""
    for index in range(4):
        run(index)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for index, (begin, end) in enumerate(events):
        begin.record()
        run(index)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3


def graph_us(run: Callable[[], None], launches: int = 200) -> float:
    """Device time of one launch among many of the same in a graph, gaps between launches included."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    return median_us(lambda _: graph.replay(), 9) / launches


def host_us(run: Callable[[], None], calls: int = 1500) -> float:
    """Host time of a call while the device keeps up."""
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - began) / calls * 1e6


class Bench:
    """Inputs and launchers of one format."""

    def __init__(self, layout: KVCacheFormat, tokens: int) -> None:
        self.layout, self.tokens, platform = layout, tokens, detect("cuda")
        self.blocks = -(-tokens // BLOCK)
        self.caches = [alloc_kv_cache(self.blocks, BLOCK, layout, "cuda") for _ in range(2)]
        self.rows = torch.randn((tokens, layout.elements), device="cuda").bfloat16()
        self.launch = {op: BACKEND.bind(Request(op, layout, platform, BLOCK)) for op in (Op.STORE, Op.LOAD, Op.FUSED_STORE)}
        self.norm = NormArgs(torch.rand(layout.elements, device="cuda").bfloat16())
        positions = torch.randint(0, 8192, (tokens,), device="cuda")
        self.rope = RopeArgs(positions, torch.randn((8192, 64), device="cuda"), 64)
        order = torch.randperm(self.blocks, device="cuda")
        at = torch.arange(tokens, device="cuda")
        self.slots = {"consecutive": at, "pages": order[at // BLOCK] * BLOCK + at % BLOCK}
        self.slots["tokens"] = torch.randperm(tokens, device="cuda")
        ends = torch.full_like(order, min(tokens, BLOCK))
        starts = torch.arange(self.blocks, device="cuda") * BLOCK
        self.segments = torch.stack((order, torch.zeros_like(order), ends, starts), 1).to(torch.int32).contiguous()
        self.out, self.sf = self.rows.clone(), None
        if layout.is_index:
            dtype, tail = sf_output(layout)
            self.out = torch.empty((tokens, layout.data_bytes), dtype=torch.uint8, device="cuda")
            self.out, self.sf = (
                self.out.view(DATA_DTYPES[layout.quantized_dtype]),
                torch.empty((tokens, *tail), dtype=dtype, device="cuda"),
            )
        for cache in self.caches:
            self.launch[Op.STORE](self.rows, cache, at)

    def store(self, which: int = 0, slots: str = "consecutive") -> None:
        self.launch[Op.STORE](self.rows, self.caches[which % 2], self.slots[slots])

    def fused(self, which: int = 0, slots: str = "consecutive") -> None:
        self.launch[Op.FUSED_STORE](self.rows, self.norm, self.rope, None, self.caches[which % 2], self.slots[slots], None)

    def load(self, which: int = 0) -> None:
        self.launch[Op.LOAD](self.caches[which % 2], self.segments, self.tokens, self.out, self.sf)


def copy_bandwidth(size: int) -> float:
    """Bytes read and written a second by a device-to-device copy of `size` bytes."""
    pair = [(torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda"), None) for _ in range(2)]
    target = [torch.empty_like(source) for source, _ in pair]
    return 2 * size / median_us(lambda i: target[i % 2].copy_(pair[i % 2][0])) * 1e6


def large(copy: float) -> list[dict[str, Any]]:
    """Shares of the copy bandwidth at TOKENS tokens."""
    found = []
    for name, layout in BUILTIN_FORMATS.items():
        bench, record = Bench(layout, TOKENS), layout.bytes_per_token
        row = record if layout.is_index else 2 * layout.elements
        runs: list[tuple[str, str, int, Callable[[int], None]]] = [("load", "pages", record + row, bench.load)]
        for slots in bench.slots:
            runs.append(("store", slots, record + 2 * layout.elements, partial(bench.store, slots=slots)))
            runs.append(("norm+rope+store", slots, record + 2 * layout.elements, partial(bench.fused, slots=slots)))
        for op, order, width, run in runs:
            us = median_us(run)
            found.append({"op": op, "format": name, "order": order, "us": us, "share": width * TOKENS / us * 1e6 / copy})
            print(f"{name:32}{op:16}{order:12}{us:9.1f} us  {found[-1]['share']:.3f}", flush=True)
        torch.cuda.empty_cache()
    return found


def small() -> list[dict[str, Any]]:
    """Device times at few tokens, in graphs, beside an empty kernel's."""
    pointer = torch.zeros(16, device="cuda")
    found = [{"op": "empty kernel", "us": graph_us(lambda: nothing[(1,)](pointer, 5, 4, num_warps=1))}]
    for name, layout in BUILTIN_FORMATS.items():
        for tokens in SMALL:
            bench = Bench(layout, tokens)
            for op in ("store", "load", "fused"):
                found.append({"op": op, "format": name, "tokens": tokens, "us": graph_us(getattr(bench, op))})
    return found


def host() -> dict[str, float]:
    """Host time of one eager call through the bound launcher."""
    bench, counter = Bench(V41_FORMAT, 4), torch.zeros(1, device="cuda")
    runs = {"store": bench.store, "load": bench.load, "fused": bench.fused, "torch add_": lambda: counter.add_(1)}
    return {name: host_us(run) for name, run in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    copy = copy_bandwidth(2**30)
    print(f"copy {copy / 1e12:.2f} TB/s", flush=True)
    result = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "commit": arguments.commit,
        "tokens": TOKENS,
        "block_size": BLOCK,
        "copy_bytes_per_second": copy,
        "copy_64_mib_bytes_per_second": copy_bandwidth(2**26),
        "large": large(copy),
        "small_us": small(),
        "host_us": host(),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("host_us", "copy_64_mib_bytes_per_second")}))
    for entry in result["small_us"]:
        print(entry)


if __name__ == "__main__":
    main()
