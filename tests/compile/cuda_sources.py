"""cuda_tilelang's kernels lowered without a GPU, and compiled many at a time: nvcc reads TileLang's headers once."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tilelang
from tilelang import tvm
from tilelang.engine.lower import lower

from kvhal.backends.cuda_tilelang.build import PASS_CONFIGS, target
from tests.compile.resources import Resources, measure, read_cubin

ARCH = "sm_90"
NVCC = ("nvcc", "--cubin", "-gencode", "arch=compute_90a,code=sm_90a")


@cache
def source_of(factory: Any, *arguments: Any) -> str:
    """The CUDA source that TileLang generates for ``factory(*arguments)``."""
    goal = target(ARCH)
    with tvm.transform.PassContext(opt_level=3, config=PASS_CONFIGS), goal:
        return str(
            lower(factory(*arguments), target=goal, enable_host_codegen=False, enable_device_compile=False).kernel_source
        )


@dataclass(frozen=True)
class Compiled:
    """What nvcc made of some kernels: its PTX of each by name, ptxas's report, what each one's machine code takes."""

    ptx: dict[str, str]
    report: str
    resources: dict[str, Resources]
    threads: dict[str, int]


def compile_group(jobs: Mapping[str, tuple[Any, ...]], folder: Path) -> tuple[dict[str, str], Compiled]:
    """The sources of some kernels by name, and what nvcc made of them."""
    sources = {name: source_of(*job) for name, job in jobs.items()}
    return sources, compile_sources(sources, folder)


def versions() -> dict[str, str]:
    """The compilers that machine code comes from."""
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release \S+, V(\S+)", said)
    return {"nvcc": found[1] if found else said, "tilelang": version("tilelang")}


def compile_sources(sources: Mapping[str, str], folder: Path) -> Compiled:
    """A cubin of all sources for sm_90a.

    Args:
        sources: name (an identifier) -> source from `source_of`.
        folder: where to work.
    """
    unit = folder / "kernels.cu"
    unit.write_text("\n".join(_renamed(name, text) for name, text in sources.items()))
    root = Path(tilelang.__file__).parent
    command = [*NVCC, "-O3", "-std=c++20", "-w", "-Xptxas", "-v"]
    command += [f"-I{root / 'src'}", f"-I{root / '3rdparty' / 'cutlass' / 'include'}", *PASS_CONFIGS["tl.device_compile_flags"]]
    command += ["--keep", "--keep-dir", str(folder), "-o", str(folder / "kernels.cubin"), str(unit)]
    report = _run(command, folder)
    ptx = next(folder.glob("*.ptx")).read_text()
    parts = re.split(r"(?=\.entry )", ptx)[1:]
    by_name = {re.match(r"\.entry (\w+)_kernel", part).group(1): part for part in parts}  # type: ignore[union-attr]
    threads = {name: int(re.search(r"\.maxntid (\d+)", part).group(1)) for name, part in by_name.items()}  # type: ignore[union-attr]
    return Compiled(by_name, report, _resources(folder / "kernels.cubin", threads), threads)


def limit_registers(compiled: Compiled, registers: int, folder: Path) -> dict[str, Resources]:
    """The same kernels with so few registers a thread that some spill. `folder` is that of `compile_sources`."""
    text = next(folder.glob("*.ptx")).read_text()
    limited = folder / "limited.ptx"
    limited.write_text(re.sub(r"\.minnctapersm \d+", f".maxnreg {registers}", text))
    _run([*NVCC, "-o", str(folder / "limited.cubin"), str(limited)], folder)
    return _resources(folder / "limited.cubin", compiled.threads)


def _run(command: list[str], folder: Path) -> str:
    """What a compiler says on stderr."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return done.stderr


def _resources(cubin: Path, threads: Mapping[str, int]) -> dict[str, Resources]:
    found = measure(read_cubin(cubin.read_bytes(), {f"{name}_kernel": count for name, count in threads.items()}))
    return {name.removesuffix("_kernel"): row for name, row in found.items()}


def _renamed(name: str, text: str) -> str:
    kernel = re.search(r"void (?:__launch_bounds__\([^)]*\) )?(\w+)_kernel\(", text)
    if kernel is None:
        raise ValueError(f"{name}: no kernel in the generated source")
    text = re.sub(rf"\b{kernel.group(1)}_kernel\b", f"{name}_kernel", text)
    return re.sub(r"\bkv\b(?=::| \{)", f"kv_{name}", text)
