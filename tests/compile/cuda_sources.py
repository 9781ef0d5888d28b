"""cuda_tilelang's kernels lowered without a GPU, and compiled many at a time: nvcc reads TileLang's headers once."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tilelang
from tilelang import tvm
from tilelang.engine.lower import lower

from kvhal.backends.cuda_tilelang.build import PASS_CONFIGS, target

ARCH = "sm_90"


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
    """What nvcc made of some kernels: its PTX of each by name, and ptxas's report."""

    ptx: dict[str, str]
    report: str


def compile_sources(sources: Mapping[str, str], folder: Path) -> Compiled:
    """A cubin of all sources for sm_90a.

    Args:
        sources: name (an identifier) -> source from `source_of`.
        folder: where to work.
    """
    unit = folder / "kernels.cu"
    unit.write_text("\n".join(_renamed(name, text) for name, text in sources.items()))
    root = Path(tilelang.__file__).parent
    command = ["nvcc", "--cubin", "-O3", "-std=c++20", "-gencode", "arch=compute_90a,code=sm_90a", "-w", "-Xptxas", "-v"]
    command += [f"-I{root / 'src'}", f"-I{root / '3rdparty' / 'cutlass' / 'include'}", *PASS_CONFIGS["tl.device_compile_flags"]]
    command += ["--keep", "--keep-dir", str(folder), "-o", str(folder / "kernels.cubin"), str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    ptx = next(folder.glob("*.ptx")).read_text()
    parts = re.split(r"(?=\.entry )", ptx)[1:]
    return Compiled({re.match(r"\.entry (\w+)_kernel", part).group(1): part for part in parts}, done.stderr)  # type: ignore[union-attr]


def _renamed(name: str, text: str) -> str:
    kernel = re.search(r"void (?:__launch_bounds__\([^)]*\) )?(\w+)_kernel\(", text)
    if kernel is None:
        raise ValueError(f"{name}: no kernel in the generated source")
    text = re.sub(rf"\b{kernel.group(1)}_kernel\b", f"{name}_kernel", text)
    return re.sub(r"\bkv\b(?=::| \{)", f"kv_{name}", text)
