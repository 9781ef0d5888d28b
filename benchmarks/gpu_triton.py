"""Checks portable_triton's kernels on a GPU byte for byte, then times them against the copy bandwidth of the same run.

    python benchmarks/gpu_triton.py OUT.json             the kernels as they ship, at four sizes
    python benchmarks/gpu_triton.py OUT.json --variants  also tokens and warps a program, to choose from

Pages are shuffled; benchmarks/isolated.py says what the figures mean. At few tokens two more: "graph_microseconds", a launch's
share of a replayed graph of 64 in a row, and "device_microseconds", the profiler's time of the kernel itself, L2 warm; both
next to those of a kernel that does nothing ("empty"). Exit code 1 when a byte differs from reference_torch's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import isolated
import torch
import triton
from isolated import CHUNK, DECODE, NAMES, TOKENS

from kvhal.backends.portable_triton import fused, load, store
from kvhal.backends.portable_triton.launch import Kernel
from kvhal.backends.portable_triton.manifest import BACKEND
from kvhal.backends.reference_torch.manifest import BACKEND as REFERENCE
from kvhal.formats import BUILTIN_FORMATS, MXFP8_INDEX_KV_FORMAT, V41_FORMAT, V41_FP4_FORMAT, KVCacheFormat
from kvhal.interface import Op, Request
from kvhal.platform import capture, detect

CHECKED = 1031  #: tokens of the comparison with the reference
REPLAYED = 64  #: launches in a graph
MAIN = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4))  # tokens, warps a program
SMALL = ((4, 1), (8, 1), (8, 2), (16, 1), (16, 2), (16, 4))
RAW = ((8, 1), (16, 1), (16, 4), (32, 1), (32, 2), (32, 4), (64, 4))


@dataclass(frozen=True)
class Job:
    """One kernel, and what is measured with it; no shape is the backend's own."""

    op: Op
    layout: KVCacheFormat
    tokens: int = TOKENS
    order: str = "pages"
    block_size: int = 64
    shape: tuple[int, int] | None = None
    packed: bool | None = None  #: of a store: quantise two elements a register, or one
    registers: int | None = None  #: a lane at most; no limit is the compiler's choice

    @property
    def kernel(self) -> Job:
        return replace(self, tokens=TOKENS, order="pages")

    @property
    def hadamard(self) -> bool:
        return self.layout.is_index


@triton.jit
def nothing_kernel(cache_ptr, slots_ptr, n):
    pass


@contextmanager
def shaped(shape: tuple[int, int] | None, packed: bool | None) -> Iterator[None]:
    """Kernels bound inside have this many tokens and warps a program, and stores are packed or not."""
    names = [(module, name) for module in (store, load, fused) for name in vars(module) if name.endswith("_shape")]
    before = [(module, name, getattr(module, name)) for module, name in [*names, (store, "packed_store")]]
    if shape is not None:
        for module, name in names:
            setattr(module, name, lambda *_: shape)
    if packed is not None:
        store.packed_store = lambda _: packed
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


@contextmanager
def limited(registers: int | None) -> Iterator[None]:
    """Kernels made inside have at most so many registers a lane."""
    initialise = Kernel.__init__

    def with_limit(self: Kernel, *arguments: Any) -> None:
        initialise(self, *arguments)
        self.options["maxnreg"] = registers

    if registers is not None:
        Kernel.__init__ = with_limit  # type: ignore[method-assign]
    try:
        yield
    finally:
        Kernel.__init__ = initialise  # type: ignore[method-assign]


@cache
def bound(kernel: Job) -> Callable[..., None]:
    stages = ("norm", "rope", "hadamard") if kernel.hadamard else ("norm", "rope")
    request = Request(
        kernel.op, kernel.layout, detect(isolated.DEVICE), kernel.block_size, stages if kernel.op == Op.FUSED_STORE else ()
    )
    with shaped(kernel.shape, kernel.packed), limited(kernel.registers):
        launch = BACKEND.bind(request)
    if kernel.registers is None:
        return launch

    def first_launch_makes_the_kernel(*arguments: Any) -> None:
        with limited(kernel.registers):
            launch(*arguments)

    return first_launch_makes_the_kernel


def compile_job(kernel: Job) -> str:
    """Leaves the kernel in Triton's cache on disk; the error where there is one."""

    def compile_only(self: Kernel, _: int, *args: Any) -> None:
        self._compile(args)

    launch, Kernel.__call__ = Kernel.__call__, compile_only  # type: ignore[method-assign]
    try:
        tensors = isolated.operands(kernel.op, kernel.layout, DECODE, kernel.block_size).tensors
        isolated.launcher_call(kernel.op, bound(kernel), tensors, kernel.hadamard)()
    except Exception as error:  # noqa: BLE001  a variant that does not compile is a result
        return f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        Kernel.__call__ = launch  # type: ignore[method-assign]
    return ""


def differing_bytes(kernel: Job) -> int:
    """Bytes that differ from reference_torch's over rows of every magnitude, NaN and Inf, and slots outside the cache."""
    made = isolated.operands(kernel.op, kernel.layout, CHECKED, kernel.block_size).tensors
    made["cache"].view(torch.uint8).random_(0, 256)
    if "kv" in made:
        rows = made["kv"]
        rows *= torch.exp2(torch.randint(-30, 30, (CHECKED, 1), device=isolated.DEVICE).float())
        rows[::7, ::5] *= 2.0**20
        if kernel.op != Op.FUSED_STORE:
            rows[300:600].view(torch.int16).random_(-(2**15), 2**15)
        rows[5, 3], rows[6, 7], rows[7, 64], rows[9] = float("nan"), float("inf"), -float("inf"), 0.0
    if "slots" in made:
        made["slots"][[0, 3, 700]] = torch.tensor([-1, 2**40, -5], device=isolated.DEVICE)
    results = []
    reference = REFERENCE.bind(Request(kernel.op, kernel.layout, detect(isolated.DEVICE), kernel.block_size))
    for launch in (bound(kernel), reference):
        tensors = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in made.items()}
        kept = whole(made["cache"]).clone().view(made["cache"].dtype)
        tensors["cache"] = kept.as_strided(made["cache"].shape, made["cache"].stride())
        isolated.launcher_call(kernel.op, launch, tensors, kernel.hadamard)()
        results.append([whole(tensors[name]) for name in ("cache", "out", "out_sf") if tensors.get(name) is not None])
    return sum(int((have != need).sum()) for have, need in zip(*results, strict=True))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's rows, block padding included."""
    return tensor.as_strided((tensor.shape[0], tensor.stride(0)), (tensor.stride(0), 1)).view(torch.uint8)


def graph_time(call: Callable[[], None]) -> float:
    """Microseconds of a launch in a replayed graph."""
    call()

    def run() -> None:
        for _ in range(REPLAYED):
            call()

    replay, times = capture(run, torch.device("cuda", 0)), []
    for _ in range(21):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return round(statistics.median(begin.elapsed_time(end) for begin, end in times) * 1e3 / REPLAYED, 3)


def device_times(calls: list[Callable[[], None]]) -> list[float]:
    """Microseconds of each call's one kernel by the profiler, all in one session; empty where it saw something else."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in calls:
            for _ in range(REPLAYED):
                call()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = sorted((event for event in kernels if "kernel" in event.name), key=lambda event: event.time_range.start)
    times = [event.time_range.elapsed_us() for event in kernels]
    if len(times) != len(calls) * REPLAYED:
        print(f"the profiler saw {len(times)} kernels of {len(calls) * REPLAYED}")
        return []
    return [round(statistics.median(times[at : at + REPLAYED]), 3) for at in range(0, len(times), REPLAYED)]


def jobs(variants: bool) -> list[Job]:
    """Everything that is measured."""
    every = [
        Job(op, layout) for op in (Op.STORE, Op.LOAD, Op.LOAD_SLOTS, Op.FUSED_STORE) for layout in BUILTIN_FORMATS.values()
    ]
    orders = [
        Job(Op.STORE, layout, order=order) for layout in (V41_FORMAT, V41_FP4_FORMAT) for order in ("consecutive", "tokens")
    ]
    found = every + orders + [replace(job, tokens=tokens) for tokens in (CHUNK, DECODE, 1) for job in every]
    found += [Job(op, V41_FORMAT, block_size=133) for op in (Op.STORE, Op.LOAD, Op.FUSED_STORE)]
    if not variants:
        return found
    for layout in (V41_FORMAT, V41_FP4_FORMAT):
        for op in (Op.STORE, Op.LOAD, Op.FUSED_STORE):
            found += [Job(op, layout, shape=shape) for shape in MAIN]
        found += [Job(Op.STORE, layout, shape=shape, packed=layout == V41_FORMAT) for shape in MAIN]
    for shape, registers in (((4, 1), 112), ((4, 1), 102), ((4, 1), 96), ((4, 1), 80), ((2, 1), 64), ((8, 2), 96)):
        found.append(Job(Op.FUSED_STORE, V41_FORMAT, shape=shape, registers=registers))
    found += [Job(op, MXFP8_INDEX_KV_FORMAT, shape=shape) for op in (Op.STORE, Op.FUSED_STORE) for shape in SMALL]
    return found + [
        Job(Op.LOAD, layout, shape=shape) for layout in BUILTIN_FORMATS.values() if layout.is_index for shape in RAW
    ]


def result_of(job: Job, by: isolated.Yardstick) -> dict[str, Any]:
    """One row of the results; printed too."""

    def prepare() -> tuple[Callable[[], None], int]:
        made = isolated.operands(job.op, job.layout, job.tokens, job.block_size, job.order)
        return isolated.launcher_call(job.op, bound(job.kernel), made.tensors, job.hadamard), made.bytes

    row = {"op": str(job.op), "format": NAMES[job.layout], "tokens": job.tokens, "order": job.order}
    row |= {"block_size": job.block_size, "shape": list(job.shape or ()), "packed": job.packed, "registers": job.registers}
    row |= isolated.timings(prepare, by)
    if job.tokens <= DECODE:
        row["graph_microseconds"] = graph_time(prepare()[0])
    print(*row.values(), flush=True)
    return row


def add_device_times(jobs: list[Job], rows: list[dict[str, Any]], empty: dict[str, float], nothing: Callable[[], None]) -> None:
    """Puts the profiler's times into the rows of few tokens, and into that of the empty kernel."""
    few = [(job, row) for job, row in zip(jobs, rows, strict=True) if job.tokens <= DECODE]
    calls = [nothing]
    for job, _ in few:
        made = isolated.operands(job.op, job.layout, job.tokens, job.block_size, job.order)
        calls.append(isolated.launcher_call(job.op, bound(job.kernel), made.tensors, job.hadamard))
    for row, microseconds in zip([empty, *(row for _, row in few)], device_times(calls), strict=False):
        row["device_microseconds"] = microseconds
        print(*list(row.values())[:4], microseconds)


def compiled(wanted: list[Job], processes: int) -> dict[str, str]:
    """Compiles every kernel in other processes; what does not compile, with its error."""
    kernels, begin = list({job.kernel: None for job in wanted}), time.time()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        errors = dict(zip(kernels, pool.map(compile_job, kernels), strict=True))
    print(f"{len(kernels)} kernels built in {time.time() - begin:.0f} s", flush=True)
    return {str(kernel): error for kernel, error in errors.items() if error}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--commit", default="")
    parser.add_argument("--processes", type=int, default=14)
    options = parser.parse_args()
    wanted = jobs(options.variants)
    errors = compiled(wanted, options.processes)
    wanted = [job for job in wanted if str(job.kernel) not in errors]
    wrong = {str(kernel): differing_bytes(kernel) for kernel in {job.kernel: None for job in wanted}}
    wrong = {kernel: count for kernel, count in wrong.items() if count}
    print("errors", errors, "differing bytes", wrong, flush=True)
    by = isolated.yardstick()
    facts = {"device": torch.cuda.get_device_name(), "commit": options.commit or isolated.commit()}
    facts |= {"copy_bytes_a_second": by.bandwidth, "torch": torch.__version__, "triton": triton.__version__}
    kernel, few = Kernel(nothing_kernel, (), 1), torch.zeros(16, dtype=torch.int64, device=isolated.DEVICE)
    nothing = partial(kernel, 1, few, few, 1)
    empty = {"microseconds": isolated.measure(nothing, by.flush) * 1e3, "graph_microseconds": graph_time(nothing)}
    facts |= {"empty": empty, "errors": errors, "differing_bytes": wrong}
    print(facts, flush=True)
    results = [result_of(job, by) for job in wanted]
    add_device_times(wanted, results, empty, nothing)
    facts |= {"copy_again": isolated.copy_bandwidth(by.flush)}
    options.out.write_text(json.dumps(facts | {"results": results}, indent=1) + "\n")
    return 1 if errors or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
