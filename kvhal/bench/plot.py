"""The picture of a run: share of the copy bandwidth, and time against tokens."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

SHORT = {
    "store_kv_cache": "store",
    "load_paged_kv_cache": "load",
    "load_kv_slots": "slots",
    "fused_norm_rope_hadamard_cast_store_kvcache": "fused",
}


def draw(document: dict[str, Any], path: Path) -> None:
    """Two panels from a document of `kvhal bench --json`, in the file type that the suffix names.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib does not know the suffix.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    roofline, latency = figure.subplots(1, 2)
    series: dict[tuple[str, str], list[tuple[int, float, float]]] = defaultdict(list)
    for cell in document["cells"]:
        name = f"{SHORT.get(cell['op'], cell['op'])} {cell['format'].removesuffix('_FORMAT')} {cell['pattern']}"
        series[cell["backend"], name].append((cell["tokens"], cell["ratio"], cell["median_us"]))
    for (backend, name), points in series.items():
        tokens, ratios, times = zip(*sorted(points), strict=True)
        style = "o-" if backend == "cuda_tilelang" else "s--"
        roofline.plot(tokens, ratios, style, label=f"{name} ({backend})", markersize=4)
        latency.plot(tokens, times, style, markersize=4)
    copy = f"share of copy bandwidth ({document['copy_gbs']:,.0f} GB/s)"
    roofline.axhline(1.0, color="black", linewidth=0.8)
    roofline.set(xscale="log", xlabel="tokens", ylabel=copy, ylim=(0, 1.1))
    latency.axhline(document["empty_us"], color="black", linewidth=0.8)
    latency.set(xscale="log", yscale="log", xlabel="tokens", ylabel="device microseconds; line: the smallest kernel")
    figure.suptitle(f"{document['device']}, commit {document['commit']}")
    figure.legend(loc="outside lower center", ncols=3, fontsize=7)
    figure.savefig(path)
