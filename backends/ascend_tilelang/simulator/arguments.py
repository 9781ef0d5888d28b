"""CPU tensors as the simulated device sees them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

_MAX_LEVELS = 6
_DEVICE_TYPE = 12  # kDLExtDev, the device type of Ascend tensors


class Extent(ctypes.Structure):
    """Mirror of kvsim::Extent in include/kvsim/abi.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("run_begin", ctypes.c_void_p),
        ("run_bytes", ctypes.c_uint64),
        ("levels", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("count", ctypes.c_int64 * _MAX_LEVELS),
        ("stride", ctypes.c_int64 * _MAX_LEVELS),
    )


def legal_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> tuple[int, list[tuple[int, int]]]:
    """The bytes that a strided tensor addresses, as `(run, levels)`.

    `run` is the length in bytes of the innermost contiguous piece; `levels` are `(count, stride in bytes)`, outermost
    first. A tensor whose dimensions interleave or overlap owns its whole span instead: one run, no levels.
    """
    if 0 in shape:
        return 0, []
    dims = sorted((st * itemsize, n) for n, st in zip(shape, stride, strict=True) if n > 1 and st != 0)
    span = itemsize + sum(step * (n - 1) for step, n in dims)
    run = covered = itemsize
    levels: list[tuple[int, int]] = []
    for step, n in dims:
        if step < covered:
            return span, []
        if step == covered and not levels:
            run = covered = covered * n
        else:
            levels.append((n, step))
            covered = step * (n - 1) + covered
    if len(levels) > _MAX_LEVELS:
        return span, []
    return run, levels[::-1]


def extents_of(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> ctypes.Array[Extent]:
    """One Extent for each tensor. The caller keeps `names` and `tensors` alive."""
    table = (Extent * len(tensors))()
    for entry, name, tensor in zip(table, names, tensors, strict=True):
        run, levels = legal_bytes(tensor.shape, tensor.stride(), tensor.element_size())
        entry.name = name.encode()
        entry.base = entry.run_begin = tensor.data_ptr()
        entry.run_bytes = run
        entry.levels = len(levels)
        for i, (count, step) in enumerate(levels):
            entry.count[i], entry.stride[i] = count, step
    return table


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)


def device_capsule(tensor: torch.Tensor) -> object:
    """DLPack capsule of a CPU tensor, sharing its memory, whose device reads as an Ascend device.

    torch normalises the strides of dimensions of size one; the true ones are put back, because kernels for strided
    records declare them.
    """
    capsule: object = torch.utils.dlpack.to_dlpack(tensor)  # type: ignore[attr-defined]
    view = _DLTensor.from_address(_pointer_of(capsule, b"dltensor"))
    view.device_type = _DEVICE_TYPE
    for i, step in enumerate(tensor.stride()):
        view.strides[i] = step
    return capsule
