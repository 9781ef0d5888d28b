"""Regenerates the README's generated sections from the package, the demo, and benchmarks/results/*.json.

Run it with the Python of .venv. Result files are those that `kvhal bench --json` and the GPU benchmarks write.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def section(text: str, name: str) -> str:
    """What stands in the section now.

    Raises:
        ValueError: the README has no such section.
    """
    found = re.search(_pattern(name), text, re.DOTALL)
    if found is None:
        raise ValueError(f"README.md has no section <!-- generated: {name} -->")
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


def formats() -> str:
    """The built-in formats, as `kvhal formats` has them."""
    from kvhal.cli.formats import describe_format
    from kvhal.formats import BUILTIN_FORMATS

    facts = [describe_format(name, layout, 64) for name, layout in BUILTIN_FORMATS.items()]
    keys = ("use", "data", "elements", "elements_per_scale", "scale", "bytes_per_token", "order")
    columns = ("format", "use", "data", "elements", "a scale for", "scale", "bytes/token", "order in a block")
    return markdown_table(columns, [(f"`{fact['name']}`", *(fact[key] for key in keys)) for fact in facts])


def demo() -> str:
    """What `kvhal demo` prints."""
    from typer.testing import CliRunner

    from kvhal.cli import app

    result = CliRunner().invoke(app, ["demo", "--text", str(README)], env={"COLUMNS": "200"})
    if result.exit_code != 0:
        raise SystemExit(f"kvhal demo: exit code {result.exit_code}\n{result.output}")
    lines = [line.rstrip() for line in result.stdout.rstrip().splitlines()]
    return "\n".join(["```", "$ scripts/demo", *lines, "```"])


def measured() -> str:
    """For each result file, the cells of its largest token count."""
    parts = []
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if not _is_table(document):
            parts += [f"More: [{path.name}]({path.relative_to(ROOT)})", ""]
            continue
        largest = max(row["tokens"] for row in document["results"])
        rows = [_cells(row, path.stem) for row in document["results"] if row["tokens"] == largest]
        columns = ("backend", "operation", "format", "block", "order", "microseconds", "share of a copy")
        title = f"{document['device']}, {largest:,} tokens, commit {document['commit']}"
        parts += [f"{title} ([the whole run]({path.relative_to(ROOT)})):", "", markdown_table(columns, rows), ""]
    if not parts:
        return "Not measured yet: benchmarks/results holds no results."
    return "\n".join(
        [*parts, "A share of 1 is the bandwidth of a large copy on the same device, measured in the same run."]
    )


def _is_table(document: Any) -> bool:
    rows = document.get("results") if isinstance(document, dict) else None
    return bool(rows) and all("tokens" in row and ("share_of_copy" in row or "ratio" in row) for row in rows)


def _cells(row: dict[str, Any], stem: str) -> tuple[Any, ...]:
    if "kernel" in row:  # a backend's own benchmark, whose file is called <device>_<backend>.json
        facts = (stem.partition("_")[2], row["kernel"], row["format"], row["block_size"], row["order"])
        return (*facts, f"{row['microseconds']:,.0f}", f"{row['share_of_copy']:.2f}")
    facts = (row["backend"], row["op"], row["format"], row["block_size"], row["pattern"])
    return (*facts, f"{row['median_us']:,.0f}", f"{row['ratio']:.2f}")


def main() -> None:
    """Rewrites the sections named on the command line, all of them by default."""
    makers = {"formats": formats, "demo": demo, "measured": measured}
    unknown = [name for name in sys.argv[1:] if name not in makers]
    if unknown:
        raise SystemExit(f"update_readme.py: unknown section {unknown[0]!r}, known: {', '.join(makers)}")
    for name in sys.argv[1:] or makers:
        text = README.read_text(encoding="utf-8")
        README.write_text(with_section(text, name, makers[name]()), encoding="utf-8")


if __name__ == "__main__":
    main()
