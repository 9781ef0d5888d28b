"""Markdown files with generated sections, ``<!-- generated: NAME -->`` to ``<!-- end generated -->``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def section(text: str, name: str) -> str:
    """What stands in the section now.

    Raises:
        ValueError: there is no such section.
    """
    found = re.search(_pattern(name), text, re.DOTALL)
    if found is None:
        raise ValueError(f"no section <!-- generated: {name} -->")
    return found[2]


def with_section(text: str, name: str, body: str) -> str:
    """The text with another body in the section."""
    section(text, name)
    return re.sub(_pattern(name), lambda found: f"{found[1]}{body}\n{found[3]}", text, flags=re.DOTALL)


def _pattern(name: str) -> str:
    return rf"(<!-- generated: {name} -->\n)(.*?)(<!-- end generated -->)"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; None is shown as a dash."""
    lines = [columns, ["---"] * len(columns), *(["-" if cell is None else str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
