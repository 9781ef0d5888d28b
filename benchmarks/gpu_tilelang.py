"""Times cuda_tilelang's kernels on a GPU against the copy bandwidth of the same run.

    python benchmarks/gpu_tilelang.py OUT.json            the kernels as they ship
    python benchmarks/gpu_tilelang.py OUT.json --variants  every launch shape that was considered, to choose from

Pages are shuffled; benchmarks/isolated.py says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from isolated import CHUNK, DECODE, NAMES, TOKENS, Yardstick, commit, copy_bandwidth, operands, timings, yardstick

import kvhal
from kvhal.backends.cuda_tilelang import build, fused, load, store
from kvhal.backends.cuda_tilelang.tuned import shape_of
from kvhal.formats import BF16_FORMAT, BUILTIN_FORMATS, V41_FORMAT, V41_FP4_FORMAT, KVCacheFormat
from kvhal.interface import Op
from kvhal.platform import detect

INDEX_FORMATS = {name: layout for name, layout in BUILTIN_FORMATS.items() if layout.is_index}
OPS = {
    store.store_kernel: Op.STORE,
    load.load_kernel: Op.LOAD,
    load.raw_kernel: Op.LOAD,
    load.slots_kernel: Op.LOAD_SLOTS,
    fused.fused_kernel: Op.FUSED_STORE,
}
SHAPES = [(1, 4), (2, 1), (2, 2), (2, 4), (2, 8), (4, 1), (4, 2), (4, 4), (4, 8), (8, 1), (8, 2), (8, 4)]  # tokens, warps
FUSED = [(4, 8, 5, 4), (4, 16, 5, 4), (4, 32, 5, 4), (2, 16, 10, 4), (8, 8, 2, 4), (4, 8, 4, 4), (4, 16, 8, 2), (8, 8, 4, 2)]
TILES = [(32, 64), (32, 128), (64, 64), (64, 128), (64, 256), (128, 256)]


@dataclass(frozen=True)
class Job:
    """One kernel, and what is measured with it."""

    name: str
    factory: Callable[..., Any]
    arguments: tuple[Any, ...]
    layout: KVCacheFormat
    tokens: int = TOKENS
    order: str = "pages"
    block_size: int = 64
    shape: tuple[int, ...] = field(default=())

    @property
    def key(self) -> tuple[Any, ...]:
        name = self.factory.__name__.removesuffix("_kernel")
        return self.factory, (*self.arguments, self.shape or shape_of("sm_90", name, self.layout.quantized_dtype))


def compile_job(key: tuple[Any, ...]) -> None:
    """Leaves the kernel in TileLang's cache on disk."""
    factory, arguments = key
    build.tilelang.compile(factory(*arguments), target=build.target("sm_90"), pass_configs=build.PASS_CONFIGS)


def prepare(job: Job, run: Callable[..., None]) -> tuple[Callable[[], None], int]:
    """The launch, and the bytes that it has to move."""
    made = operands(OPS[job.factory], job.layout, job.tokens, job.block_size, job.order)
    tensors = made.tensors
    if job.factory is fused.fused_kernel:
        names: tuple[str, ...] = ("kv", "weight", "positions", "table", "cache", "slots")
        return partial(run, 1e-6, *(tensors[name] for name in names), None), made.bytes
    names = {
        store.store_kernel: ("kv", "cache", "slots"),
        load.load_kernel: ("cache", "segments", "total_k", "out", "out_sf"),
        load.raw_kernel: ("cache", "segments", "total_k", "out", "out_sf"),
        load.slots_kernel: ("cache", "slots", "out"),
    }[job.factory]
    return partial(run, *(tensors[name] for name in names)), made.bytes


def jobs(variants: bool) -> list[Job]:
    """Everything that is measured."""
    stages = fused.Stages("bfloat16", "bfloat16", fused.Rope(448, 64, False, "int64"), False, "int64", False, 16)
    shapes: list[tuple[int, ...]] = SHAPES if variants else [()]
    tiles: list[tuple[int, ...]] = TILES if variants else [()]
    found = []
    for shape in shapes:
        wide = shape and (*shape, 0, 1)
        found += [
            Job("store", store.store_kernel, (V41_FORMAT, 64, "int64", 16), V41_FORMAT, order=order, shape=wide)
            for order in ("consecutive", "pages", "tokens")
        ]
        held = shape and (*shape, 0, max(1, 32 // shape[1]))  # warps of a multiprocessor: fewer registers a thread
        for tried in dict.fromkeys((wide, held)):
            found.append(Job("store", store.store_kernel, (V41_FP4_FORMAT, 64, "int64", 16), V41_FP4_FORMAT, shape=tried))
        for layout in (V41_FORMAT, V41_FP4_FORMAT, BF16_FORMAT):
            found.append(Job("load", load.load_kernel, (layout, 64, 16), layout, shape=shape))
        found.append(Job("slots", load.slots_kernel, (V41_FORMAT, 64, "int64", 16), V41_FORMAT, order="tokens", shape=shape))
    for tried in FUSED if variants else [()]:
        found.append(Job("fused", fused.fused_kernel, (V41_FORMAT, 64, stages), V41_FORMAT, shape=tried))
    for tile in tiles:
        wanted = INDEX_FORMATS if not variants else {"MXFP8": kvhal.MXFP8_INDEX_KV_FORMAT, "FP4": kvhal.FP4_INDEX_KV_FORMAT}
        found += [Job("load", load.raw_kernel, (layout, 64, 16), layout, shape=tile) for layout in wanted.values()]
    if variants:
        return found
    small = [Job(**{**vars(job), "tokens": n}) for n in (CHUNK, DECODE) for job in found]
    return found + small + _odd_blocks(stages)


def _odd_blocks(stages: Any) -> list[Job]:
    """Block size 133, to be compared with 64."""
    size = 133
    return [
        Job("store", store.store_kernel, (V41_FORMAT, size, "int64", 16), V41_FORMAT, block_size=size),
        Job("store", store.store_kernel, (V41_FP4_FORMAT, size, "int64", 16), V41_FP4_FORMAT, block_size=size),
        *(Job("load", load.load_kernel, (f, size, 16), f, block_size=size) for f in (V41_FORMAT, V41_FP4_FORMAT, BF16_FORMAT)),
        *(Job("load", load.raw_kernel, (layout, size, 16), layout, block_size=size) for layout in INDEX_FORMATS.values()),
        Job("fused", fused.fused_kernel, (V41_FORMAT, size, stages), V41_FORMAT, block_size=size),
    ]


def result_of(job: Job, by: Yardstick) -> dict[str, Any]:
    """One row of the results; printed too."""
    run = build.kernel(job.key[0], *job.key[1], platform=detect("cuda"), device=torch.device("cuda", 0))
    row = {"kernel": job.name, "format": NAMES[job.layout], "tokens": job.tokens, "order": job.order}
    row |= {"block_size": job.block_size, "shape": list(job.shape)} | timings(partial(prepare, job, run), by)
    print(*row.values(), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    wanted = jobs(options.variants)
    begin = time.time()
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_job, {job.key: None for job in wanted}))
    print(f"built in {time.time() - begin:.0f} s", flush=True)
    by = yardstick()
    results = [result_of(job, by) for job in wanted]
    facts = {"device": torch.cuda.get_device_name(), "commit": options.commit or commit()}
    facts |= {"copy_bytes_a_second": by.bandwidth, "copy_again": copy_bandwidth(by.flush)}
    facts |= {"torch": torch.__version__, "tilelang": version("tilelang")}
    options.out.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n")
    print(facts)


if __name__ == "__main__":
    main()
