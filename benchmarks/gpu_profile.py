"""What bounds each kernel: the hardware's counters, read by Nsight Compute, for every backend, operation and format.

    python benchmarks/gpu_profile.py OUT.json [--backends cuda_tilelang,portable_triton] [--tokens 524288,8192,64]

Every cell is one public call on `kvhal.bench`'s random data, made once before it is profiled. Clocks are left alone and caches
are emptied before each pass. "bound" is the busiest of DRAM, L2 and instruction issue where that one is busy for more than 60%
of the time, else "latency"; a kernel within three times an empty one's duration is bound by "launch".
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

import kvhal
from kvhal.bench.timing import Clock, environment
from kvhal.bench.work import make_work
from kvhal.formats import BUILTIN_FORMATS
from kvhal.interface import FORMAT_OPS, Op

#: name in the result -> Nsight Compute's metric
METRICS = {
    "nanoseconds": "gpu__time_duration.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_written_bytes": "dram__bytes_write.sum",
    "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1_percent": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "alu_percent": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "fma_percent": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "xu_percent": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "lsu_percent": "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "warp_instructions": "smsp__inst_executed.sum",
    "registers": "launch__registers_per_thread",
    "block_threads": "launch__block_size",
    "thread_blocks": "launch__grid_size",
}
BUSY = 60.0  #: percent
UNITS = {"dram_percent": "DRAM", "l2_percent": "L2", "issue_percent": "instruction issue"}


def cells(backends: list[str], tokens: list[int]) -> list[dict[str, Any]]:
    """Every cell that is profiled, in order: all formats, pages shuffled, and the two other orders for one store and load."""
    found = []
    for backend, count, op in product(backends, tokens, Op):
        formats = BUILTIN_FORMATS if op in FORMAT_OPS else {"-": None}
        for name in formats:
            orders = ("consecutive", "pages", "random") if (op, name) == (Op.STORE, "V41_FORMAT") else ("pages",)
            found += [
                {"backend": backend, "op": str(op), "format": name, "tokens": count, "pattern": order} for order in orders
            ]
    return found


def run_cells(wanted: list[dict[str, Any]]) -> None:
    """The program that is profiled."""
    device, runtime = torch.device("cuda", 0), torch.cuda.cudart()
    for cell in wanted:
        layout = BUILTIN_FORMATS.get(cell["format"])
        work = make_work(Op(cell["op"]), layout, cell["tokens"], 64, cell["pattern"], device, 0)
        with kvhal.use_backend(cell["backend"]):
            work.call()
            torch.cuda.synchronize()
            runtime.cudaProfilerStart()
            work.call()
            torch.cuda.synchronize()
            runtime.cudaProfilerStop()
        del work
        torch.cuda.empty_cache()


def profile(wanted: list[dict[str, Any]], options: list[str]) -> list[dict[str, Any]]:
    """The cells with their counters.

    Raises:
        RuntimeError: there is no `ncu`, it failed, or a call launched more or fewer kernels than one.
    """
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--metrics", ",".join(METRICS.values()), sys.executable, __file__, "--inside", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    start = done.stdout.find('"ID"')
    if done.returncode or start < 0:
        raise RuntimeError(f"ncu: exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    rows = [row for row in csv.DictReader(io.StringIO(done.stdout[start:])) if row["ID"].isdigit()]
    if len(rows) != len(wanted):
        raise RuntimeError(f"ncu: saw {len(rows)} kernels in {len(wanted)} calls")
    numbers = [{name: float(row[metric].replace(",", "")) for name, metric in METRICS.items()} for row in rows]
    return [{**cell, "kernel": row["Kernel Name"][:60], **n} for cell, row, n in zip(wanted, rows, numbers, strict=True)]


def bound_of(cell: dict[str, Any], empty_nanoseconds: float) -> str:
    """See the module's text."""
    if cell["nanoseconds"] < 3 * empty_nanoseconds:
        return "launch"
    busiest = max(UNITS, key=lambda name: cell[name])
    return UNITS[busiest] if cell[busiest] > BUSY else "latency"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--backends", default="cuda_tilelang,portable_triton")
    parser.add_argument("--tokens", default="524288,8192,64")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    wanted = cells(options.backends.split(","), [int(count) for count in options.tokens.split(",")])
    if options.inside:
        run_cells(wanted)
        return
    clock = Clock(torch.device("cuda", 0))
    found = profile(wanted, ["-", "--backends", options.backends, "--tokens", options.tokens])
    empty = 1e3 * clock.empty_us
    found = [{**cell, "bound": bound_of(cell, empty)} for cell in found]
    options.out.write_text(json.dumps({**environment(clock), "kernels": found}, indent=1) + "\n")
    for cell in found:
        shares = " ".join(f"{name.removesuffix('_percent')} {cell[name]:.0f}" for name in METRICS if name.endswith("_percent"))
        name = f"{cell['backend']} {cell['op']} {cell['format']} {cell['tokens']} {cell['pattern']}"
        print(f"{name}: {cell['nanoseconds'] / 1e3:.1f} us, {shares}, {cell['registers']:.0f} registers: {cell['bound']}")


if __name__ == "__main__":
    main()
