"""Timing: device time by events around replayed graphs, host time of eager calls, and a copy as the yardstick."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kvhal.bench.work import Work, make_work
from kvhal.config import use_backend
from kvhal.formats import KVCacheFormat, format_to_text
from kvhal.interface import Op
from kvhal.platform import LANGUAGES, capture, detect
from kvhal.version import __version__

REFERENCE = "reference_torch"
ROTATION_BYTES = 1 << 28  #: buffers rotated through add up to this, several times any L2
MAX_ROTATION = 32
#: A graph has as many calls as move so many bytes, but so many at least and at most, so that gaps between graphs hardly count
STREAM_BYTES, STREAM = 1 << 33, (16, 128)
REPEATS = 21
COPY_BYTES = tuple(16 << 2 * n for n in range(12))  #: 16 B to 64 MiB
CPU_SECONDS = 0.5  #: time spent on one cell on a CPU
HOST_CALLS = 300
HOST_TOKENS = 64  #: host time is measured where the device cannot be the bottleneck


@dataclass(frozen=True)
class Result:
    """One measured cell.

    Attributes:
        backend, op, format, tokens, block_size, pattern: the cell; format is "-" for index operations.
        bytes: what must move.
        median_us: device time of a call in a stream of such calls, in microseconds (CPU: wall time of a call).
        gbs: bytes over that time, GB/s.
        ratio: gbs over the copy bandwidth of the same run.
        alone_us: device time of one call alone, L2 overwritten before it: launch, ramp and drain count, and what the call
            leaves in L2 to be written later does not; None on a CPU.
        alone_ratio: as `ratio`, for `alone_us`.
        host_us: host time of an eager call in microseconds, None where it was not measured.
        simulated: never to be read as a statement about hardware.
    """

    backend: str
    op: str
    format: str
    tokens: int
    block_size: int
    pattern: str
    bytes: int
    median_us: float
    gbs: float
    ratio: float
    alone_us: float | None
    alone_ratio: float | None
    host_us: float | None
    simulated: bool = False


class WrongBytes(Exception):
    """The backend's result differs from the reference's: its time means nothing."""


class Clock:
    """Measures on one device.

    Attributes:
        copy_gbs: bytes read plus bytes written by a large copy, GB/s.
        empty_us: device time of the smallest kernel there is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = 1 << (24 if device.type == "cpu" else 30)
        source, target = (torch.randint(0, 255, (size,), dtype=torch.uint8, device=device) for _ in range(2))
        # launched one by one: inside a captured graph a copy becomes another, slower operation of the driver
        self.copy_gbs = 2 * size / self._time(lambda: target.copy_(source), replay=False) / 1e3
        self.trash = source[: ROTATION_BYTES if device.type != "cpu" else 0]
        one = torch.zeros(1, device=device)
        self.empty_us = self.median_us([lambda: one.add_(1)], 1)

    def median_us(self, calls: list[Callable[[], Any]], moved: int) -> float:
        """Microseconds of one call, the median of many rounds over all of `calls`, on a device many in a row.

        Args:
            calls: equal ones on buffers of their own.
            moved: bytes that each of them moves.
        """
        least, most = STREAM
        count = min(most, max(least, STREAM_BYTES // max(1, moved)))
        rounds = 1 if self.device.type == "cpu" else -(-count // len(calls))

        def run() -> None:
            for call in calls * rounds:
                call()

        return self.run_us(run) / len(calls) / rounds

    def run_us(self, run: Callable[[], Any]) -> float:
        """Microseconds of all that `run` launches, median; on a CUDA device as one replayed graph."""
        return self._time(run, replay=True)

    def copies(self) -> list[dict[str, float]]:
        """What the least kernel that reads and writes COPY_BYTES takes in a stream: rows of "bytes" (each way) and "us".

        It negates bits: what torch does for a copy is another, slower operation in a graph. Empty on a CPU.
        """
        found: list[dict[str, float]] = []
        for size in COPY_BYTES if self.device.type != "cpu" else ():
            count = max(1, min(MAX_ROTATION, ROTATION_BYTES // (2 * size)))
            sources = torch.randint(0, 1 << 31, (count, size // 4), dtype=torch.int32, device=self.device)
            targets = torch.empty_like(sources)
            calls: list[Callable[[], Any]] = [partial(torch.bitwise_not, sources[n], out=targets[n]) for n in range(count)]
            found.append({"bytes": size, "us": self.median_us(calls, 2 * size)})
        return found

    def alone_us(self, call: Callable[[], Any]) -> float | None:
        """Microseconds of a call after L2 was overwritten, median; None on a CPU."""
        if self.device.type == "cpu":
            return None
        times = []
        for _ in range(REPEATS):
            self.trash.zero_()
            begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            times.append((begin, end))
        torch.accelerator.synchronize(self.device)
        return statistics.median(begin.elapsed_time(end) for begin, end in times) * 1e3

    def _time(self, run: Callable[[], Any], *, replay: bool) -> float:
        run()
        if self.device.type == "cpu":
            return self._wall(run)
        return self._events(capture(run, self.device) if replay else run)

    def _wall(self, run: Callable[[], Any]) -> float:
        times: list[float] = []
        deadline = time.perf_counter() + CPU_SECONDS
        while not times or (time.perf_counter() < deadline and len(times) < REPEATS):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return statistics.median(times) * 1e6

    def _events(self, run: Callable[[], Any]) -> float:
        for _ in range(3):
            run()
        marks = [torch.Event(self.device, enable_timing=True) for _ in range(REPEATS + 1)]
        for mark in marks[:-1]:
            mark.record()
            run()
        marks[-1].record()
        torch.accelerator.synchronize(self.device)
        return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) * 1e3

    def host_us(self, call: Callable[[], Any]) -> float:
        """Host microseconds of an eager call, the best of several series: anything above it is other work."""
        best = float("inf")
        for _ in range(5):
            self._synchronize()
            begin = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            best = min(best, (time.perf_counter() - begin) / HOST_CALLS)
            self._synchronize()
        return best * 1e6

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def measure(
    clock: Clock,
    backend: str,
    op: Op,
    layout: KVCacheFormat | None,
    tokens: int,
    block_size: int = 64,
    pattern: str = "consecutive",
    simulate: bool = False,
) -> Result:
    """Checks one cell's bytes against the reference, then times it.

    Raises:
        ForcedBackendError: the backend cannot serve it.
        WrongBytes: it served other bytes than the reference.
    """
    with use_backend(backend, simulate=simulate):
        first = make_work(op, layout, tokens, block_size, pattern, clock.device, 0)
        verify(first, make_work(op, layout, tokens, block_size, pattern, clock.device, 0), backend)
        count = 1 if clock.device.type == "cpu" else min(MAX_ROTATION, max(1, ROTATION_BYTES // first.bytes))
        works = [first] + [make_work(op, layout, tokens, block_size, pattern, clock.device, n) for n in range(1, count)]
        median = clock.median_us([work.call for work in works], first.bytes)
        alone = clock.alone_us(first.call)
        host = clock.host_us(first.call) if tokens <= HOST_TOKENS and clock.device.type != "cpu" else None
    gbs = first.bytes / median / 1e3
    name = "-" if layout is None else format_to_text(layout)
    cell = (backend, str(op), name, tokens, block_size, pattern, first.bytes, median, gbs, gbs / clock.copy_gbs)
    alone_ratio = None if alone is None else first.bytes / alone / 1e3 / clock.copy_gbs
    return Result(*cell, alone, alone_ratio, host, simulate)


def verify(work: Work, expected: Work, backend: str) -> None:
    """Makes both calls, `expected` on the reference, on poisoned outputs, and compares all that they write.

    Raises:
        WrongBytes: a byte differs.
    """
    for tensors in (work.written, expected.written):
        for tensor in tensors:
            if tensor.dtype != torch.int32:  # index tables are written in place or in full: poison would be another input
                tensor.view(torch.uint8).fill_(0xA5)
    work.call()
    with use_backend(REFERENCE):
        expected.call()
    for have, need in zip(work.written, expected.written, strict=True):
        wrong = int((have.view(torch.uint8) != need.view(torch.uint8)).sum())
        if wrong:
            raise WrongBytes(f"{backend}: {wrong} bytes differ from {REFERENCE}'s; `kvhal parity` shows where")


def environment(clock: Clock) -> dict[str, Any]:
    """What a figure depends on: device, versions, commit, the yardsticks of the run."""
    platform = detect(clock.device)
    return {
        "device": platform.device_name,
        "arch": platform.arch,
        "kvhal": __version__,
        "python": sys.version.split()[0],
        "versions": {name: platform.module(name).version for name in LANGUAGES if platform.module(name).version},
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "copy_gbs": clock.copy_gbs,
        "empty_us": clock.empty_us,
    }


def _commit() -> str | None:
    """The commit of a checkout, with a "+" where files differ from it; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty=+"]
        head = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip()
