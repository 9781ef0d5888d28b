"""Bitwise comparison of whole allocations, with coordinates for what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch

SHOWN = 12  #: differing bytes that a report lists; the rest is counted


@dataclass(frozen=True)
class Mismatch:
    """One byte that differs.

    Attributes:
        where: buffer, block, token, field and byte, or the guard.
        have: the byte that is there.
        need: the byte that should be.
    """

    where: str
    have: int
    need: int

    def __str__(self) -> str:
        return f"{self.where}: has 0x{self.have:02x}, needs 0x{self.need:02x}"


@dataclass(frozen=True)
class Difference:
    """All bytes of one allocation that differ: how many, and the first of them."""

    what: str
    count: int
    total: int
    first: tuple[Mismatch, ...]

    def __str__(self) -> str:
        more = [f"  ... and {self.count - len(self.first)} more"] if self.count > len(self.first) else []
        return "\n".join([f"{self.what}: {self.count} of {self.total} bytes differ", *(f"  {m}" for m in self.first), *more])


def differ(what: str, have: np.ndarray, need: np.ndarray, where: Callable[[int], str]) -> Difference | None:
    """Compares two uint8 arrays of one length; None when every byte is equal.

    Raises:
        ValueError: the lengths differ.
    """
    if have.shape != need.shape:
        raise ValueError(f"{what}: has {have.shape[0]} bytes, needs {need.shape[0]}")
    at = np.flatnonzero(have != need)
    if at.size == 0:
        return None
    first = tuple(Mismatch(where(int(i)), int(have[i]), int(need[i])) for i in at[:SHOWN])
    return Difference(what, int(at.size), int(have.size), first)


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's elements as uint8 in row-major order, on the host."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return np.array(flat.view(torch.uint8).numpy()) if flat.numel() else np.empty(0, np.uint8)


def report(title: str, problems: Iterable[Difference | str]) -> str:
    """One text for all problems of a case."""
    return "\n".join([title, *map(str, problems)])
