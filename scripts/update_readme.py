"""Regenerates the generated sections of README.md and docs/performance.md, and the picture, from the package and its results.

Run it with the Python of .venv. Result files are those that `kvhal bench --json` and the GPU benchmarks write.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from performance_tables import BLOCKS, LATENCY, TABLES
from sections import RESULTS, ROOT, markdown_table, with_section

README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"


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
    """The largest size of each file that `kvhal bench --json` wrote, a column a backend; other files are linked."""
    parts, linked = [], []
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        link = f"[{path.name}]({path.relative_to(ROOT)})"
        if "cells" not in document or path.name in (LATENCY, BLOCKS):
            linked.append(link)
            continue
        largest = max(cell["tokens"] for cell in document["cells"])
        title = f"{document['device']}, {largest:,} tokens, commit {document['commit']}, copy {document['copy_gbs']:,.0f} GB/s"
        parts += [f"{title} ({link} has all sizes):", "", _pivot(document["cells"], largest), "", document.get("note", ""), ""]
    if not parts:
        return "Not measured yet: benchmarks/results holds no results."
    how = (
        "Share of the bandwidth of a large copy on the same device in the same run: of a call in a stream of such calls / of a"
        " call alone after L2 was overwritten; in brackets microseconds of a call in a stream."
    )
    return "\n".join([how, "", *parts, f"Other measurements: {', '.join(linked)}." if linked else ""]).rstrip()


def _pivot(cells: list[dict[str, Any]], tokens: int) -> str:
    """One row an operation, format and order of tokens."""
    chosen = [cell for cell in cells if cell["tokens"] == tokens]
    backends = list(dict.fromkeys(cell["backend"] for cell in chosen))
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for cell in chosen:
        alone = f" / {cell['alone_ratio']:.2f}" if cell.get("alone_ratio") is not None else ""
        text = f"{cell['ratio']:.2f}{alone} ({cell['median_us']:,.0f})"
        rows.setdefault((f"`{cell['op']}`", cell["format"], cell["pattern"]), {})[cell["backend"]] = text
    columns = ("operation", "format", "tokens lie", *backends)
    return markdown_table(columns, [(*key, *(found.get(name) for name in backends)) for key, found in sorted(rows.items())])


def picture() -> None:
    """The README's picture of the same results, and the one of docs/performance.md."""
    from kvhal.bench.plot import draw

    for name in ("h200_bench.json", LATENCY):
        path = RESULTS / name
        draw(json.loads(path.read_text(encoding="utf-8")), (ROOT / "docs" / name).with_suffix(".png"))


#: section -> the file that it is in, and what makes it
SECTIONS = {
    **{name: (README, make) for name, make in (("formats", formats), ("demo", demo), ("measured", measured))},
    **{name: (PERFORMANCE, make) for name, make in TABLES.items()},
}


def main() -> None:
    """Rewrites the sections named on the command line, all of them by default."""
    known = (*SECTIONS, "picture")
    unknown = [name for name in sys.argv[1:] if name not in known]
    if unknown:
        raise SystemExit(f"update_readme.py: unknown section {unknown[0]!r}, known: {', '.join(known)}")
    for name in sys.argv[1:] or known:
        if name == "picture":
            picture()
            continue
        path, make = SECTIONS[name]
        path.write_text(with_section(path.read_text(encoding="utf-8"), name, make()), encoding="utf-8")


if __name__ == "__main__":
    main()
