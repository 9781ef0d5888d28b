"""Kernels: described by a factory, compiled once a key by TileLang (which also keeps them on disk), called without detours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import tilelang
import tilelang.language as T
import torch
from tilelang import tvm

from kvhal.errors import CaptureError
from kvhal.interface import Launcher
from kvhal.layout import CacheGeometry
from kvhal.operands import as_they_are
from kvhal.platform import Platform, is_capturing
from kvhal.tuning import MULTIPROCESSORS

Kernel = Callable[..., int | None]

#: Accesses are guarded by hand, on values that the host cannot vouch for; TileLang's own guards would come on top.
#: -fmad=false: products round before sums, as the numeric specification says.
PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_warp_specialized": True,
    "tl.device_compile_flags": ["-fmad=false"],
}

SLOT_DTYPES = {torch.int32: "int32", torch.int64: "int64"}
ROW_ALIGNMENT = 16  #: bytes; a row on such an address is read and written in single accesses
INT32_MAX = 2**31 - 1
BF16_BYTES = 2  #: what any bf16 row is aligned to

#: Kernels wait for those in front of them (T.pdl_sync) before they read anything. Grids of at most so many thread blocks let
#: the next kernel start before they wait themselves: on an H200 that saves 0.1 us a launch, but slows the start of thread
#: blocks from 0.8 ns each to 1.2 ns, which larger grids of short ones would pay for.
FEW_BLOCKS = 1056

_kernels: dict[Hashable, Kernel] = {}
_building: dict[Hashable, threading.Lock] = {}
_guard = threading.Lock()


def kernel(factory: Callable[..., Any], *arguments: Hashable, platform: Platform, device: torch.device) -> Kernel:
    """The compiled ``factory(*arguments)``, built on first use; threads may build different kernels at once.

    Raises:
        CaptureError: it would have to be built while a graph is being captured.
    """
    key = (factory, arguments, platform.arch)
    built = _kernels.get(key)
    if built is not None:
        return built
    if is_capturing(device):
        raise CaptureError(
            f"{factory.__name__}{arguments} is not built yet; call kvhal.warmup, or the operation once, before capture"
        )
    with _guard:
        lock = _building.setdefault(key, threading.Lock())
    with lock:
        if key not in _kernels:
            _kernels[key] = _callable(
                tilelang.compile(factory(*arguments), target=target(platform.arch), pass_configs=PASS_CONFIGS)
            )
    return _kernels[key]


def target(arch: str) -> tvm.target.Target:
    """TileLang's target of a compute capability such as "sm_90"."""
    return tvm.target.Target({"kind": "cuda", "arch": "sm_90a" if arch == "sm_90" else arch})


def _callable(compiled: Any) -> Kernel:
    """The host function of a compiled kernel itself: TileLang's wrapper around it costs microseconds a call."""
    executable = compiled.adapter.get_exportable_executable()
    module = executable.jit() if hasattr(executable, "jit") else executable
    function: Kernel = module["main"]
    return function


def launcher(
    prepare: Callable[..., Kernel], operands: Callable[..., tuple[Any, ...]] = as_they_are, *, checks: bool = False
) -> Launcher:
    """A launcher that runs what `prepare` returns for its arguments, and lets its caller keep that ("Launchers" in
    `kvhal.interface`).

    Args:
        prepare: from the launcher's arguments to a kernel.
        operands: from the launcher's arguments to what the kernel is run with.
        checks: the kernels `launch_only_if` they are meant (host.py).
    """

    def launch(*arguments: Any) -> None:
        if prepare(*arguments)(*operands(*arguments)) is not None:
            raise RuntimeError(
                "a kernel of cuda_tilelang refused what it was built for; nothing was launched. Please report it"
            )

    launch.prepare, launch.checks = prepare, checks
    return launch


def aligned(tensor: torch.Tensor) -> bool:
    """Every row of a 2-d tensor starts on a multiple of ROW_ALIGNMENT bytes, or rows lie one behind the other from there on."""
    if tensor.data_ptr() % ROW_ALIGNMENT:
        return False
    return tensor.is_contiguous() or tensor.stride(0) * tensor.element_size() % ROW_ALIGNMENT == 0


def cache_argument(geometry: CacheGeometry, blocks: Any, stride: Any) -> Any:
    """The cache parameter of a kernel; ``[b, 0, 0, i]`` is byte (bf16 record: element) i of block b.

    Args:
        geometry: its static facts.
        blocks, stride: symbols for the number of blocks and the elements from one to the next, 64 bits wide.
    """
    layout, block_size = geometry.layout, geometry.block_size
    unquantized = layout.quantized_dtype is None
    width = layout.elements if unquantized else layout.bytes_per_token
    token_stride = width if block_size > 1 else T.dynamic("token_stride", "int64")  # torch leaves that of one token open
    shape, strides = (blocks, block_size, 1, width), (stride, token_stride, width, 1)
    return T.StridedTensor(shape, strides, "bfloat16" if unquantized else "uint8")


def evenly(blocks: Any, few: int) -> Any:
    """Of a grid of `blocks` thread blocks that lets the next kernel start early: as many for each multiprocessor. Thread blocks
    of later kernels, which wait, would else take up places unevenly, and some multiprocessors get two of a kernel's before
    others get one. Those that are too many find nothing to do."""
    return T.if_then_else(blocks <= few, T.ceildiv(blocks, MULTIPROCESSORS) * MULTIPROCESSORS, blocks)


@T.macro
def await_producers(blocks, few=FEW_BLOCKS):
    """Of a grid of so many thread blocks, see FEW_BLOCKS."""
    if blocks <= few:
        T.pdl_trigger()
    T.pdl_sync()


@T.macro
def await_slots(slots, index, blocks):
    """As `await_producers`; meanwhile the thread's first slot is brought to L2."""
    if blocks <= FEW_BLOCKS:
        T.pdl_trigger()
        call("kv::prefetch", T.address_of(slots[index]))
    T.pdl_sync()


def call(function: str, *arguments: Any) -> Any:
    """A call of a device function of the kernel's prelude, as a statement."""
    return T.call_extern("handle", function, *arguments)
