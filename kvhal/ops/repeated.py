"""Calls like one before: what has been validated and bound once in a configuration is neither validated nor bound again.

Whether a call is right depends on dtype, shape, strides and device of its tensors, on some scalars, and on where its cache
starts; strict mode looks at values as well, and remembers nothing. A call is remembered only when its launcher takes the
tensors as they are: no view had to be made of them.
"""

from __future__ import annotations

from typing import Any

import torch

from kvhal.config import Scope
from kvhal.formats import ALIGNMENT
from kvhal.interface import Launcher, Op

#: calls that a configuration remembers; shapes of a serving engine repeat, and a set of others starts again
LIMIT = 4096


def call_key(op: Op, scalars: tuple[Any, ...], *tensors: object) -> tuple[Any, ...] | None:
    """What decides whether a call is valid; None when one of `tensors` is not a plain tensor.

    Equal scalars must be equally valid: an int is to be told from an equal float by the caller.
    """
    key: list[Any] = [op, scalars]
    for tensor in tensors:
        if type(tensor) is not torch.Tensor:
            return None
        key.append((tensor.dtype, tensor.shape, tensor.stride(), tensor.device))
    return tuple(key)


def repeated(scope: Scope, key: tuple[Any, ...] | None, cache: torch.Tensor | None = None) -> Launcher | None:
    """The launcher of an equal call, None when there was none or `cache` does not start where a cache may."""
    if key is None:
        return None
    try:
        launch: Launcher | None = scope.calls.get(key)
    except TypeError:  # a scalar that cannot be hashed; validation says what it is
        return None
    if launch is None or (cache is not None and cache.data_ptr() % ALIGNMENT):
        return None
    return launch


def remember(scope: Scope, key: tuple[Any, ...] | None, launch: Launcher) -> None:
    """Keeps a call that has been validated."""
    if key is None or scope.policy.strict:
        return
    if len(scope.calls) >= LIMIT:
        scope.calls.clear()
    scope.calls[key] = launch
