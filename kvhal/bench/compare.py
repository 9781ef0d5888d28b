"""Two runs side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

CELL = ("backend", "op", "format", "tokens", "block_size", "pattern")


@dataclass(frozen=True)
class Change:
    """One cell in two runs.

    Attributes:
        cell: (backend, op, format, tokens, block_size, pattern).
        before, after: share of the copy bandwidth of its own run, so that two devices or days can be compared.
    """

    cell: tuple[Any, ...]
    before: float
    after: float

    @property
    def factor(self) -> float:
        """Speed after over speed before; below 1 is slower."""
        return self.after / self.before


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """The cells of the first run, each with what the second one has of it; cells that only the second has do not matter.

    Raises:
        ValueError: a document is not one that `kvhal bench --json` wrote, or the second run lacks a cell of the first.
    """
    old, new = ({_key(cell): float(cell["ratio"]) for cell in _cells(document)} for document in (before, after))
    missing = [cell for cell in old if cell not in new]
    if missing:
        first = " ".join(map(str, missing[0]))
        raise ValueError(f"the second run lacks {len(missing)} of {len(old)} cells, such as {first}; run the same cells")
    return [Change(cell, old[cell], new[cell]) for cell in old]


def regressions(changes: Iterable[Change], threshold: float) -> list[Change]:
    """The changes that are slower by more than `threshold` (0.05 is five per cent)."""
    return [change for change in changes if change.factor < 1 - threshold]


def _cells(document: dict[str, Any]) -> list[dict[str, Any]]:
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list) or not cells or not all(map(_is_cell, cells)):
        names = ", ".join(CELL)
        raise ValueError(f"not a result of `kvhal bench --json`: it needs cells with {names} and a ratio > 0")
    return cells


def _is_cell(cell: Any) -> bool:
    if not isinstance(cell, dict) or not {*CELL, "ratio"} <= set(cell):
        return False
    ratio, names = cell["ratio"], [cell[name] for name in CELL]
    plain = all(isinstance(value, str | int) for value in names)
    return plain and isinstance(ratio, int | float) and math.isfinite(ratio) and ratio > 0


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in CELL)
