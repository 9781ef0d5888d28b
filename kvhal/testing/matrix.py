"""The support matrix: what every backend's own checks say on made-up machines. ``python -m kvhal.testing.matrix`` prints it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from kvhal.errors import describe_reason
from kvhal.formats import KVCacheFormat
from kvhal.interface import FORMAT_OPS, Backend, Op, Request
from kvhal.platform import Platform, available_devices, detect
from kvhal.registry import BUILTIN_BACKENDS, backends
from kvhal.testing.formats import CONFORMANCE_FORMATS
from kvhal.testing.platforms import PLATFORMS

ALL, BUT = "every format", " but "
HEAD = """# Support matrix

Generated from the backends' own checks on made-up machines that have everything installed; a test compares it. Regenerate with
`python -m kvhal.testing.matrix > docs/support_matrix.md`.

**yes**: served natively. **simulated**: served by a functional simulator of the hardware, never to be read as a hardware
result. A number: refused, for the reasons listed below the table.
"""


def render() -> str:
    """The whole document."""
    sections = [_section(backends()[name]) for name in BUILTIN_BACKENDS]
    return "\n".join([HEAD, _formats_text(), *sections])


def _formats_text() -> str:
    rows = [f"| {name} | `{layout.describe()}` | {layout.bytes_per_token} |" for name, layout in CONFORMANCE_FORMATS.items()]
    table = "\n".join(["| format | record | bytes a token |", "|---|---|---|", *rows])
    return f"Formats, built-in ones first; the others stand for what users may define ({ALL} means all of these):\n\n{table}\n"


def _section(backend: Backend) -> str:
    notes: dict[str, int] = {}
    lines = [f"## {backend.name}", "", f"Runs on {backend.runs_on}.", "", f"| operation | formats | {' | '.join(PLATFORMS)} |"]
    lines.append("|---|---|" + "---|" * len(PLATFORMS))
    for op in Op:
        layouts: dict[str, KVCacheFormat | None] = dict(CONFORMANCE_FORMATS) if op in FORMAT_OPS else {"-": None}
        groups: dict[tuple[str, ...], list[str]] = {}
        for name, layout in layouts.items():
            row = tuple(_cell(backend, op, layout, platform, notes) for platform in PLATFORMS.values())
            groups.setdefault(row, []).append(name)
        for row, names in groups.items():
            lines.append(f"| {op} | {_spell(names)} | {' | '.join(row)} |")
    lines += ["", *(f"{number}. {text}" for text, number in notes.items())]
    return "\n".join(lines).rstrip() + "\n"


def _spell(names: list[str]) -> str:
    """A list of formats, or what is left out where that is shorter."""
    others = [name for name in CONFORMANCE_FORMATS if name not in names]
    if names == ["-"] or len(others) > len(names):
        return ", ".join(names)
    return BUT.join([ALL, ", ".join(others)]) if others else ALL


def _read(text: str) -> list[str]:
    """The formats that `_spell` wrote."""
    if not text.startswith(ALL):
        return text.split(", ")
    others = text.removeprefix(ALL).removeprefix(BUT).split(", ")
    return [name for name in CONFORMANCE_FORMATS if name not in others]


def _cell(backend: Backend, op: Op, layout: KVCacheFormat | None, platform: Platform, notes: dict[str, int]) -> str:
    request = Request(op, layout, platform, None, ("norm", "rope") if op == Op.FUSED_STORE else ())
    reasons = backend.why_not(request)
    if not reasons:
        return "simulated" if backend.simulates(request) else "yes"
    text = "; ".join(describe_reason(reason) for reason in reasons)
    return str(notes.setdefault(text, len(notes) + 1))


def rows_of(text: str) -> Iterable[tuple[str, str, str, dict[str, str]]]:
    """(backend, operation, format, column -> cell) for every row of a rendered matrix."""
    backend = ""
    columns: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            backend, columns = line[3:], []
        elif line.startswith("| operation"):
            columns = cells[2:]
        elif line.startswith("| ") and columns:
            for name in _read(cells[1]):
                yield backend, cells[0], name, dict(zip(columns, cells[2:], strict=True))


def columns_here() -> dict[str, str]:
    """The matrix's columns that describe this machine -> where the conformance suite runs them."""
    found: dict[str, str] = {}
    for device in available_devices():
        here = detect(device)
        for name, platform in PLATFORMS.items():
            if platform.kind == here.kind and _matches(platform, here):
                found[name] = "simulator" if platform.simulate else device.type
    return found


def _matches(platform: Platform, here: Platform) -> bool:
    installed = all(here.module(module.name).version for module in platform.modules)
    tools = all(here.tool(name) for name, _ in platform.tools)
    same = platform.kind == "cpu" or platform.arch == here.arch
    return installed and tools and same and (here.interpreted or not platform.interpreted)


def promised_cells(text: str) -> set[str]:
    """Cells "backend/operation/format/where" that a rendered matrix calls supported on this machine."""
    found = set()
    columns = columns_here()
    for backend, op, layout, row in rows_of(text):
        for column, where in columns.items():
            if row[column] == ("simulated" if where == "simulator" else "yes"):
                found.add(f"{backend}/{op}/{layout}/{where}")
    return found


if __name__ == "__main__":
    sys.stdout.write(render())
