"""Cases of the index conversions, which know no record format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvhal.interface import Op
from kvhal.testing.case import Case
from kvhal.testing.maker import Maker
from kvhal.testing.metadata import INT32_MAX, INT32_MIN

Make = Callable[[Maker], dict[str, Any]]


def convert_cases() -> list[Case]:
    """Cases of `convert_kv_index`."""
    found = [
        Case(Op.CONVERT_INDEX, None, f"hostile-b{size}", _convert(size, 3, 2, 37, 5))
        for size in (1, 3, 16, 48, 64, 133, INT32_MAX)
    ]
    return [
        *found,
        Case(Op.CONVERT_INDEX, None, "strided", _convert(16, 2, 3, 70, 6, strided=True)),
        Case(Op.CONVERT_INDEX, None, "no-table", _convert(16, 2, 1, 8, 0)),
        Case(Op.CONVERT_INDEX, None, "no-entries", _convert(16, 2, 3, 0, 4)),
        Case(Op.CONVERT_INDEX, None, "no-sequences", _convert(16, 0, 3, 8, 4)),
        Case(Op.CONVERT_INDEX, None, "wide", _convert(64, 1, 1, 1100, 40)),
    ]


def _convert(size: int, batch: int, queries: int, width: int, table: int, strided: bool = False) -> Make:
    def make(maker: Maker) -> dict[str, Any]:
        rng = maker.rng
        limit = min(size * table + 4, INT32_MAX)
        topk = rng.integers(0, max(limit, 1), (batch, queries, width))
        bad = [-1, -5, INT32_MIN, INT32_MAX, min(size * table, INT32_MAX), max(size * table - 1, 0) & INT32_MAX, size - 1, 0]
        _sprinkle(rng, topk, bad)
        tables = rng.integers(0, 90, (batch, table))
        _sprinkle(rng, tables, [-1, -7, INT32_MIN, INT32_MAX, INT32_MAX // size, INT32_MAX // size + 1, 2**31 // size - 1])
        lens = rng.integers(0, width + 1, (batch, queries))
        _sprinkle(rng, lens, [width, INT32_MAX, 0, -3, INT32_MIN])
        steps = ((width + 5) * queries + 7, width + 5, 1) if strided else None
        return {
            "topk_idxs": maker.place("topk_idxs", _narrow(topk), strides=steps, skip=3 if strided else 0, written=True),
            "block_tables": maker.place("block_tables", _narrow(tables), row_stride=table + 3 if strided else None),
            "context_lens": maker.place("context_lens", _narrow(lens), strides=(1, batch) if strided else None),
            "block_size": size,
        }

    return make


def _narrow(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    narrow: np.ndarray[Any, Any] = np.clip(values, INT32_MIN, INT32_MAX).astype(np.int32)
    return narrow


def _sprinkle(rng: np.random.Generator, values: np.ndarray[Any, Any], bad: list[int]) -> None:
    """Puts each bad value somewhere, about a third of all places at most."""
    flat = values.reshape(-1)
    places = rng.permutation(flat.size)[: flat.size // 3 + 1]
    for place, value in zip(places, bad * (1 + flat.size // len(bad)), strict=False):
        flat[place] = value


def index_cat_cases() -> list[Case]:
    """Cases of `kv_index_cat`."""

    def case(name: str, *arguments: Any, **more: Any) -> Case:
        return Case(Op.INDEX_CAT, None, name, _cat(*arguments, **more))

    return [
        case("plain", 7, 16, 24, 100, 28, out=False),
        case("rows", 5, 13, 9, 4096, 1024, out=True),
        case("no-shift", 3, 4, 4, 0, 0, out=True),
        case("overflow", 4, 5, 6, 2**30, 2**30 - 1, out=True),
        case("no-left", 3, 0, 7, 5, 6, out=True),
        case("no-right", 3, 7, 0, 5, 6, out=True),
        case("no-rows", 0, 7, 3, 5, 6, out=False),
        case("wide", 2, 513, 600, 128, 1, out=False),
    ]


def _cat(rows: int, wide_left: int, wide_right: int, cached: int, cur: int, *, out: bool) -> Make:
    def make(maker: Maker) -> dict[str, Any]:
        tables = [maker.rng.integers(-1, 5000, (rows, width)) for width in (wide_left, wide_right)]
        for table in tables:
            _sprinkle(maker.rng, table, [-1, -5, INT32_MIN, INT32_MAX, 0])
        left, right = (table.astype(np.int32) for table in tables)
        width = wide_left + wide_right
        return {
            "left": maker.place("left", left, row_stride=wide_left + 3 if out else None, skip=int(out)),
            "right": maker.place("right", right, row_stride=wide_right + 1 if out else None),
            "total_k_swa_cached": cached,
            "total_k_swa_cur": cur,
            "out": maker.output("out", (rows, width), torch.int32, row_stride=width + 5, skip=1) if out else None,
        }

    return make


def expand_cases() -> list[Case]:
    """Cases of `expand_swa_index`."""

    def case(name: str, *arguments: Any, **more: Any) -> Case:
        return Case(Op.EXPAND_SWA_INDEX, None, name, _expand(*arguments, **more))

    return [
        case("plain", 9, 32, out=False),
        case("rows", 7, 21, out=True),
        case("narrow", 5, 1, out=True),
        case("wide", 3, 1030, out=False),
        case("no-columns", 3, 0, out=False),
        case("no-rows", 0, 8, out=False),
    ]


def _expand(rows: int, width: int, *, out: bool) -> Make:
    def make(maker: Maker) -> dict[str, Any]:
        half = max(width // 2, 1)
        pivots = np.stack([maker.rng.integers(0, high, rows) for high in (9000, half, 9000, half + 2)], axis=1)
        bad = [(5, -3, 7, 4), (-4, 3, -9, 3), (1, INT32_MAX, 2, INT32_MAX), (3, INT32_MIN, 8, INT32_MIN)]
        bad += [(INT32_MAX - 1, 4, 0, 2), (2, width, 3, width), (0, 0, 0, 0)]
        for row, values in zip(range(1, rows), bad, strict=False):
            pivots[row] = values
        return {
            "pivots": maker.place("pivots", pivots.astype(np.int32)),
            "width": width,
            "out": maker.output("out", (rows, width), torch.int32, row_stride=width + 3, skip=1) if out else None,
        }

    return make


def decode_cases() -> list[Case]:
    """Cases of `get_kv_swa_index_decode`."""

    def case(name: str, *arguments: Any, **more: Any) -> Case:
        return Case(Op.DECODE_SWA_INDEX, None, name, _decode(*arguments, **more))

    return [
        case("ring-64", 12, 32, 64, out=False),
        case("ring-48", 12, 48, 48, out=True),
        case("ring-1", 12, 5, 1, out=True),
        case("ring-133", 12, 70, 133, out=True),
        case("window-beyond-ring", 12, 40, 16, out=False),
        case("huge-ring", 12, 9, INT32_MAX, out=True),
        case("no-window", 3, 0, 16, out=False),
        case("no-rows", 0, 8, 16, out=False),
    ]


def _decode(rows: int, window: int, ring: int, *, out: bool) -> Make:
    def make(maker: Maker) -> dict[str, Any]:
        starts = maker.rng.integers(0, min(20 * ring, INT32_MAX), rows)
        pairs = np.stack([starts, maker.rng.integers(0, window + 1, rows)], axis=1)
        bad = [(-1, window), (-5, 3), (INT32_MIN, window), (INT32_MAX, window), (INT32_MAX - 1, INT32_MAX), (ring - 1, window)]
        bad += [(3, -2), (0, INT32_MIN), (0, INT32_MAX)]
        for row, values in zip(range(1, rows), bad, strict=False):
            pairs[row] = values
        return {
            "kv_swa_index_offset_len": maker.place("kv_swa_index_offset_len", pairs.astype(np.int32)),
            "window_size": window,
            "swa_block_size": ring,
            "out": maker.output("out", (rows, window), torch.int32, row_stride=window + 2, skip=1) if out else None,
        }

    return make


def plan_cases() -> list[Case]:
    """Cases of `expand_load_plan`."""

    def case(name: str, *arguments: Any, **more: Any) -> Case:
        return Case(Op.EXPAND_LOAD_PLAN, None, name, _plan(*arguments, **more))

    return [
        *(case(f"hostile-b{size}", size, 24, 5, out=size % 2 == 1) for size in (1, 3, 16, 48, 64, 133, INT32_MAX)),
        case("one-span", 16, 1, 9, out=False),
        case("many-spans", 4, 300, 3, out=True),
        case("no-table", 16, 7, 0, out=False),
        case("no-spans", 16, 0, 4, out=True),
        case("no-segments", 16, 3, 4, out=False, segments=0),
    ]


def _plan(size: int, count: int, width: int, *, out: bool, segments: int | None = None) -> Make:
    """Spans in order, some without segments and some with gaps behind them, and every other field hostile in some."""

    def make(maker: Maker) -> dict[str, Any]:
        rng = maker.rng
        rows = count // 2 + 1
        begin = rng.integers(0, min(size * 2, INT32_MAX), count)
        end = np.minimum(begin + rng.integers(0, min(size * 4, INT32_MAX), count), INT32_MAX)
        needed = np.where(end > begin, -(-end // size) - begin // size, 0) + (rng.random(count) < 0.2)
        first = np.cumsum(needed) - needed + (2 if count > 3 else 0)
        spans = np.stack([first, rng.integers(0, 9000, count), rng.integers(-1, rows + 1, count), begin, end], axis=1)
        for column in range(1, 5) if count > 3 else ():
            bad = [-1, -5, INT32_MIN, INT32_MAX, INT32_MAX - 1, rows, size - 1, 0]
            for row, value in zip(rng.permutation(count)[: count // 6], rng.permutation(bad), strict=False):
                spans[row, column] = value
        if count > 3:
            spans[0, 0] = INT32_MIN  # its segments were long ago
            spans[-1, 0] = INT32_MAX
        tables = rng.integers(0, 90, (rows, width))
        _sprinkle(rng, tables, [-1, -7, INT32_MIN, INT32_MAX])
        total = int(needed.sum()) + 5 if segments is None else segments
        return {
            "spans": maker.place("spans", spans.astype(np.int32), skip=int(out)),
            "block_tables": maker.place("block_tables", _narrow(tables), row_stride=width + 3 if out else None, skip=int(out)),
            "block_size": size,
            "num_segments": total,
            "out": maker.output("out", (total, 4), torch.int32, skip=count % 4) if out else None,
        }

    return make
