"""Ahead-of-time compilation of portable_triton for any target, without a device: real launchers, called on CPU tensors.

Runs in processes of its own, since Triton decides on its import whether it interprets: see `compile_all`.
"""

from __future__ import annotations

import os
import re
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

from tests.compile.resources import Code, Resources, measure, read_cubin

TARGETS: dict[str, tuple[str, str]] = {  #: architecture -> platform kind, Triton's backend
    "sm_80": ("cuda", "cuda"),
    "sm_90": ("cuda", "cuda"),
    "sm_100": ("cuda", "cuda"),
    "gfx942": ("rocm", "hip"),
    "gfx950": ("rocm", "hip"),
}
DEPENDENT = ("sm_90", "sm_100")  #: those on which a kernel may be launched before the one in front of it has ended
MEASURED = "sm_90"  #: its kernels are held to tests/compile/resources.json
PREFETCH = "prefetch.global.L2"


@dataclass(frozen=True)
class Job:
    """One operation's kernel for one architecture; `variant` names the fused stages, an alignment, or few tokens."""

    arch: str
    op: str
    format: str | None
    variant: str = ""

    @property
    def kernel(self) -> str:
        """Its name beside other kernels of the architecture."""
        return "-".join(part for part in (self.op, self.format, self.variant) if part)

    def __str__(self) -> str:
        return f"{self.arch}-{self.kernel}"


@dataclass(frozen=True)
class Built:
    """What came of a job: bytes of machine code, or the error; seconds it took; the code, for MEASURED."""

    job: Job
    size: int
    error: str
    seconds: float
    code: Code | None = None


def jobs(arch: str) -> list[Job]:
    """Every operation and built-in format, the fused store with each rotary style, and misaligned rows."""
    from kvhal.formats import BUILTIN_FORMATS
    from kvhal.interface import Op

    store, load, slots, fused = (str(op) for op in (Op.STORE, Op.LOAD, Op.LOAD_SLOTS, Op.FUSED_STORE))
    found = []
    for name in BUILTIN_FORMATS:
        found += [Job(arch, op, name) for op in (store, load, slots)]
        found += [Job(arch, fused, name, f"norm-rope{few}") for few in ("", "-few")]
        if BUILTIN_FORMATS[name].quantized_dtype is not None:
            few = (store, slots) if BUILTIN_FORMATS[name].is_index else (store, slots, load)
            found += [Job(arch, op, name, "few") for op in few]
        if arch == MEASURED and BUILTIN_FORMATS[name].is_index:  # the stages of indexer keys
            found += [Job(arch, fused, name, f"norm-rope-hadamard{few}") for few in ("", "-few")]
    for name in ("V41_FORMAT", "V41_FP4_FORMAT", "FP4_INDEX_KV_FORMAT"):
        found += [Job(arch, fused, name, "neox-hadamard-back")]
        found += [Job(arch, store, name, "misaligned"), Job(arch, slots, name, "misaligned")]
    names = ("convert_kv_index", "kv_index_cat", "expand_swa_index", "get_kv_swa_index_decode", "expand_load_plan")
    return found + [Job(arch, name, None) for name in names]


def compile_all(wanted: list[Job], processes: int = 2) -> list[Built]:
    """Compiles jobs in `processes` fresh processes in which Triton does not interpret."""
    before = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            return list(pool.map(build, wanted))
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def count_variants(arch: str) -> dict[str, dict[str, int]]:
    """Kernel variants that Triton would compile, by operation and format, counted by Triton's own rules.

    Returns:
        "sizes": over 200 token counts, cache sizes and table widths, with int32 and int64 slots.
        "alignments": the same with rows at every alignment.
        "missed": pairs of calls that Triton tells apart but the backend's own key does not (has to be none).
    """
    before = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(_count_variants, arch).result()
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def _count_variants(arch: str) -> dict[str, dict[str, int]]:
    from kvhal.backends.portable_triton.launch import Kernel
    from tests.triton.calls import sweep

    seen: dict[tuple[str, str], set[str]] = {}
    keys: dict[str, dict[object, set[str]]] = {}

    def record(kernel: Kernel, programs: int, *args: object) -> None:
        name, group = current
        variant = str(specialise(kernel, args, arch)[4]) + str(id(kernel))
        seen.setdefault((group, name), set()).add(variant)
        keys.setdefault(name, {}).setdefault((id(kernel), kernel.key(0, args)[0]), set()).add(variant)

    Kernel.__call__ = record  # type: ignore[method-assign]
    current = ("", "")
    for current, call_once in sweep(arch):  # noqa: B007  read by `record`
        call_once()
    found: dict[str, dict[str, int]] = {"sizes": {}, "alignments": {}}
    for (group, name), variants in seen.items():
        found[group][name] = len(variants)
    found["missed"] = {name: sum(len(variants) - 1 for variants in table.values()) for name, table in keys.items()}
    return found


def build(job: Job) -> Built:
    """Compiles one job in this process."""
    from kvhal.backends.portable_triton.launch import Kernel
    from tests.triton.calls import call

    built: list[int] = []
    taken: list[Code] = []

    def compile_only(kernel: Kernel, programs: int, *args: object) -> None:
        compiled = machine_code(kernel, args, job.arch)
        check_waits(compiled, job.arch)
        check_prefetches(compiled, job)
        built.append(len(compiled.kernel))
        if job.arch == MEASURED:
            taken.append(_code_of(compiled))

    began, launch = time.monotonic(), Kernel.__call__
    Kernel.__call__ = compile_only  # type: ignore[method-assign]
    try:
        call(job)
    except Exception as error:  # noqa: BLE001  any error of the compiler is the test's result
        return Built(job, 0, f"{type(error).__name__}: {str(error)[:300]}", time.monotonic() - began)
    finally:
        Kernel.__call__ = launch  # type: ignore[method-assign]
    seconds = time.monotonic() - began
    return Built(job, sum(built), "" if len(built) == 1 else f"{len(built)} kernels were launched", seconds, *taken[:1])


def check_waits(compiled: Any, arch: str) -> None:
    """A kernel that may be launched before those in front of it have ended waits for them before it touches memory.

    Raises:
        ValueError: it does not, or it waits where launches are never dependent.
    """
    ptx = compiled.asm.get("ptx", "")
    waits = [match.start() for match in re.finditer(r"griddepcontrol\.wait", ptx)]
    accesses = [match.start() for match in re.finditer(r"\b(?:ld|st|atom|red)\.(?:\w+\.)*global", ptx)]
    if arch in DEPENDENT:
        if not compiled.metadata.launch_pdl or len(waits) != 1 or not accesses or waits[0] > min(accesses):
            raise ValueError(f"waits at {waits} of the PTX, accesses begin at {min(accesses, default=None)}")
    elif waits or getattr(compiled.metadata, "launch_pdl", False):
        raise ValueError(f"waits at {waits}, needs none for {arch}")


def check_prefetches(compiled: Any, job: Job) -> None:
    """A program of a store that quantises, or of a fused store of few tokens, brings its rows to L2 before it waits: one
    instruction a thread.

    Raises:
        ValueError: it does not, or another kernel does, or one for an architecture where launches are never dependent.
    """
    brings = (job.op == "store_kv_cache" and job.format != "BF16_FORMAT") or (
        job.op.startswith("fused_") and job.variant.endswith("-few")
    )
    need = int(job.arch in DEPENDENT and brings)
    for stage, code in compiled.asm.items():
        have = code.count(PREFETCH) if isinstance(code, str) else need
        if have != need:
            raise ValueError(f"has {have} prefetches in its {stage}, needs {need}")
    ptx = compiled.asm.get("ptx", "")
    if ptx.find(PREFETCH) > ptx.find("griddepcontrol.wait"):
        raise ValueError("prefetches behind the wait")


def specialise(kernel: object, args: tuple[object, ...], arch: str) -> tuple[object, ...]:
    """(backend, options, bound arguments, specialisation) as Triton's own launch would find them for these arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    name = TARGETS[arch][1]
    target = GPUTarget(name, int(arch[3:]), 32) if name == "cuda" else GPUTarget(name, arch, 64)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.function.signature, kernel.function.params, backend)
    options = {**kernel.options, "debug": False, "instrumentation_mode": ""}
    bound, specialisation, options = binder(*args, *kernel.constants, **options)
    return target, backend, options, bound, specialisation


def versions() -> dict[str, str]:
    """The compilers that NVIDIA machine code comes from."""
    import triton

    return {"triton": version("triton"), "ptxas": triton.knobs.nvidia.ptxas.version}


def resources_of(built: list[Built]) -> dict[str, Resources]:
    """What the kernels of MEASURED take, by their name."""
    return measure({result.job.kernel: result.code for result in built if result.code is not None})


def _code_of(compiled: Any) -> Code:
    (code,) = read_cubin(compiled.kernel, 32 * compiled.metadata.num_warps, compiled.metadata.shared).values()
    return code


def machine_code(kernel: object, args: tuple[object, ...], arch: str) -> Any:
    """The kernel compiled for these arguments and this architecture."""
    import triton
    from triton.compiler import ASTSource

    target, backend, options, bound, specialisation = specialise(kernel, args, arch)
    function = kernel.function
    options, signature, constants, attributes = function._pack_args(backend, options, bound, specialisation, options)
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)
