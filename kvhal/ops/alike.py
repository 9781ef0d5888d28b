"""Whether tensors are like others: same class, dtype, shape, strides and device, the whole of what validation looks at."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]


#: releases whose `TensorGuards` tests have been run with; it is no public class, and elsewhere Python looks at the tensors
KNOWN_RELEASES = ("2.11", "2.13")


def guard(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    """A function of as many objects that says whether they are like `tensors`, which it does not keep.

    False may also mean that the call is made in another mode (inference, autocast), or that an object is given twice where
    `tensors` are distinct.
    """
    distinct = len({id(tensor) for tensor in tensors}) == len(tensors)
    return _compiled(tensors) if COMPILED and distinct else _plain(tensors)


def _compiled(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    """torch.compile's own check of its inputs, one call for all tensors; half the time of looking at them in Python."""
    made: Any = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    return made.check  # type: ignore[no-any-return]


def _plain(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    facts = tuple((tensor.dtype, tensor.shape, tensor.stride(), tensor.device) for tensor in tensors)

    def check(*others: Any) -> bool:
        for other, (dtype, shape, strides, device) in zip(others, facts, strict=True):
            if type(other) is not torch.Tensor or other.dtype is not dtype or other.shape != shape:
                return False
            if other.stride() != strides or other.device != device:
                return False
        return True

    return check


def _works() -> bool:
    """The check of this release of torch sees what it has to see."""
    if TensorGuards is None or ".".join(torch.__version__.split(".")[:2]) not in KNOWN_RELEASES:
        return False
    new = partial(torch.empty, dtype=torch.int32, device="cpu")
    like, one = new((2, 3)), new(1)
    others = (new((2, 3), dtype=torch.int64), new((2, 4)), new(6), new((3, 2)).T, new((2, 3), device="meta"), None)
    try:
        check = _compiled((like, one))
        return check(new((2, 3)), one) and not any(check(other, one) for other in others)
    except (AttributeError, TypeError, RuntimeError):
        return False


COMPILED = _works()
