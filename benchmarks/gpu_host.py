"""Host time of eager calls on a CUDA device: the public function against its built kernel called directly with ready arguments.

    python benchmarks/gpu_host.py [OUT.json]

Every operation at one token, for cuda_tilelang and portable_triton. The kernels run on the device as they are; a call is over
for the host when it is launched. Times are the least of many rounds of 100 calls, the device idle before each round: a busy
machine only adds. Rounds of all that is compared take turns. "kernel" is what the language itself gives: TileLang's host
function, or Triton's compiled kernel with addresses and strides as numbers; "allocation" is torch's for the output that a call
makes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_host import Call, index_calls, record_calls

import kvhal
from kvhal import config
from kvhal.bench.timing import Clock, environment
from kvhal.warm import side_by_side

ROUNDS, NUMBER = 40, 100
Direct = Callable[[], object]


def host_times(*calls: Callable[[], object]) -> list[float]:
    """Microseconds of each call."""
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for index, call in enumerate(calls):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(NUMBER):
                call()
            best[index] = min(best[index], (time.perf_counter() - begin) / NUMBER * 1e6)
    torch.cuda.synchronize()
    return best


def tilelang_kernels(calls: list[Call]) -> list[Direct]:
    """The host function behind each call, with the arguments that it got."""
    from kvhal.backends.cuda_tilelang import build

    seen: list[Direct] = []

    def recorder(run: Callable[..., object]) -> Callable[..., None]:
        def record(*arguments: Any) -> None:
            seen.append(lambda: run(*arguments))

        return record

    built = dict(build._kernels)
    build._kernels.update({key: recorder(run) for key, run in built.items()})
    config.forget()  # launchers keep their kernels
    for call in calls:
        call.public()
    build._kernels.update(built)
    config.forget()
    return seen


def triton_kernels(calls: list[Call]) -> list[Direct]:
    """The compiled kernel behind each call, with the numbers that it got."""
    from kvhal.backends.portable_triton import launch

    seen: list[Direct] = []
    device, original = torch.cuda.current_device(), launch.Kernel.__call__
    stream = torch.cuda.current_stream().cuda_stream

    def record(kernel: Any, programs: int, *args: Any) -> None:
        built, numbers = kernel.built(device, args)
        head = (programs, 1, 1, stream, built.function, built.packed_metadata, None, None, None)
        seen.append(lambda: (args, built.run(*head, *numbers, *kernel.constants)))  # args: their memory stays

    launch.Kernel.__call__ = record  # type: ignore[method-assign]
    config.forget()  # calls that are alike do not come here
    for call in calls:
        call.public()
    launch.Kernel.__call__ = original  # type: ignore[method-assign]
    return seen


def measure(backend: str) -> list[dict[str, Any]]:
    """A row an operation."""
    with kvhal.use_backend(backend):
        calls = [*record_calls("cuda", 1), *index_calls("cuda")]
        side_by_side([call.public for call in calls])
        kernels = (tilelang_kernels if backend == "cuda_tilelang" else triton_kernels)(calls)
        rows = torch.zeros((1, 512), dtype=torch.bfloat16, device="cuda")
        found = []
        for call, direct in zip(calls, kernels, strict=True):
            kernel, public, add, allocation = host_times(
                direct, call.public, lambda: rows.add_(1), lambda: torch.empty_like(rows)
            )
            allocation = allocation if call.name.endswith("new") else 0.0
            row = {"backend": backend, "op": call.name, "public": public, "kernel": kernel, "allocation": allocation}
            found.append(row | {"add_": add, "ratio": public / kernel, "difference": public - kernel - allocation})
        return found


def main() -> None:
    """Prints a line an operation and backend; a file gets the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    options = parser.parse_args()
    results: dict[str, Any] = environment(Clock(torch.device("cuda", 0)))
    results["microseconds"] = [row for backend in ("cuda_tilelang", "portable_triton") for row in measure(backend)]
    print(f"{'microseconds a call':45}{'public':>9}{'kernel':>9}{'ratio':>8}{'alloc':>8}{'more':>8}{'add_':>8}")
    for row in results["microseconds"]:
        name = f"{row['backend']} {row['op']}"
        numbers = f"{row['public']:9.2f}{row['kernel']:9.2f}{row['ratio']:8.2f}{row['allocation']:8.2f}"
        print(f"{name:45}{numbers}{row['difference']:8.2f}{row['add_']:8.2f}")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
