"""The cache's share of a decode step: fused store, index conversion and gather of each layer, replayed as one CUDA graph.

    python benchmarks/gpu_decode.py OUT.json

A layer normalises, rotates, quantises and stores its streams' new records, turns each stream's top-k indices into slots, and
gathers the records of its sliding window and those of the slots as bf16 rows. A copy stands for the indexer that writes the
indices; it is one of the launches. "launches" are kernels a layer as the profiler saw them; "microseconds" is a replay divided
by its layers. Every layer has its own cache and its own rows, so no layer finds another's records in L2. The rows of the last
layer are compared with reference_torch's before anything is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import kvhal
from kvhal.bench.timing import Clock, environment
from kvhal.formats import V41_FORMAT, V41_FP4_FORMAT, KVCacheFormat, format_to_text
from kvhal.interface import CastArgs, KVCacheOutArgs, NormArgs, RopeArgs

BLOCK_SIZE, ROPE_DIM, POSITIONS = 64, 64, 4096
WINDOW, TOP_K = 128, 512  #: slots a stream gathers from its window and from the compressed records
CONTEXT = 2048  #: compressed records a stream has
LAYERS = 16
BACKENDS = ("cuda_tilelang", "portable_triton")


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer's caches, rows and tables."""

    layout: KVCacheFormat
    window: torch.Tensor
    compressed: torch.Tensor
    new: torch.Tensor
    norm: NormArgs
    rope: RopeArgs
    stored: torch.Tensor
    top_k: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    recent: torch.Tensor

    @classmethod
    def random(cls, layout: KVCacheFormat, streams: int, seed: int) -> Layer:
        device = torch.device("cuda", 0)
        random = torch.Generator(device).manual_seed(seed)
        integers = {"dtype": torch.int32, "device": device}
        pages = CONTEXT // BLOCK_SIZE
        caches = [kvhal.alloc_kv_cache(count * streams, BLOCK_SIZE, layout, device) for count in (WINDOW // BLOCK_SIZE, pages)]
        for cache in caches:  # every byte below 0x78 is a number in each format
            cache.copy_(torch.randint(0, 0x78, cache.shape, dtype=torch.uint8, device=device, generator=random))
        first = torch.arange(streams, **integers).view(-1, 1) * WINDOW
        table = torch.randn((POSITIONS, ROPE_DIM), device=device, generator=random)
        return cls(
            layout,
            *caches,
            torch.randn((streams, layout.elements), device=device, generator=random).bfloat16(),
            NormArgs(torch.randn(layout.elements, device=device, generator=random).bfloat16()),
            RopeArgs(torch.randint(0, POSITIONS, (streams,), generator=random, **integers), table, ROPE_DIM),
            first.view(-1) + torch.randint(0, WINDOW, (streams,), generator=random, **integers),
            torch.randint(0, CONTEXT, (streams, 1, TOP_K), generator=random, **integers),
            torch.randperm(streams * pages, generator=random, **integers).view(streams, pages),
            torch.full((streams, 1), TOP_K, **integers),
            (first + torch.arange(WINDOW, **integers)).contiguous(),
        )

    def step(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the attention of this layer reads; `slots` is where its top-k indices are converted."""
        slots.copy_(self.top_k)
        kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
            self.new,
            norm_args=self.norm,
            rope_args=self.rope,
            cast_args=CastArgs.for_layout(self.layout),
            out_args=KVCacheOutArgs(self.window, self.stored, self.layout),
        )
        kvhal.convert_kv_index(slots, self.tables, self.lengths, BLOCK_SIZE)
        near = kvhal.load_kv_slots(self.window, self.recent.view(-1), layout=self.layout)
        return near, kvhal.load_kv_slots(self.compressed, slots.view(-1), layout=self.layout)


def launches(run: Callable[[], Any]) -> int:
    """Kernels that a call launches."""
    run()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in found.events())


def measure(clock: Clock, backend: str, layout: KVCacheFormat, streams: int) -> dict[str, Any]:
    """One row of the results.

    Raises:
        SystemExit: the rows differ from the reference's.
    """
    layers = [Layer.random(layout, streams, seed) for seed in range(LAYERS)]
    slots = [torch.empty_like(layer.top_k) for layer in layers]
    with kvhal.use_backend("reference_torch"):
        wanted = layers[-1].step(slots[-1])
    with kvhal.use_backend(backend):
        rows = layers[-1].step(slots[-1])
        if not all(torch.equal(have, need) for have, need in zip(rows, wanted, strict=True)):
            raise SystemExit(f"{backend}, {format_to_text(layout)}, {streams} streams: other rows than reference_torch's")
        count = launches(lambda: layers[0].step(slots[0]))

        def step() -> None:
            for layer, one in zip(layers, slots, strict=True):
                layer.step(one)

        microseconds = clock.run_us(step) / LAYERS
    gathered = streams * (WINDOW + TOP_K)
    moved = gathered * (layout.bytes_per_token + 2 * layout.elements)
    row = {"backend": backend, "format": format_to_text(layout), "streams": streams, "gathered_rows": gathered}
    return {**row, "launches": count, "microseconds": round(microseconds, 2), "gathered_bytes": moved}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    clock = Clock(torch.device("cuda", 0))
    results = []
    for backend, layout, streams in product(BACKENDS, (V41_FORMAT, V41_FP4_FORMAT), (1, 16, 64, 256)):
        results.append(measure(clock, backend, layout, streams))
        print(json.dumps(results[-1]), flush=True)
    facts = {**environment(clock), "layers": LAYERS, "window": WINDOW, "top_k": TOP_K}
    options.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
