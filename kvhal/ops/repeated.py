"""Calls like one before: what has been validated and bound once in a configuration is neither validated nor bound again.

Whether a call is right depends on dtype, shape, strides and device of its tensors, on some scalars, and on where its cache
starts; strict mode looks at values as well, and remembers nothing. A call is remembered only when its launcher takes the
tensors as they are, or as views that are as easily made again.

There are two ways to find one. `Scope.near` has, an operation, the last call at each address of a cache (index operations: at
each value of a scalar), so that the public function only compares: `Call.same` says in one step whether the tensors are alike,
or the launcher itself does (`Call.checks`), and scalars are compared one by one, with their types, since True == 1 == 1.0.
Where that does not fit, `Scope.calls` has every call by a key of all that matters. Nothing is told by identity, since a tensor
can be given another shape or storage in place; but by that of a CastArgs, which is frozen and holds none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.compiler import is_compiling

from kvhal.config import Scope
from kvhal.formats import ALIGNMENT
from kvhal.interface import Launcher, Op
from kvhal.ops.alike import guard

#: calls that a configuration remembers; shapes of a serving engine repeat, and a set of others starts again
LIMIT = 4096

#: where an operation's calls are in `Scope.near`
STORE, LOAD, LOAD_SLOTS, FUSED_STORE, CONVERT_INDEX, INDEX_CAT, EXPAND_SWA_INDEX, DECODE_SWA_INDEX, EXPAND_LOAD_PLAN = range(
    len(Op)
)

#: what `data_ptr` raises of something that is no tensor, or of one without memory, and a prepared launcher of what it does not
#: take (`Call.checks`); validation says why
UNTAKEN = (AttributeError, BufferError, OverflowError, RuntimeError, TypeError, ValueError)

#: this release of torch says in `torch.compiler._is_compiling_flag`, which is no public name, what `is_compiling` returns: that
#: a graph is traced, where nothing may be launched. Elsewhere Python compares tensors, which then never are alike.
KNOWS_TRACING = hasattr(torch.compiler, "_is_compiling_flag")

UNLIKE = object()  #: equals nothing that a call has; what a remembered call returns of one that is not like it

#: an address has one of these bits: it is no multiple of what prepared launchers rely on (`kvhal.interface`, "Launchers")
UNALIGNED = 15


def is_traced(tensor: object) -> bool:
    """Nothing may be launched: a graph is traced, or `tensor` is one of a FakeTensorMode."""
    return is_compiling() or isinstance(tensor, FakeTensor)


class Call:
    """A call that was validated.

    Attributes:
        launch: its launcher, which takes tensors at any address.
        prepared: for tensors that are `same` and whose rows lie on aligned addresses, what the launcher's `prepare` returned,
            which of a fused store takes tensors only; `launch` itself where it has none.
        checks: `prepared` looks at its tensors itself ("Launchers" in `kvhal.interface`): only their classes are compared here.
            Never where the call makes its output as large as the earlier one, whatever its tensors are.
        same: whether tensors, as many as it was made of, have the dtypes, shapes, strides and devices of this call's.
        scalars: what else it was called with; the operation knows their order.
        repeat: of a fused store, see `kvhal.ops.fused_repeat`.
        fresh, new: the output is to be made, and what makes it.
        width: columns of the rows that its tensors are viewed as, 0 when they are passed as they are.

    `told` says that scalars tell the size of what `new` makes.
    """

    __slots__ = ("checks", "fresh", "launch", "new", "prepared", "repeat", "same", "scalars", "width")

    def __init__(
        self,
        launch: Launcher,
        tensors: tuple[torch.Tensor, ...],
        scalars: tuple[Any, ...] = (),
        new: Callable[[], Any] | None = None,
        width: int = 0,
        told: bool = False,
    ) -> None:
        self.launch = launch
        self.prepared = launch
        checks = KNOWS_TRACING and getattr(launch, "prepare", None) is not None and getattr(launch, "checks", False)
        self.checks = checks and (new is None or told)
        self.same = guard(tensors)
        self.scalars = scalars
        self.repeat: Callable[..., Any] = _nothing
        self.fresh = new is not None
        self.new: Callable[[], Any] = new or _nothing
        self.width = width


def _nothing() -> None:
    """The caller gives the output."""


def call_key(op: Op, scalars: tuple[Any, ...], *tensors: object) -> tuple[Any, ...] | None:
    """What decides whether a call is valid; None when one of `tensors` is not a plain tensor.

    Equal scalars must be equally valid: an int is to be told from an equal float by the caller.
    """
    key: list[Any] = [op, scalars]
    for tensor in tensors:
        if type(tensor) is not torch.Tensor:
            return None
        key += (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
    return tuple(key)


def find(scope: Scope, key: tuple[Any, ...] | None, cache: torch.Tensor | None = None) -> Call | None:
    """An equal call, None when there was none or `cache` does not start where a cache may."""
    if key is None:
        return None
    try:
        call: Call | None = scope.calls.get(key)
    except TypeError:  # a scalar that cannot be hashed; validation says what it is
        return None
    if call is None or (cache is not None and cache.data_ptr() % ALIGNMENT):
        return None
    return call


def remember(scope: Scope, key: tuple[Any, ...] | None, call: Callable[[], Call]) -> Call | None:
    """Keeps a call that has been validated; `call` makes what is kept. None when nothing is kept."""
    if key is None or scope.policy.strict:
        return None
    if len(scope.calls) >= LIMIT:
        scope.calls.clear()
    made = scope.calls[key] = call()
    return made


def keep_near(
    scope: Scope,
    op: int,
    hint: int,
    call: Call | None,
    tensors: tuple[torch.Tensor, ...],
    rows: tuple[Any, ...],
    *arguments: Any,
) -> None:
    """Makes `call` the one that the next call of an operation is compared with.

    Args:
        scope, op, hint: where it is looked for.
        call: None keeps nothing.
        tensors: those it is compared by.
        rows: those whose addresses a prepared launcher relies on; Nones are passed over.
        arguments: what the launcher was called with.
    """
    if call is None or any(tensor is not None and tensor.data_ptr() & UNALIGNED for tensor in rows):
        return
    prepare = getattr(call.launch, "prepare", None)
    if call.prepared is call.launch and prepare is not None:
        call.prepared = prepare(*arguments)
    if not call.same(*tensors):  # a mode of torch has changed
        call.same = guard(tensors)
    near = scope.near[op]
    if len(near) >= LIMIT:
        near.clear()
    near[hint] = call


def allocator(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes new contiguous tensors of the shape, dtype and device of `like`, sooner than torch.empty with all of them said."""
    template = torch.empty(1, dtype=like.dtype, device=like.device).expand(like.shape)
    if type(template) is torch.Tensor and torch.empty_like(template).is_contiguous():
        return partial(torch.empty_like, template)
    return partial(torch.empty, like.shape, dtype=like.dtype, device=like.device)
