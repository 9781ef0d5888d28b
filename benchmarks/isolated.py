"""What the GPU benchmarks of single kernels share: operands, isolated and streaming launches, copies as yardsticks.

"microseconds": median of CUDA events around one launch, L2 overwritten before it, so launch, ramp and drain are in it; a copy
of as many bytes pays for them too ("share_of_equal_copy"). "streaming_microseconds": twelve launches in a row over three sets
of tensors, as in a busy stream. "share_of_copy" is against a copy of 2 GiB. Bytes: every input byte read once and every
output byte written once; a table that many tokens share (weights, cosines) is not counted.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvhal.formats import BUILTIN_FORMATS, KVCacheFormat
from kvhal.interface import Op
from kvhal.layout import alloc_kv_cache
from kvhal.ops.cache import new_load_output

DEVICE = "cuda"
NAMES = {layout: name for name, layout in BUILTIN_FORMATS.items()}
TOKENS, CHUNK, DECODE = 524_288, 8_192, 64
ROPE_DIM, MAX_POSITION = 64, 65_536


@dataclass(frozen=True)
class Operands:
    """Tensors of one call, by the names of kvhal.interface's launchers, and the bytes that it has to move."""

    tensors: dict[str, Any]
    bytes: int


@dataclass(frozen=True)
class Yardstick:
    """What launches are compared with.

    Attributes:
        flush: written before every isolated launch, larger than L2.
        bandwidth: bytes read and written a second by a copy of 2 GiB.
    """

    flush: torch.Tensor
    bandwidth: float


def yardstick() -> Yardstick:
    """Measured on the current device."""
    flush = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    return Yardstick(flush, copy_bandwidth(flush))


def measure(run: Callable[[], None], flush: torch.Tensor, repeats: int = 25) -> float:
    """Median milliseconds of a launch."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times)


def copy_bandwidth(flush: torch.Tensor) -> float:
    """Bytes read and written a second by a device-to-device copy of 2 GiB."""
    source = torch.randint(0, 2**31, (2**29,), dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure(lambda: target.copy_(source), flush) * 1e3


def equal_copy(count: int, flush: torch.Tensor) -> float:
    """Milliseconds of a device-to-device copy that moves `count` bytes."""
    source = torch.randint(0, 2**31, (max(1, count // 8),), dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    return measure(lambda: target.copy_(source), flush)


def stream(launches: list[Callable[[], None]], count: int = 12) -> float:
    """Median milliseconds a launch of `count` in a row, turning over independent sets of tensors."""
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(400_000)  # the host gets ahead of the device
        begin.record()
        for i in range(count):
            launches[i % len(launches)]()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / count)
    return statistics.median(times)


def slots_of(tokens: int, block_size: int, order: str) -> torch.Tensor:
    """int64 slots: consecutive, in shuffled pages, or shuffled one by one ("tokens")."""
    blocks = -(-tokens // block_size)
    every = torch.arange(blocks * block_size, device=DEVICE)
    if order == "tokens":
        return every[torch.randperm(every.numel(), device=DEVICE)][:tokens].contiguous()
    if order == "pages":
        every = every.view(blocks, block_size)[torch.randperm(blocks, device=DEVICE)].reshape(-1)
    return every[:tokens].contiguous()


def segments_of(tokens: int, block_size: int) -> torch.Tensor:
    """Whole blocks in shuffled order."""
    blocks = -(-tokens // block_size)
    rows = torch.zeros((blocks, 4), dtype=torch.int32)
    rows[:, 0], rows[:, 3] = torch.randperm(blocks), torch.arange(blocks) * block_size
    rows[:, 2] = torch.clamp(tokens - rows[:, 3], max=block_size)
    return rows.to(DEVICE)


def operands(op: Op, layout: KVCacheFormat, tokens: int, block_size: int = 64, order: str = "pages") -> Operands:
    """Random rows and shuffled places for one call."""
    cache = alloc_kv_cache(-(-tokens // block_size), block_size, layout, DEVICE)
    cache.view(torch.uint8).fill_(0x38)
    record, rows = tokens * layout.bytes_per_token, tokens * layout.elements * 2
    found: dict[str, Any] = {"cache": cache}
    if op == Op.LOAD:
        out, segments = new_load_output(layout, tokens, torch.device(DEVICE)), segments_of(tokens, block_size)
        found |= {"segments": segments, "total_k": tokens, "out": out.kv, "out_sf": out.sf}
        return Operands(found, record + segments.nbytes + out.kv.nbytes + (0 if out.sf is None else out.sf.nbytes))
    slots = slots_of(tokens, block_size, order)
    found["slots"] = slots
    if op == Op.LOAD_SLOTS:
        found["out"] = torch.empty((tokens, layout.elements), dtype=torch.bfloat16, device=DEVICE)
        return Operands(found, record + slots.nbytes + rows)
    found["kv"] = torch.randn((tokens, layout.elements), device=DEVICE, dtype=torch.bfloat16)
    if op == Op.STORE:
        return Operands(found, record + slots.nbytes + rows)
    found["weight"] = torch.randn(layout.elements, device=DEVICE, dtype=torch.bfloat16)
    found["table"] = torch.rand((MAX_POSITION, ROPE_DIM), device=DEVICE)
    found["positions"] = torch.arange(tokens, device=DEVICE) % CHUNK  # sequences of one prefill chunk each
    return Operands(found, record + slots.nbytes + found["positions"].nbytes + rows)


def timings(prepare: Callable[[], tuple[Callable[[], None], int]], by: Yardstick) -> dict[str, Any]:
    """The figures of one kernel at one size; `prepare` makes tensors, the launch on them, and its bytes."""
    launch, count = prepare()
    milliseconds = measure(launch, by.flush)
    streaming = stream([launch, prepare()[0], prepare()[0]])
    return {
        "bytes": count,
        "microseconds": round(milliseconds * 1e3, 2),
        "share_of_copy": round(count / milliseconds * 1e3 / by.bandwidth, 4),
        "share_of_equal_copy": round(equal_copy(count, by.flush) / milliseconds, 4),
        "streaming_microseconds": round(streaming * 1e3, 2),
        "streaming_share_of_copy": round(count / streaming * 1e3 / by.bandwidth, 4),
    }


def launcher_call(op: Op, launch: Callable[..., None], tensors: dict[str, Any], hadamard: bool) -> Callable[[], None]:
    """A call of a bound launcher (kvhal.interface, "Launchers") on operands."""
    from kvhal.interface import HadamardArgs, NormArgs, RopeArgs

    if op == Op.FUSED_STORE:
        norm = NormArgs(tensors["weight"], 1e-6)
        rope = RopeArgs(tensors["positions"], tensors["table"], ROPE_DIM)
        turned = HadamardArgs() if hadamard else None
        return partial(launch, tensors["kv"], norm, rope, turned, tensors["cache"], tensors["slots"], None)
    names = {
        Op.STORE: ("kv", "cache", "slots"),
        Op.LOAD: ("cache", "segments", "total_k", "out", "out_sf"),
        Op.LOAD_SLOTS: ("cache", "slots", "out"),
    }
    return partial(launch, *(tensors[name] for name in names[op]))


def commit() -> str:
    """The checkout's commit, empty outside of one."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()
