"""A case: one call of one public operation, built from a seed on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import kvhal
from kvhal.formats import KVCacheFormat
from kvhal.interface import Op
from kvhal.testing.buffers import Buffer
from kvhal.testing.formats import NAMES
from kvhal.testing.maker import Maker

PUBLIC: dict[Op, Callable[..., Any]] = {op: getattr(kvhal, op.value) for op in Op}


@dataclass(frozen=True, eq=False)
class Call:
    """A call that can be made once: its keyword arguments, and every allocation behind them."""

    op: Op
    arguments: dict[str, Any]
    buffers: dict[str, Buffer]

    def __call__(self) -> Any:
        """Makes the call through the public function, under the policy in force."""
        return PUBLIC[self.op](**self.arguments)


@dataclass(frozen=True, eq=False)
class Case:
    """A deterministic call.

    Attributes:
        op: the operation.
        layout: the record's format, None for index operations.
        name: unique among the cases of (op, layout).
        make: keyword arguments of the public function, all tensors from the maker.
        block_size: tokens a block, where the operation's kernels depend on it.
        stages: stages of a fused store.
        quick: part of the quick profile.
        repeats: several tokens share a slot, and any of them may win.
        seed: another one makes a case of the same kind with other random choices.
    """

    op: Op
    layout: KVCacheFormat | None
    name: str
    make: Callable[[Maker], dict[str, Any]]
    block_size: int | None = None
    stages: tuple[str, ...] = ()
    quick: bool = True
    repeats: bool = False
    seed: int = 0

    @property
    def id(self) -> str:
        """Unique name; everything random in the case follows from it."""
        seed = f"#{self.seed}" if self.seed else ""
        return "-".join([self.op.value, *([format_name(self.layout)] if self.layout else []), self.name]) + seed

    def build(self, device: torch.device | str = "cpu") -> Call:
        """A fresh call on its own buffers; every build of a case has the same bytes."""
        maker = Maker(self.id, device)
        arguments = self.make(maker)
        return Call(self.op, arguments, maker.buffers)


def format_name(layout: KVCacheFormat) -> str:
    """The layout's name in the suite, or its description."""
    return NAMES.get(layout) or str(layout)
