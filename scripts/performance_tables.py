"""The tables of docs/performance.md, each from one file of benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sections import RESULTS, markdown_table

LATENCY, BLOCKS = "h200_latency.json", "h200_block_133.json"
SHORT = {"fused_norm_rope_hadamard_cast_store_kvcache": "fused store"}


def _file(name: str) -> dict[str, Any] | None:
    path = RESULTS / name
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found


def _titled(name: str, document: dict[str, Any], table: str) -> str:
    commit = f", commit {document['commit']}" if document.get("commit") else ""
    return f"{document['device']}{commit} ([{name}](../benchmarks/results/{name})):\n\n{table}"


def _made(name: str, make: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    def table() -> str:
        document = _file(name)
        return "Not measured yet." if document is None else _titled(name, document, make(document))

    return table


def _profile(document: dict[str, Any]) -> str:
    rows = [
        (
            SHORT.get(cell["op"], f"`{cell['op']}`"),
            cell["format"],
            cell["pattern"] if cell["format"] != "-" else "-",
            cell["backend"],
            f"{cell['nanoseconds'] / 1e3:,.1f}",
            *(f"{cell[name]:.0f}" for name in ("dram_percent", "l2_percent", "issue_percent", "warps_percent")),
            f"{cell['registers']:.0f}",
            cell["bound"],
        )
        for cell in sorted(document["kernels"], key=lambda one: (one["op"], one["format"], one["pattern"], one["backend"]))
        if cell["tokens"] == max(one["tokens"] for one in document["kernels"])
    ]
    names = ("operation", "format", "tokens lie", "backend", "us", "DRAM", "L2", "issue", "warps", "registers", "bound")
    return markdown_table(names, rows)


def _small(document: dict[str, Any]) -> str:
    """Microseconds in a stream at the smaller sizes, a column a backend and size."""
    sizes = sorted({cell["tokens"] for cell in document["cells"]}, reverse=True)[1:]
    backends = list(dict.fromkeys(cell["backend"] for cell in document["cells"]))
    rows: dict[tuple[str, str], dict[tuple[str, int], float]] = {}
    for cell in document["cells"]:
        if cell["tokens"] in sizes and cell["pattern"] in ("pages", "-"):
            name = SHORT.get(cell["op"], f"`{cell['op']}`")
            rows.setdefault((name, cell["format"]), {})[cell["backend"], cell["tokens"]] = cell["median_us"]
    columns = [(backend, size) for backend in backends for size in sizes]
    table = [(*key, *(f"{found[at]:.2f}" if at in found else None for at in columns)) for key, found in sorted(rows.items())]
    head = ("operation", "format", *(f"{backend}, {size:,}" for backend, size in columns))
    note = f"{document['note']}\n\n" if document.get("note") else ""
    note += f"Microseconds in a stream; the smallest kernel takes {document['empty_us']:.2f}."
    return f"{note}\n\n{markdown_table(head, table)}"


def _bench_cells() -> list[dict[str, Any]]:
    """What other tables stand beside."""
    cells: list[dict[str, Any]] = json.loads((RESULTS / "h200_bench.json").read_text(encoding="utf-8"))["cells"]
    return cells


def _floor(document: dict[str, Any]) -> str:
    """What the bytes of a prefill chunk take at least, beside the same cells of h200_bench.json."""
    cells = _bench_cells()
    times = {(cell["op"], cell["format"], cell["tokens"], cell["backend"]): cell["median_us"] for cell in cells}
    backends = list(dict.fromkeys(cell["backend"] for cell in cells))
    rows = [
        (
            f"`{row['op']}`",
            row["format"],
            f"{row['us']:.2f}",
            f"{row['share_of_copy']:.2f}",
            *(f"{times[row['op'], row['format'], row['tokens'], backend]:.2f}" for backend in backends),
        )
        for row in document["rows"]
    ]
    return markdown_table(("operation", "format", "us at least", "share of copy", *(f"us, {name}" for name in backends)), rows)


def _latency(document: dict[str, Any]) -> str:
    """Microseconds of one format by tokens, and of copies by bytes."""
    cells = document["cells"]
    columns = list(dict.fromkeys((cell["op"], cell["backend"]) for cell in cells))
    sizes = sorted({cell["tokens"] for cell in cells})
    times = {(cell["op"], cell["backend"], cell["tokens"]): f"{cell['median_us']:.2f}" for cell in cells}
    head = ("tokens", *(f"{SHORT.get(op, f'`{op}`')}, {backend}" for op, backend in columns))
    table = markdown_table(head, [(f"{size:,}", *(times.get((*column, size)) for column in columns)) for size in sizes])
    copies = markdown_table(
        ("bytes read, and as many written", "us"), [(f"{row['bytes']:,}", f"{row['us']:.2f}") for row in document["copies"]]
    )
    text = f"Microseconds in a stream, records of {cells[0]['format']}; the smallest kernel takes {document['empty_us']:.2f}."
    return f"{text}\n\n{table}\n\nThe least kernel of torch that reads and writes so many bytes:\n\n{copies}"


def _blocks(document: dict[str, Any]) -> str:
    """The cells of another block size beside the same cells of h200_bench.json."""
    names = ("backend", "op", "format", "tokens", "pattern")
    usual = {tuple(cell[name] for name in names): cell for cell in _bench_cells()}
    rows = []
    for cell in document["cells"]:
        before = usual[tuple(cell[name] for name in names)]
        times = [one["median_us"] for one in (before, cell)]
        name = SHORT.get(cell["op"], f"`{cell['op']}`")
        rows.append((name, cell["format"], *(f"{us:.1f}" for us in times), f"{times[1] / times[0]:.3f}"))
    first = document["cells"][0]
    head = ("operation", "format", "us, block 64", f"us, block {first['block_size']}", "ratio")
    return f"{first['backend']}, {first['tokens']:,} tokens in shuffled pages.\n\n{markdown_table(head, rows)}"


def _decode(document: dict[str, Any]) -> str:
    rows = [
        (
            row["backend"],
            row["format"],
            row["streams"],
            f"{row['gathered_rows']:,}",
            row["launches"],
            f"{row['microseconds']:,.2f}",
            f"{row['gathered_bytes'] / row['microseconds'] / 1e3 / document['copy_gbs']:.2f}",
        )
        for row in document["results"]
    ]
    head = ("backend", "format", "streams", "rows gathered", "launches a layer", "us a layer", "gathered bytes, share of copy")
    text = (
        f"Fused store, conversion of {document['top_k']} top-k indices a stream, gather of {document['window']} records"
        f" of the window and of those: {document['layers']} layers as one graph, replayed. One launch stands for the indexer."
    )
    return f"{text}\n\n{markdown_table(head, rows)}"


def _plan(document: dict[str, Any]) -> str:
    rows = [
        (row["backend"], *(f"{row[name]:,.1f}" if name in row else None for name in ("host", "device", "ready", "kernel")))
        for row in document["plans"]
    ]
    first = document["host"][0]
    rows.insert(0, ("made on the host, stays there", f"{first['median_ms'] * 1e3:,.1f}", None, None, None))
    return markdown_table(("microseconds", "host", "device", "ready", "kernel alone"), rows)


def _host(document: dict[str, Any]) -> str:
    names = ("public", "kernel", "allocation", "difference", "ratio", "add_")
    rows = [(row["op"], row["backend"], *(f"{row[name]:.2f}" for name in names)) for row in document["microseconds"]]
    return markdown_table(("operation", "backend", "public", "kernel", "allocation", "more", "ratio", "`add_`"), rows)


def _sanitize(document: dict[str, Any]) -> str:
    rows = [
        (backend, tool, found["cases"], found["problems"])
        for backend, tools in document["results"].items()
        for tool, found in tools.items()
    ]
    return f"{markdown_table(('backend', 'tool', 'cases', 'problems'), rows)}\n\n{document.get('note', '')}".rstrip()


TABLES = {
    "profile": _made("h200_profile.json", _profile),
    "small": _made("h200_bench.json", _small),
    "floor": _made("h200_floor.json", _floor),
    "latency": _made(LATENCY, _latency),
    "blocks": _made(BLOCKS, _blocks),
    "decode": _made("h200_decode.json", _decode),
    "plan": _made("h200_plan.json", _plan),
    "host": _made("h200_host.json", _host),
    "sanitize": _made("h200_sanitize.json", _sanitize),
}
