"""Argument checks of the public operations: what a tensor has, what it needs, and a way out. Nothing is written before them."""

from __future__ import annotations

import operator
from typing import NoReturn, SupportsIndex, cast

import torch
from torch.compiler import is_compiling

SLOT_DTYPES = (torch.int32, torch.int64)
INT32_MAX = 2**31 - 1


def reject(name: str, have: object, need: str, hint: str = "") -> NoReturn:
    """Raises the ValueError of a bad argument."""
    raise ValueError(f"{name}: has {have}, needs {need}" + (f"; {hint}" if hint else ""))


def check_tensor(name: str, tensor: object, dtypes: tuple[torch.dtype, ...], rank: int | None = None) -> torch.Tensor:
    """A tensor of one of `dtypes` and, where given, of `rank`.

    Raises:
        TypeError: not a tensor.
        ValueError: wrong dtype or rank.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: has a {type(tensor).__name__}, needs a torch.Tensor")
    if tensor.dtype not in dtypes:
        reject(name, f"dtype {tensor.dtype}", " or ".join(map(str, dtypes)))
    if rank is not None and tensor.dim() != rank:
        reject(name, f"shape {tuple(tensor.shape)}", f"{rank} dimensions")
    return tensor


def check_same_device(device: torch.device, name: str, **tensors: torch.Tensor | None) -> None:
    """Every tensor lies on `device`, where the tensor called `name` lies."""
    for other, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            reject(other, f"device {tensor.device}", f"{device}, where {name} is", f"move it with {other}.to({str(device)!r})")


def check_int(name: str, value: SupportsIndex, low: int, high: int = INT32_MAX) -> int:
    """An int in [low, high]; numpy integers are welcome, bools and floats are not.

    Raises:
        TypeError: not an integer.
        ValueError: out of range.
    """
    # sizes that a trace keeps variable, ints for torch.compile and SymInts for torch.export, would be constants from _index on
    variable = type(value) is int or isinstance(value, torch.SymInt)
    number = cast(int, value) if variable else None if isinstance(value, bool) else _index(value)
    if number is None:
        raise TypeError(f"{name}: has {value!r}, needs an int")
    if not low <= number <= high:
        reject(name, number, f"{low} <= {name} <= {high}")
    return number


def unequal(have: int, need: int) -> bool:
    """Whether sizes differ; where a trace does not know, the operator finds out when it runs."""
    if not is_compiling():
        return have != need
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(have != need)


def _index(value: SupportsIndex) -> int | None:
    try:
        return operator.index(value)
    except TypeError:  # no number, or one of a class that cannot always be one: a tensor
        return None


def record_rows(
    name: str, tensor: torch.Tensor, elements: int, rows: int | None = None, *, written: bool = False
) -> torch.Tensor:
    """``[n, ...]`` seen as ``[n, elements]`` without a copy; the row stride is free, a record is contiguous.

    Raises:
        ValueError: the trailing dimensions are not one record, or `rows` differs from n.
    """
    if tensor.dim() < 2:
        reject(name, f"shape {tuple(tensor.shape)}", f"[n, {elements}] or [n, ..., {elements} elements in all]")
    width = tensor.shape[1:].numel()
    if width != elements:
        reject(name, f"shape {tuple(tensor.shape)}: {width} elements a record", f"{elements} elements a record")
    if rows is not None and tensor.shape[0] != rows:
        reject(name, f"{tensor.shape[0]} rows", f"{rows}, one a token")
    if tensor.dim() == 2 and (tensor.stride(1) == 1 or elements == 1 or tensor.shape[0] == 0):
        return tensor
    try:
        flat = tensor.view(tensor.shape[0], elements)
    except RuntimeError:
        flat = None
    if flat is None or (flat.stride(1) != 1 and elements != 1 and tensor.shape[0] != 0):
        hint = "pass rows of a row-major buffer, or None" if written else f"pass {name}.contiguous()"
        reject(name, f"strides {tensor.stride()}", "each record contiguous", hint)
    return flat


def int32_output(out: torch.Tensor | None, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """`out` as an int32 table of `shape`, or a new one when None; its strides are the caller's business.

    Raises:
        ValueError: another dtype or shape.
    """
    if out is None:
        return torch.empty(shape, dtype=torch.int32, device=device)
    check_tensor("out", out, (torch.int32,), rank=2)
    if tuple(out.shape) != shape:
        reject("out", f"shape {tuple(out.shape)}", str(shape))
    return out


def check_rows(name: str, tensor: torch.Tensor, columns: int | None = None, *, written: bool = False) -> None:
    """A 2-d tensor with contiguous rows and, where given, `columns` columns; a `written` one cannot be replaced by a copy."""
    if columns is not None and tensor.shape[1] != columns:
        reject(name, f"shape {tuple(tensor.shape)}", f"{columns} columns")
    if tensor.stride(1) != 1 and tensor.shape[1] > 1:
        hint = "pass rows of a row-major buffer" if written else f"pass {name}.contiguous()"
        reject(name, f"strides {tensor.stride()}", "contiguous rows (last stride 1)", hint)


def check_contiguous(name: str, tensor: torch.Tensor, *, written: bool = False) -> None:
    """A contiguous tensor; a `written` one cannot be replaced by a copy."""
    if not tensor.is_contiguous():
        hint = "pass a slice of a contiguous buffer" if written else f"pass {name}.contiguous()"
        reject(name, f"strides {tensor.stride()}", "a contiguous tensor", hint)


def check_writable_rows(name: str, tensor: torch.Tensor) -> None:
    """Rows of an output do not overlap."""
    if tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[-1]:
        reject(name, f"strides {tensor.stride()}", "rows that do not overlap", "pass a tensor that was not expanded")


def check_apart(name: str, written: torch.Tensor | None, **others: torch.Tensor | None) -> None:
    """What is written shares no byte with another tensor of the call: kernels read it before that write, or behind it.

    Raises:
        ValueError: it does, or lies between the other's bytes in another way than side by side in steps of one stride.
    """
    for other, tensor in others.items():
        if written is not None and tensor is not None and not _apart(written, tensor):
            reject(name, f"memory that {other} has too", "memory of its own", f"pass another buffer, or {other}.clone()")


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie one behind the other, or side by side in each step of some stride."""
    ours, theirs = one.untyped_storage(), other.untyped_storage()
    start, begin = ours.data_ptr(), theirs.data_ptr()
    if start + ours.nbytes() <= begin or begin + theirs.nbytes() <= start:
        return True
    if not one.data_ptr() or not other.data_ptr():  # without elements, or on the meta device
        return True
    steps = [
        [(stride * tensor.element_size(), size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        for tensor in (one, other)
    ]
    for period in {1 << 64, *(step for taken in steps for step, count in taken if step * count)}:
        width, reach = (
            tensor.element_size() + sum(step * count for step, count in taken if step % period)
            for tensor, taken in zip((one, other), steps, strict=True)
        )
        if width <= (other.data_ptr() - one.data_ptr()) % period <= period - reach:
            return True
    return False


def check_flag(name: str, value: object) -> None:
    """True or False themselves: other objects have a truth too, but may change it, or be no key of what is remembered.

    Raises:
        TypeError: it is something else.
    """
    if value is not True and value is not False:
        raise TypeError(f"{name}: has {value!r}, needs True or False")


def check_type(name: str, value: object, kind: type) -> None:
    """An argument object of its own class.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}: has a {type(value).__name__}, needs a {kind.__name__}")
