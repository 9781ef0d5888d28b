"""The picture of a run: shares of the copy bandwidth at the largest size, time against tokens and against bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHORT = {
    "store_kv_cache": "store",
    "load_paged_kv_cache": "load",
    "load_kv_slots": "load slots",
    "fused_norm_rope_hadamard_cast_store_kvcache": "fused store",
}
LINES = ("o-", "s--", "^:", "d-.")  #: a style a backend
ROW_INCHES = 0.26


def draw(document: dict[str, Any], path: Path) -> None:
    """Three panels from a document of `kvhal bench --json`, in the file type that the suffix names.

    Left a bar a cell of the largest token count and backend. In the middle a line an operation and backend, in the first format
    and order of tokens that the document has of the operation; right the same against the bytes that move, beside copies.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib does not know the suffix.
    """
    from matplotlib.figure import Figure

    cells = document["cells"]
    backends = list(dict.fromkeys(cell["backend"] for cell in cells))
    rows = list(dict.fromkeys(_name(cell) for cell in _largest(cells)))
    figure = Figure(figsize=(19, max(4.0, 1.5 + ROW_INCHES * len(rows))), layout="constrained")
    shares, latency, moved = figure.subplots(1, 3)
    _draw_shares(shares, _largest(cells), backends, rows)
    shares.set(xlabel=f"share of the copy bandwidth, {document['copy_gbs']:,.0f} GB/s", xlim=(0, 1.1))
    for axes, across, label in ((latency, "tokens", "tokens"), (moved, "bytes", "bytes read and written")):
        _draw_latency(axes, cells, backends, across)
        axes.axhline(document["empty_us"], color="black", linewidth=0.8)
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="device microseconds; black: the smallest kernel")
    copies = [(2 * row["bytes"], row["us"]) for row in document.get("copies", ())]
    if copies:
        moved.plot(*zip(*copies, strict=True), "k.-", label="a kernel of torch that reads and writes as much")
        moved.legend(fontsize=7)
    figure.suptitle(f"{document['device']}, commit {document['commit']}")
    figure.savefig(path)


def _largest(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    count = max((cell["tokens"] for cell in cells), default=0)
    return [cell for cell in cells if cell["tokens"] == count]


def _name(cell: dict[str, Any]) -> str:
    parts = (SHORT.get(cell["op"], cell["op"]), cell["format"].removesuffix("_FORMAT"), cell["pattern"])
    return " ".join(part for part in parts if part != "-")


def _draw_shares(axes: Any, cells: list[dict[str, Any]], backends: list[str], rows: list[str]) -> None:
    height = 0.8 / max(1, len(backends))
    for number, backend in enumerate(backends):
        mine = [cell for cell in cells if cell["backend"] == backend]
        places = [rows.index(_name(cell)) + (number - (len(backends) - 1) / 2) * height for cell in mine]
        axes.barh(places, [cell["ratio"] for cell in mine], height, label=backend)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"{max((cell['tokens'] for cell in cells), default=0):,} tokens")
    axes.legend(loc="center right", fontsize=8)


def _draw_latency(axes: Any, cells: list[dict[str, Any]], backends: list[str], across: str) -> None:
    for color, op in enumerate(dict.fromkeys(cell["op"] for cell in cells)):
        first = next(cell for cell in cells if cell["op"] == op)
        for number, backend in enumerate(backends):
            mine = [cell for cell in cells if cell["backend"] == backend and _name(cell) == _name(first)]
            points = sorted((cell[across], cell["median_us"]) for cell in mine)
            if points:
                label = f"{_name(first)} ({backend})"
                axes.plot(*zip(*points, strict=True), LINES[number % len(LINES)], color=f"C{color}", label=label, markersize=4)
    axes.legend(fontsize=7)
