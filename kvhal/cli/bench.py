"""`kvhal bench`: what moves, how fast, and the share of the copy bandwidth measured in the same run."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvhal.bench import PATTERNS, Clock, Result, compare, environment, measure, regressions
from kvhal.bench.timing import WrongBytes
from kvhal.cli.console import (
    EXIT_NO,
    CommandError,
    JsonOption,
    parse_device,
    print_json,
    print_lines,
    print_table,
    progress,
    report_error,
)
from kvhal.cli.parity import parse_formats, parse_ops
from kvhal.config import check_name
from kvhal.errors import UnsupportedError
from kvhal.formats import BUILTIN_FORMATS, KVCacheFormat
from kvhal.interface import FORMAT_OPS, Op
from kvhal.registry import backends as known_backends

Question = tuple[str, Op, KVCacheFormat | None, int, str]
MAX_TOKENS, MAX_BLOCK_SIZE = 1 << 26, 1 << 20
ORDERED_OPS = (Op.STORE, Op.LOAD, Op.LOAD_SLOTS, Op.FUSED_STORE)


def command(
    context: typer.Context,
    ops: Annotated[str | None, typer.Option(help="Operations, comma-separated; all when left out.")] = None,
    formats: Annotated[str | None, typer.Option(help="Formats, comma-separated; the built-in ones when left out.")] = None,
    backends: Annotated[str | None, typer.Option(help="Backends, comma-separated; all that can serve when left out.")] = None,
    tokens: Annotated[str, typer.Option(help="Token counts, comma-separated.")] = "8192",
    block_size: Annotated[int, typer.Option(min=1, max=MAX_BLOCK_SIZE, help="Tokens a block.")] = 64,
    pattern: Annotated[str, typer.Option(help=f"Where tokens lie, comma-separated: {', '.join(PATTERNS)}.")] = "pages",
    device: Annotated[str, typer.Option(help="Where to measure.")] = "cpu",
    json: JsonOption = False,
    plot: Annotated[Path | None, typer.Option(help="Draws roofline and latency to this file (needs matplotlib).")] = None,
    compare_files: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", metavar="A.json B.json", help="Compares two runs."),
    ] = None,
    threshold: Annotated[float, typer.Option(min=0.0, help="--compare: slower by more than this share fails.")] = 0.05,
) -> None:
    """Bytes, time and share of the copy bandwidth; exit code 1 when bytes differ, or --compare finds a slower cell."""
    if compare_files:
        _only_compares(context)
        _compare(*compare_files, threshold, json)
        return
    if plot is not None:
        _check_picture(plot)
    where = parse_device(device)
    names = [check_name("--backends", name.strip()) for name in backends.split(",")] if backends else list(known_backends())
    layouts = parse_formats(formats) if formats else list(BUILTIN_FORMATS.values())
    questions = list(_questions(names, parse_ops(ops), layouts, _counts(tokens), _patterns(pattern)))
    clock = Clock(where)
    results, failures = _run(clock, questions, block_size, bool(backends))
    document = {**environment(clock), "cells": [asdict(one) for one in results], "failures": failures, "copies": clock.copies()}
    if json:
        print_json(document)
    else:
        _show(document)
    if plot is not None:
        from kvhal.bench.plot import draw  # matplotlib is an extra

        draw(document, plot)
    if failures:
        for failure in failures:
            report_error(failure)
        raise typer.Exit(EXIT_NO)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > MAX_TOKENS:
        raise CommandError(f"--tokens: has {text!r}, needs counts in 1..{MAX_TOKENS}, comma-separated")
    return counts


def _only_compares(context: typer.Context) -> None:
    """Refuses options that --compare would not look at."""
    used = ("compare_files", "threshold", "json")
    sources = {name: context.get_parameter_source(name) for name in context.params if name not in used}
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise CommandError(f"--compare: reads two files, has {options} too, which are for measuring; leave them out")


def _check_picture(path: Path) -> None:
    """The file can be drawn: asked before anything is measured."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise CommandError(f"--plot: {error}; pip install kvhal[plot]") from None
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise CommandError(f"--plot: has {str(path)!r}, needs a name that ends in .{', .'.join(sorted(known))}")
    if path.is_dir() or not path.parent.is_dir():
        raise CommandError(f"--plot: has {str(path)!r}, needs a file in a folder that exists")


def _patterns(text: str) -> list[str]:
    chosen = [part.strip() for part in text.split(",")]
    for one in chosen:
        if one not in PATTERNS:
            raise CommandError(f"--pattern: has {one!r}, needs one of {', '.join(PATTERNS)}")
    return chosen


def _questions(
    names: list[str], ops: list[Op], layouts: list[KVCacheFormat], counts: list[int], patterns: list[str]
) -> Iterator[Question]:
    for name in names:
        for op in ops:
            for layout in layouts if op in FORMAT_OPS else [None]:
                for count in counts:
                    for pattern in patterns if op in ORDERED_OPS else ["-"]:
                        yield name, op, layout, count, pattern


def _run(clock: Clock, questions: list[Question], block_size: int, named: bool) -> tuple[list[Result], list[str]]:
    """Every cell's result, and what went wrong; a backend that was not asked for by name and cannot serve is left out."""
    results: list[Result] = []
    failures: list[str] = []
    with progress() as bars:
        task = bars.add_task("bench", total=len(questions))
        for name, op, layout, tokens, pattern in questions:
            bars.update(task, description=f"{name} {op}")
            try:
                results.append(measure(clock, name, op, layout, tokens, block_size, pattern))
            except WrongBytes as error:
                failures.append(f"{op} of {layout or 'indices'}, {tokens} tokens, {pattern}: {error}")
            except UnsupportedError:
                if named:
                    raise
            except (MemoryError, RuntimeError) as error:
                if "memory" not in str(error):
                    raise
                failures.append(f"{op} of {layout or 'indices'}, {tokens} tokens: does not fit into memory")
            bars.advance(task)
            if clock.device.type == "cuda":
                torch.accelerator.memory.empty_cache()
    if not results and not failures:
        raise CommandError("no backend can serve any of this; `kvhal doctor` says why", EXIT_NO)
    return results, failures


def _show(document: dict[str, Any]) -> None:
    rows = [
        (
            cell["backend"],
            cell["op"],
            cell["format"],
            cell["tokens"],
            cell["pattern"],
            f"{cell['bytes']:,}",
            f"{cell['median_us']:,.1f}",
            f"{cell['gbs']:,.1f}",
            f"{cell['ratio']:.2f}",
            "-" if cell["alone_us"] is None else f"{cell['alone_us']:,.1f}",
            "-" if cell["alone_ratio"] is None else f"{cell['alone_ratio']:.2f}",
            "-" if cell["host_us"] is None else f"{cell['host_us']:.1f}",
        )
        for cell in document["cells"]
    ]
    columns = (
        "backend",
        "operation",
        "format",
        "tokens",
        "pattern",
        "bytes",
        "us",
        "GB/s",
        "of copy",
        "alone us",
        "of copy",
        "host us",
    )
    print_table(f"{document['device']}, commit {document['commit']}", columns, rows, columns[3:4] + columns[5:])
    print_lines(f"copy {document['copy_gbs']:,.1f} GB/s (read plus written), smallest kernel {document['empty_us']:.1f} us")


def _compare(before: Path, after: Path, threshold: float, json: bool) -> None:
    try:
        changes = compare(*(json_text.loads(path.read_text(encoding="utf-8")) for path in (before, after)))
    except OSError as error:
        raise CommandError(f"--compare: cannot read {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"--compare: {error}") from None
    slower = regressions(changes, threshold)
    if json:
        print_json([{**asdict(change), "factor": change.factor} for change in changes])
    else:
        cells = [(*change.cell, f"{change.before:.3f}", f"{change.after:.3f}", f"{change.factor:.3f}") for change in changes]
        columns = ("backend", "operation", "format", "tokens", "block", "pattern", "before", "after", "factor")
        print_table("Share of the copy bandwidth, before and after", columns, cells, columns[-3:])
        print_lines(f"{len(slower)} of {len(changes)} cells are slower by more than {threshold:.0%}")
    if slower:
        raise typer.Exit(EXIT_NO)
