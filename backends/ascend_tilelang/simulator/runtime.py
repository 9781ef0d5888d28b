"""The stand-in for libascendcl: loading it into this process, and running one launch through it."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch

from . import toolchain
from .arguments import extents_of
from .errors import SimulatorFault, SimulatorUnavailable

_ORDERS = {"forward": 0, "reverse": 1, "shuffle": 2}
_order: ContextVar[tuple[int, int]] = ContextVar("ascend_simulator_order", default=(0, 0))
# The runtime library simulates one core and holds one launch.
_launching = threading.Lock()
_loaded = threading.Event()


@contextmanager
def schedule(order: str, seed: int = 0) -> Iterator[None]:
    """Runs simulated kernels inside the context with blocks and threads in another order.

    Args:
        order: "forward", "reverse" or "shuffle".
        seed: selects one of the shuffles.

    Raises:
        ValueError: for another order.
    """
    if order not in _ORDERS:
        raise ValueError(f"order is {order!r}, must be one of {', '.join(_ORDERS)}")
    token = _order.set((_ORDERS[order], seed & 0xFFFFFFFF))
    try:
        yield
    finally:
        _order.reset(token)


def loaded() -> bool:
    """Whether this process simulates. It can then no longer run kernels on a real Ascend device."""
    return _loaded.is_set()


def _other_library() -> str | None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if path.endswith("libascendcl.so"):
            return path
    return None


@functools.cache
def library() -> ctypes.CDLL:
    """The runtime library, built and loaded on first use.

    Raises:
        SimulatorUnavailable: no compiler, not Linux, or the process already uses a real libascendcl.
    """
    if not Path("/proc/self/maps").exists():
        raise SimulatorUnavailable("the Ascend simulator runs on Linux only")
    other = _other_library()
    if other is not None:
        raise SimulatorUnavailable(
            f"this process has loaded {other}; simulate in a process of its own, started with TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        )
    directory = toolchain.published(toolchain.key_of("runtime"), toolchain.compile_runtime)
    # RTLD_LOCAL: TileLang finds the library by its soname, and nothing else in the process gets to see its symbols.
    lib = ctypes.CDLL(str(directory / "libascendcl.so"), mode=ctypes.RTLD_LOCAL)
    lib.kvsim_announce.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    lib.kvsim_announce.restype = None
    lib.kvsim_prepare.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_uint32)
    lib.kvsim_prepare.restype = None
    lib.kvsim_fault.argtypes = (
        ctypes.POINTER(ctypes.c_int64),
        ctypes.POINTER(ctypes.c_uint32),
        ctypes.c_char_p,
        ctypes.c_uint64,
    )
    lib.kvsim_fault.restype = ctypes.c_int32
    _loaded.set()
    return lib


def announce(key: str, path: Path) -> None:
    """Tells the runtime where the kernel of a marker lies."""
    with _launching:
        library().kvsim_announce(key.encode(), str(path).encode())


def launch(kernel: str, names: Sequence[str], tensors: Sequence[torch.Tensor], call: Callable[[], object]) -> None:
    """Runs `call`, which launches `kernel` once, with the tensors' bytes as the only legal ones.

    Raises:
        SimulatorFault: the kernel left those bytes, diverged at a barrier, divided by zero, ...
        RuntimeError: TileLang's own refusal of the arguments.
    """
    lib = library()
    table = extents_of(names, tensors)
    order, seed = _order.get()
    with _launching:
        lib.kvsim_prepare(table, len(tensors), order, seed)
        try:
            call()
        except RuntimeError:
            fault = _read_fault(lib, kernel)
            if fault is None:
                raise
            # TileLang's error repeats the whole source; the fault says what happened.
            raise fault from None


def _read_fault(lib: ctypes.CDLL, kernel: str) -> SimulatorFault | None:
    block, thread, text = ctypes.c_int64(), (ctypes.c_uint32 * 3)(), ctypes.create_string_buffer(1024)
    if not lib.kvsim_fault(ctypes.byref(block), thread, text, len(text)):
        return None
    return SimulatorFault(kernel, block.value, (thread[0], thread[1], thread[2]), text.value.decode())
