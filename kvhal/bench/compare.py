"""Two runs side by side."""

from __future__ import annotations

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
    """The cells that both runs measured.

    Raises:
        ValueError: a document is not one that `kvhal bench --json` wrote, or the runs share no cell.
    """
    old, new = ({_key(cell): float(cell["ratio"]) for cell in _cells(document)} for document in (before, after))
    changes = [Change(cell, old[cell], new[cell]) for cell in old if cell in new]
    if not changes:
        raise ValueError("the two runs have no cell in common; run the same operations, formats and sizes")
    return changes


def regressions(changes: Iterable[Change], threshold: float) -> list[Change]:
    """The changes that are slower by more than `threshold` (0.05 is five per cent)."""
    return [change for change in changes if change.factor < 1 - threshold]


def _cells(document: dict[str, Any]) -> list[dict[str, Any]]:
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) and {*CELL, "ratio"} <= set(cell) for cell in cells):
        raise ValueError("not a result of `kvhal bench --json`: it has no cells with " + ", ".join((*CELL, "ratio")))
    return cells


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in CELL)
