"""One case of every kernel under compute-sanitizer's memcheck, racecheck and initcheck.

    python benchmarks/gpu_sanitize.py OUT.json [--backends cuda_tilelang,portable_triton]

Cases are the conformance suite's: the second one of each operation and format, whose metadata is hostile or unaligned, and the
fused store with every stage; and those again through the kernels for many tokens. Their bytes are compared too. Memory comes
straight from the driver, so that an access beside a tensor is an access beside an allocation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import torch

from kvhal.bench.timing import Clock, environment
from kvhal.errors import UnsupportedError
from kvhal.formats import BUILTIN_FORMATS
from kvhal.interface import FORMAT_OPS, Op
from kvhal.testing import Case, cases, run_case
from tests.gpu.small_calls import OPS, no_call_is_small

TOOLS = ("memcheck", "racecheck", "initcheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def chosen() -> Iterator[Case]:
    """See the module's text."""
    for op in Op:
        for layout in BUILTIN_FORMATS.values() if op in FORMAT_OPS else (None,):
            found = cases(op, layout)
            yield found[1]
            if op == Op.FUSED_STORE:
                yield from (case for case in found if re.search(r"-all-b\d+$", case.id))


def run_cases(backend: str) -> None:
    """The program under the sanitizer: prints how many cases ran.

    Raises:
        KvhalError: bytes differ.
    """
    many = [case for case in chosen() if case.op in OPS[backend]]
    count = 0
    for kernels, wanted in ((nullcontext(), chosen()), (no_call_is_small(backend), many)):
        with kernels:
            for case in wanted:
                try:
                    run_case(backend, case, "cuda").check()
                except UnsupportedError as error:
                    print(f"refused: {error}")
                    continue
                count += 1
    torch.cuda.synchronize()
    print(f"cases: {count}")


def sanitize(tool: str, backend: str) -> dict[str, object]:
    """What one tool found: its own count of problems, -1 when it did not come to an end."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [program, "--tool", tool, sys.executable, __file__, "-", "--inside", backend]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    )
    summary, count = SUMMARY.findall(done.stdout), re.search(r"cases: (\d+)", done.stdout)
    found = {"problems": int(summary[-1]) if summary else -1, "cases": int(count[1]) if count else 0}
    if found["problems"] or not found["cases"]:
        print(done.stdout[-4000:], done.stderr[-2000:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--backends", default="cuda_tilelang,portable_triton")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        run_cases(options.inside)
        return
    names = options.backends.split(",")
    with ThreadPoolExecutor() as pool:  # each waits for its own process
        found = list(pool.map(sanitize, *zip(*product(TOOLS, names), strict=True)))
    results = {name: dict(zip(TOOLS, found[at :: len(names)], strict=True)) for at, name in enumerate(names)}
    facts = environment(Clock(torch.device("cuda", 0)))
    options.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
