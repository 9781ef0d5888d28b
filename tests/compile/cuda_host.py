"""Host functions of cuda_tilelang's kernels, run without a GPU: on CPU memory that is said to be a GPU's, up to the launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import tilelang  # noqa: F401  before tvm_ffi, which it brings
import torch
import tvm_ffi
from tilelang import tvm
from tilelang.engine.lower import lower

from kvhal.backends.cuda_tilelang.build import PASS_CONFIGS, target

CUDA = 2  #: kDLCUDA
#: those whose host functions `launch_only_if` they are meant
KERNELS = ("store", "load", "load_bulk", "load_slots", "fused", "fused_one")
#: torch's dtype -> DLPack's code and bits
CODES = {
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.bfloat16: (4, 16),
}

Int64s = ctypes.POINTER(ctypes.c_int64)
_capsule: Any = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", Int64s),
        ("strides", Int64s),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class OnGpu:
    """A CPU tensor as DLPack would describe it on a GPU; the tensor must outlive it."""

    def __init__(self, tensor: torch.Tensor, device: int = 0) -> None:
        extents = ctypes.c_int64 * tensor.dim()
        self.shape, self.strides = extents(*tensor.shape), extents(*tensor.stride())
        facts = (tensor.data_ptr(), CUDA, device, tensor.dim(), *CODES[tensor.dtype], 1)
        self.managed = _Managed(*facts, ctypes.cast(self.shape, Int64s), ctypes.cast(self.strides, Int64s), 0, None, None)

    def __dlpack__(self, **_: Any) -> Any:
        return _capsule(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.managed.device_id


@cache
def host_function(factory: Any, *arguments: Any) -> Callable[..., Any]:
    """The host function of ``factory(*arguments)``; what it would launch is looked up among TVM's global functions."""
    return host_and_source(factory, *arguments)[0]


def host_and_source(factory: Any, *arguments: Any) -> tuple[Callable[..., Any], str]:
    """A host function that has launched nothing, since it keeps what it found the first time; the CUDA source of its kernel."""
    goal = target("sm_90")
    with tvm.transform.PassContext(opt_level=3, config=PASS_CONFIGS), goal:
        built = lower(factory(*arguments), target=goal, enable_host_codegen=True, enable_device_compile=False)
    built.rt_mod.clear_imports()
    return tvm.runtime.Executable(built.rt_mod).jit()["main"], str(built.kernel_source)


def register(name: str, function: Callable[..., Any]) -> None:
    """Registers a global function of TVM's, for good: on exit TVM would let go of it when Python is no more, and crash."""
    kept = tvm_ffi.convert(function)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    tvm_ffi.register_global_func(name, kept, override=True)


_log: list[str] = []


@contextmanager
def launches() -> Iterator[list[str]]:
    """Kernels only take notes, and no device is made current, for host functions that are first called in here.

    Yields:
        list[str]: the names of those that were launched.
    """
    current = tvm_ffi.get_global_func("__tvm_set_device")
    register("__tvm_set_device", lambda *_: None)
    for name in KERNELS:  # host functions keep what they find
        register(f"{name}_kernel", lambda *_, name=name: _log.append(name))
    _log.clear()
    try:
        yield _log
    finally:
        tvm_ffi.register_global_func("__tvm_set_device", current, override=True)
        for name in KERNELS:
            tvm_ffi.remove_global_func(f"{name}_kernel")
