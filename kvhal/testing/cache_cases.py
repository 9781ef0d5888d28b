"""Cases of store, load by plan and load by slot."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvhal.formats import FORMAT_NAMES, KVCacheFormat
from kvhal.interface import Op
from kvhal.layout import DATA_DTYPES, sf_output
from kvhal.ops import KVCacheTensors
from kvhal.testing import metadata
from kvhal.testing.case import Case
from kvhal.testing.formats import NAMES
from kvhal.testing.maker import Maker
from kvhal.testing.values import adversarial_rows

BLOCK_SIZES = (64, 3, 48, 1, 16, 133)
TOKENS = 22  #: rows of the value cases: each of the 19 patterns meets each group


def block_sizes(layout: KVCacheFormat) -> tuple[int, int]:
    """The block sizes of the quick profile: two for a built-in format, one twice for others, which costs fewer compilations.

    They rotate over the formats, so that the suite as a whole tries all six.
    """
    turn = list(NAMES).index(layout) if layout in NAMES else zlib.crc32(layout.describe().encode())
    other = turn + 3 if layout in FORMAT_NAMES else turn
    return BLOCK_SIZES[turn % len(BLOCK_SIZES)], BLOCK_SIZES[other % len(BLOCK_SIZES)]


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` and a few more."""
    return math.ceil(tokens / block_size) + 2


@dataclass(frozen=True)
class Shape:
    """How the tensors of a store lie in memory."""

    row_stride: int | None = None  #: elements beyond the record from one row to the next
    skip: int = 0
    wide: bool = True
    middle: bool = False  #: rows as [n, 1, elements]
    skip_blocks: int = 0
    stretch: int = 1


def store_cases(layout: KVCacheFormat) -> list[Case]:
    """Cases of `store_kv_cache`."""
    first, second = block_sizes(layout)

    def case(name: str, make: Callable[[Maker], dict[str, Any]], size: int = first, **more: Any) -> Case:
        return Case(Op.STORE, layout, f"{name}-b{size}", make, size, **more)

    found = [
        case("values", _values(layout, first)),
        case("slots-int64-misaligned", _hostile_store(layout, first, Shape(row_stride=1, skip=1))),
        case("slots-int32-rows", _hostile_store(layout, second, Shape(row_stride=24, skip=8, wide=False, middle=True)), second),
        case("subcache", _hostile_store(layout, second, Shape(skip_blocks=2, stretch=3)), second),
        case("expanded", _hostile_store(layout, first, Shape(row_stride=-layout.elements, wide=False))),
        case("duplicates", _duplicates(layout, first), repeats=True),
        case("no-tokens", _small_store(layout, first, [], 2)),
        case("no-blocks", _small_store(layout, first, [0, -1, 5], 0)),
        case("all-skipped", _small_store(layout, first, [-1, -1, -5], 2)),
        case("one-token", _small_store(layout, first, [2 * first - 1], 2)),
    ]
    for size in BLOCK_SIZES:
        if size not in (first, second):
            found.append(case("values", _values(layout, size), size, quick=False))
            found.append(case("slots-int64", _hostile_store(layout, size, Shape()), size, quick=False))
    return found


def _values(layout: KVCacheFormat, size: int) -> Callable[[Maker], dict[str, Any]]:
    def make(maker: Maker) -> dict[str, Any]:
        blocks = blocks_for(TOKENS, size)
        kv = maker.place("kv", adversarial_rows(maker.rng, TOKENS, layout), dtype=torch.bfloat16)
        slots = maker.place("slot_mapping", maker.rng.permutation(blocks * size)[:TOKENS])
        return {"kv": kv, "kv_cache": maker.cache(layout, blocks, size, written=True), "slot_mapping": slots, "layout": layout}

    return make


def _hostile_store(layout: KVCacheFormat, size: int, shape: Shape) -> Callable[[Maker], dict[str, Any]]:
    def make(maker: Maker) -> dict[str, Any]:
        blocks = blocks_for(12, size)
        cache = maker.cache(layout, blocks, size, written=True, skip_blocks=shape.skip_blocks, stretch=shape.stretch)
        slots = metadata.slots(maker.rng, blocks * size, 12, shape.wide, unique=True)
        rows = adversarial_rows(maker.rng, len(slots), layout)
        stride = None if shape.row_stride is None else layout.elements + shape.row_stride
        if stride == 0:
            rows = np.broadcast_to(rows[:1], rows.shape)
        rows = rows[:, None] if shape.middle else rows
        kv = maker.place("kv", rows, dtype=torch.bfloat16, row_stride=stride, skip=shape.skip)
        return {"kv": kv, "kv_cache": cache, "slot_mapping": maker.place("slot_mapping", slots), "layout": layout}

    return make


def _duplicates(layout: KVCacheFormat, size: int) -> Callable[[Maker], dict[str, Any]]:
    def make(maker: Maker) -> dict[str, Any]:
        blocks = blocks_for(4, size)
        last = blocks * size - 1
        slots = np.array([1, last, 0, 1, -1, last, 1, 2, -1, 0, 1])
        kv = maker.place("kv", adversarial_rows(maker.rng, len(slots), layout), dtype=torch.bfloat16)
        cache = maker.cache(layout, blocks, size, written=True)
        return {"kv": kv, "kv_cache": cache, "slot_mapping": maker.place("slot_mapping", slots), "layout": layout}

    return make


def _small_store(layout: KVCacheFormat, size: int, slots: list[int], blocks: int) -> Callable[[Maker], dict[str, Any]]:
    def make(maker: Maker) -> dict[str, Any]:
        kv = maker.place("kv", adversarial_rows(maker.rng, len(slots), layout), dtype=torch.bfloat16)
        cache = maker.cache(layout, blocks, size, written=True)
        mapping = maker.place("slot_mapping", np.array(slots, np.int32))
        return {"kv": kv, "kv_cache": cache, "slot_mapping": mapping, "layout": layout}

    return make


def load_cases(layout: KVCacheFormat) -> list[Case]:
    """Cases of `load_paged_kv_cache`."""
    first, second = block_sizes(layout)

    def case(name: str, make: Callable[[Maker], dict[str, Any]], size: int = first, **more: Any) -> Case:
        return Case(Op.LOAD, layout, f"{name}-b{size}", make, size, **more)

    found = [
        case("plan", _load(layout, first, hostile=False)),
        case("hostile", _load(layout, first, out="rows")),
        case("hostile-misaligned", _load(layout, second, out="misaligned"), second),
        case("subcache", _load(layout, second, hostile=False, out="plain", skip_blocks=1, stretch=2), second),
        case("no-blocks", _load(layout, first, hostile=False, count=4, blocks=0, out="plain")),
        case("no-segments", _load(layout, first, count=0, hostile=False, out="plain")),
        case("whole-blocks", _whole_blocks(layout, second), second),
    ]
    for size in BLOCK_SIZES:
        if size not in (first, second):
            found.append(case("hostile", _load(layout, size, out="rows"), size, quick=False))
            found.append(case("whole-blocks", _whole_blocks(layout, size), size, quick=False))
    return found


def _load(
    layout: KVCacheFormat,
    size: int,
    *,
    out: str = "none",
    hostile: bool = True,
    count: int = 9,
    blocks: int = 4,
    skip_blocks: int = 0,
    stretch: int = 1,
) -> Callable[[Maker], dict[str, Any]]:
    def make(maker: Maker) -> dict[str, Any]:
        cache = maker.cache(layout, blocks, size, skip_blocks=skip_blocks, stretch=stretch)
        plan, total_k = metadata.segments(maker.rng, blocks, size, count, cover=out == "none", hostile=hostile)
        segments = maker.place("load_segments", plan)
        result = None if out == "none" else load_output(maker, layout, total_k, out)
        return {"kv_cache": cache, "load_segments": segments, "total_k": total_k, "out": result, "layout": layout}

    return make


def load_output(maker: Maker, layout: KVCacheFormat, total_k: int, kind: str) -> torch.Tensor | KVCacheTensors:
    """An `out` of a load: "plain" of exactly total_k rows, "rows" a slice of a wider buffer, "misaligned" at odd places."""
    extra, skip, pad = {"plain": (0, 0, 0), "rows": (3, 16, 16), "misaligned": (2, 1, 1)}[kind]
    dtype = DATA_DTYPES[layout.quantized_dtype] if layout.is_index else torch.bfloat16
    width = layout.data_bytes if layout.is_index else layout.elements
    shape = (total_k + extra, 1, width) if kind == "misaligned" else (total_k + extra, width)
    kv = maker.output("out", shape, dtype, row_stride=width + pad, skip=skip)
    if not layout.is_index:
        return kv
    sf_dtype, trailing = sf_output(layout)
    stride = trailing[0] + pad if trailing else None
    sf = maker.output("out.sf", (total_k + extra, *trailing), sf_dtype, row_stride=stride, skip=skip)
    return KVCacheTensors(kv, sf)


def _whole_blocks(layout: KVCacheFormat, size: int) -> Callable[[Maker], dict[str, Any]]:
    def make(maker: Maker) -> dict[str, Any]:
        cache = maker.cache(layout, 2, size)
        plan = np.array([[1, 0, size, 0], [-1, 0, size, size], [0, 0, size, 2 * size]], np.int32)
        return {"kv_cache": cache, "load_segments": maker.place("load_segments", plan), "total_k": 3 * size, "layout": layout}

    return make


def load_slots_cases(layout: KVCacheFormat) -> list[Case]:
    """Cases of `load_kv_slots`."""
    first, second = block_sizes(layout)

    def case(name: str, make: Callable[[Maker], dict[str, Any]], size: int = first, **more: Any) -> Case:
        return Case(Op.LOAD_SLOTS, layout, f"{name}-b{size}", make, size, **more)

    found = [
        case("int64", _slots(layout, first, Shape())),
        case("int32-rows", _slots(layout, second, Shape(wide=False, row_stride=16, skip=16)), second),
        case("subcache-misaligned", _slots(layout, second, Shape(row_stride=1, skip=1, skip_blocks=2, stretch=2)), second),
        case("no-blocks", _slots(layout, first, Shape(), blocks=0)),
        case("no-slots", _no_slots(layout, first)),
    ]
    found += [
        case("int64", _slots(layout, size, Shape()), size, quick=False) for size in BLOCK_SIZES if size not in (first, second)
    ]
    return found


def _slots(layout: KVCacheFormat, size: int, shape: Shape, blocks: int | None = None) -> Callable[[Maker], dict[str, Any]]:
    def make(maker: Maker) -> dict[str, Any]:
        count = blocks_for(12, size) if blocks is None else blocks
        cache = maker.cache(layout, count, size, skip_blocks=shape.skip_blocks, stretch=shape.stretch)
        slots = metadata.slots(maker.rng, count * size, 12, shape.wide, unique=False)
        slots = slots[: len(slots) // 4 * 4].reshape(2, 2, -1)
        out = None
        if shape.row_stride is not None:
            step, n = layout.elements + shape.row_stride, slots.shape[2]
            strides = (2 * n * step, n * step, step, 1)
            out = maker.output("out", (*slots.shape, layout.elements), torch.bfloat16, strides=strides, skip=shape.skip)
        return {"kv_cache": cache, "slots": maker.place("slots", slots), "out": out, "layout": layout}

    return make


def _no_slots(layout: KVCacheFormat, size: int) -> Callable[[Maker], dict[str, Any]]:
    def make(maker: Maker) -> dict[str, Any]:
        slots = maker.place("slots", np.empty((2, 0), np.int64))
        return {"kv_cache": maker.cache(layout, 2, size), "slots": slots, "layout": layout}

    return make
