"""Checked conversion of planning arguments to numpy. Every error of the package about an argument is worded here."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

INT32_MAX = int(np.iinfo(np.int32).max)
INT32_MIN = int(np.iinfo(np.int32).min)

Ints: TypeAlias = npt.NDArray[np.int64]
IntVector: TypeAlias = torch.Tensor | npt.NDArray[np.integer[Any]] | Sequence[int]
IntTable: TypeAlias = torch.Tensor | npt.NDArray[np.integer[Any]] | Sequence[Sequence[int]]

_TORCH_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


def scalar(name: str, value: int, low: int = 1, high: int = INT32_MAX) -> int:
    """`value` as an int in [low, high]."""
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, needs an integer")
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r}, needs an integer") from error
    if not low <= number <= high:
        raise ValueError(f"{name} is {number}, needs {low}..{high}")
    return number


def vector(name: str, values: IntVector, length: int | None = None, low: int = 0, high: int = INT32_MAX) -> Ints:
    """`values` as int64 [length], each in [low, high]."""
    array = _integers(name, values)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}, needs one dimension")
    if length is not None and len(array) != length:
        raise ValueError(f"{name} has {len(array)} entries, needs {length}: one per entry of seqlens_k")
    if array.size and (array.min() < low or array.max() > high):
        i = int(np.argmax((array < low) | (array > high)))
        raise ValueError(f"{name}[{i}] is {array[i]}, needs {low}..{high}")
    return array.astype(np.int64)


def block_table(name: str, values: IntTable, rows: int) -> npt.NDArray[np.integer[Any]]:
    """`values` as an integer array [rows, width] of its own dtype: no copy of a numpy array or a tensor."""
    array = _integers(name, values)
    if array.ndim == 1 and array.size == 0 and rows == 0:
        array = array.reshape(0, 0)
    if array.ndim != 2 or array.shape[0] != rows:
        raise ValueError(f"{name} has shape {array.shape}, needs one row of block ids per sequence: [{rows}, width]")
    return array


def device_table(name: str, values: object, rows: int, device: torch.device) -> torch.Tensor:
    """`values` as it is: an int32 tensor [rows, width] on `device`. Its ids are not looked at: that would wait."""
    way_out = "or leave device out and send the plan there with .to()"
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{name} is a {type(values).__name__}, needs an int32 tensor on {device}; make it one, {way_out}")
    if values.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {values.dtype}, needs torch.int32 to be expanded on {device}")
    if values.layout != torch.strided:
        raise TypeError(f"{name} has layout {values.layout}, needs a dense tensor")
    if values.device.type != device.type or not (device.type == "cpu" or device.index in (None, values.device.index)):
        raise ValueError(f"{name} is on {values.device}, needs {device}, where the plan is to be; move it, {way_out}")
    if values.dim() != 2 or values.shape[0] != rows:
        shape = tuple(values.shape)
        raise ValueError(f"{name} has shape {shape}, needs one row of block ids per sequence: [{rows}, width]")
    return values


def check_total(rows: int) -> None:
    """Rows of a plan are numbered in int32."""
    if rows > INT32_MAX:
        raise ValueError(f"the plan has {rows} rows, needs at most {INT32_MAX} for int32 offsets; split the batch")


def chunk_lengths(seqlens_k: IntVector, seqlens_q: IntVector) -> tuple[Ints, Ints]:
    """Both lengths as int64 [b], with 0 <= seqlens_q <= seqlens_k and a total that int32 row numbers can address."""
    k = vector("seqlens_k", seqlens_k)
    q = vector("seqlens_q", seqlens_q, len(k))
    if (q > k).any():
        i = int(np.argmax(q > k))
        raise ValueError(f"seqlens_q[{i}] is {q[i]}, needs 0..{k[i]}: seqlens_k[{i}] counts the chunk's tokens too")
    if int(q.sum()) > INT32_MAX:
        raise ValueError(f"seqlens_q has {int(q.sum())} tokens in total, needs at most {INT32_MAX}; split the batch")
    return k, q


def starts_of(counts: Ints) -> Ints:
    """Exclusive running sum: where each sequence's items begin when they are concatenated."""
    return np.cumsum(counts) - counts


def compressed_block_size(block_size: int, ratio: int) -> int:
    """How many compressed tokens a block of `block_size` source tokens holds."""
    block_size, ratio = scalar("block_size", block_size), scalar("ratio", ratio)
    if block_size % ratio:
        raise ValueError(f"block_size is {block_size}, needs a multiple of ratio {ratio}: no group may span two blocks")
    return block_size // ratio


def check_table_width(name: str, width: int, begins: Ints, ends: Ints, block_size: int, ratio: int = 1) -> None:
    """Every range [begin, end) must lie inside the `width` blocks of its sequence, all counted in tokens of `ratio`."""
    unit = "tokens" if ratio == 1 else "compressed tokens"
    short = (ends > begins) & (ends > width * block_size)
    if short.any():
        i = int(np.argmax(short))
        need = -(-int(ends[i]) // block_size)
        raise ValueError(
            f"{name}: sequence {i} has {width} blocks of {block_size} {unit} ({width * block_size}), needs {need}"
            f" blocks for {unit} [{begins[i]}, {ends[i]}); give it more blocks or process fewer tokens"
        )


def check_block_ids(name: str, ids: npt.NDArray[np.integer[Any]], locate: Callable[[int], tuple[int, int]]) -> None:
    """Every id that a plan uses must be a block: -1 is fine only in the padding past a sequence's range.

    locate: (sequence, column) in the table of the id at an index, asked only for the error.
    """
    if ids.size and (ids.min() < 0 or ids.max() > INT32_MAX):
        at = int(np.argmax((ids < 0) | (ids > INT32_MAX)))
        sequence, column = locate(at)
        raise ValueError(
            f"{name}: entry {column} of sequence {sequence} is {ids[at]}, needs a block id 0..{INT32_MAX}: the range to"
            f" plan reaches this block; allocate it first"
        )


def check_ring_ids(state_ids: Ints, used: npt.NDArray[np.bool_]) -> None:
    """A sequence that touches its ring block must have one."""
    bad = used & (state_ids < 0)
    if bad.any():
        i = int(np.argmax(bad))
        raise ValueError(f"state_ids[{i}] is {state_ids[i]}, needs a ring block id >= 0: sequence {i} uses its ring")


def ring_window(window_size: int, swa_block_size: int) -> tuple[int, int]:
    """Both sizes, with a window that the ring can hold."""
    window, ring = scalar("window_size", window_size), scalar("swa_block_size", swa_block_size)
    if window > ring:
        raise ValueError(
            f"window_size is {window}, needs at most swa_block_size {ring}: a ring block keeps only its last {ring}"
            f" tokens; enlarge swa_block_size"
        )
    return window, ring


def valid_starts(swa_valid_starts: IntVector | None, length: int) -> Ints:
    """First position of each sequence whose SWA record exists; a position below 0 never does."""
    if swa_valid_starts is None:
        return np.zeros(length, np.int64)
    return np.maximum(vector("swa_valid_starts", swa_valid_starts, length, INT32_MIN), 0)


def _integers(name: str, values: IntVector | IntTable) -> npt.NDArray[np.integer[Any]]:
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise ValueError(f"{name} is on {values.device}, needs cpu: plans are made on the host")
        if values.dtype not in _TORCH_INTEGERS or values.layout != torch.strided:
            raise TypeError(f"{name} has dtype {values.dtype} and layout {values.layout}, needs dense integers")
        return values.numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name} has rows of different lengths, needs equal ones; pad them with -1") from error
    if array.size == 0 and not isinstance(values, np.ndarray):
        return array.astype(np.int32)  # numpy takes an empty sequence for floats
    if array.dtype.kind not in "iu" or array.dtype == np.uint64:
        raise TypeError(f"{name} has dtype {array.dtype}, needs integers up to int64")
    return array
