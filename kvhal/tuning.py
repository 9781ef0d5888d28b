"""Launch shapes as tables: one a backend, keyed by architecture, the figure that speaks for each shape, defaults elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: (kernel, data type of its record); None stands for unquantised records, and for kernels that know no record
Key = tuple[str, str | None]
Shape = tuple[int, ...]

#: of an H100 or H200; on a device with more or fewer, grids made for it lie less evenly, and that is all
MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Figure:
    """A row of a result file.

    Attributes:
        file: its name in benchmarks/results.
        row: field -> value, what tells the row from all others of the file.
        share: the row's share of the bandwidth of a large copy in the same run, or at few tokens of the speed of the smallest
            kernel.
        against: how many other shapes of that kernel and format the file has; 0: measured, but not chosen among several.
    """

    file: str
    row: Mapping[str, Any]
    share: float
    against: int = 0


@dataclass(frozen=True)
class Choice:
    """A launch shape and the figure that speaks for it."""

    shape: Shape
    figure: Figure


@dataclass(frozen=True)
class Table:
    """A backend's launch shapes.

    Attributes:
        tuned: architecture ("sm_90") -> key -> the choice there.
        defaults: key -> a shape that fits every architecture the backend serves; it has all of the backend's keys.
        command: measures shapes on the machine at hand.

    Raises:
        ValueError: an architecture has a key that `defaults` lacks, or a shape of another length.
    """

    tuned: Mapping[str, Mapping[Key, Choice]]
    defaults: Mapping[Key, Shape]
    command: str

    def __post_init__(self) -> None:
        for arch, choices in self.tuned.items():
            for key, choice in choices.items():
                need = self.defaults.get(key)
                if need is None or len(need) != len(choice.shape):
                    raise ValueError(f"tuned[{arch!r}][{key}]: has {choice.shape}, needs a shape as in defaults: {need}")

    def shape_of(self, arch: str, kernel: str, dtype: str | None) -> Shape:
        """The shape to launch `kernel` with.

        Raises:
            KeyError: the backend has no such kernel or data type.
        """
        choice = self.tuned.get(arch, {}).get((kernel, dtype))
        return self.defaults[kernel, dtype] if choice is None else choice.shape

    def files(self, arch: str) -> tuple[str, ...]:
        """The result files behind an architecture's shapes; none for an untuned one."""
        return tuple(dict.fromkeys(choice.figure.file for choice in self.tuned.get(arch, {}).values()))

    def untuned(self, arch: str) -> tuple[str, ...]:
        """Kernels, with their data type where they have one, that run with the default shape on an architecture."""
        known = self.tuned.get(arch, {})
        return tuple(" ".join(part for part in key if part) for key in self.defaults if key not in known)
