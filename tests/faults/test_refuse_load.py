"""Loads refuse bad arguments with a text that names them, and write nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvhal import MXFP8_INDEX_KV_FORMAT, V41_FORMAT, KVCacheTensors, Op
from tests.faults.calls import Change, good, refuse

Entry = tuple[Change, type[Exception], tuple[str, ...]]


def segments(change: Any) -> Change:
    return lambda c: {"load_segments": change(c["load_segments"])}


def out(change: Any) -> Change:
    return lambda c: {"out": change(c["out"])}


LOADS: dict[str, Entry] = {
    "segments-dtype": (segments(lambda t: t.long()), ValueError, ("load_segments: has dtype torch.int64, needs torch.int32",)),
    "segments-rank": (segments(lambda t: t[0]), ValueError, ("load_segments: has shape (4,), needs 2 dimensions",)),
    "segments-width": (segments(lambda t: t[:, :3]), ValueError, ("load_segments: has shape (3, 3), needs 4 columns",)),
    "segments-stride": (
        segments(lambda t: t.repeat(1, 2)[:, :4]),
        ValueError,
        ("load_segments: has strides (8, 1), needs a contiguous tensor",),
    ),
    "segments-device": (
        segments(lambda t: t.to("meta")),
        ValueError,
        ("load_segments: has device meta, needs cpu, where kv_cache is",),
    ),
    "total-negative": (lambda c: {"total_k": -1}, ValueError, ("total_k: has -1, needs 0 <= total_k <= 2147483647",)),
    "total-large": (lambda c: {"total_k": 2**31}, ValueError, ("total_k: has 2147483648, needs",)),
    "total-float": (lambda c: {"total_k": 9.0}, TypeError, ("total_k: has 9.0, needs an int",)),
    "total-bool": (lambda c: {"total_k": True}, TypeError, ("total_k: has True, needs an int",)),
    "out-rows": (out(lambda t: t[:8]), ValueError, ("out: has 8 rows, needs at least total_k = 9",)),
    "out-width": (out(lambda t: t[:, :511]), ValueError, ("out: has shape (9, 511): 511 elements a record, needs 512",)),
    "out-dtype": (out(lambda t: t.float()), ValueError, ("out: has dtype torch.float32, needs torch.bfloat16",)),
    "out-stride": (
        out(lambda t: t.t().contiguous().t()),
        ValueError,
        ("out: has strides (1, 9), needs each record contiguous; pass rows of a row-major buffer",),
    ),
    "out-overlap": (
        out(lambda t: t[:1].expand(9, -1)),
        ValueError,
        ("out: has strides (0, 1), needs rows that do not overlap",),
    ),
    "out-device": (out(lambda t: t.to("meta")), ValueError, ("out: has device meta, needs cpu, where kv_cache is",)),
    "out-type": (out(lambda t: 3), TypeError, ("out: has a int, needs a torch.Tensor, a KVCacheTensors or None",)),
    "out-scales": (
        out(lambda t: KVCacheTensors(t, t)),
        ValueError,
        ("out: has scales, needs a bf16 tensor, or a KVCacheTensors with sf=None for layout V41_FORMAT",),
    ),
    "sf-format": (
        lambda c: {"sf_format": "fp32"},
        ValueError,
        ("sf_format: has 'fp32', but layout V41_FORMAT has 'ue8m0'",),
    ),
    "sf-format-unknown": (
        lambda c: {"sf_format": "fp16", "layout": None},
        ValueError,
        ("kv_cache: has dtype torch.uint8 and last dimension 528 with sf_format 'fp16', no built-in format fits",),
    ),
}

INDEX_LOADS: dict[str, Entry] = {
    "no-scales": (
        out(lambda t: t.kv),
        ValueError,
        ("out: has no scales, needs a KVCacheTensors with scales for layout MXFP8",),
    ),
    "kv-dtype": (
        out(lambda t: t._replace(kv=t.kv.view(torch.uint8))),
        ValueError,
        ("out: has dtype torch.uint8, needs torch.float8_e4m3fn",),
    ),
    "sf-dtype": (
        out(lambda t: t._replace(sf=t.sf.view(torch.float32))),
        ValueError,
        ("out.sf: has dtype torch.float32, needs torch.int32",),
    ),
    "sf-rank": (out(lambda t: t._replace(sf=t.sf[:, None])), ValueError, ("out.sf: has shape (9, 1), needs 1 dimensions",)),
    "sf-rows": (out(lambda t: t._replace(sf=t.sf[:8])), ValueError, ("out.sf: has 8 rows, needs at least total_k = 9",)),
    "sf-stride": (
        out(lambda t: t._replace(sf=t.sf.repeat(2)[::2])),
        ValueError,
        ("out.sf: has strides (2,), needs a contiguous tensor; pass a slice of a contiguous buffer",),
    ),
    "sf-device": (out(lambda t: t._replace(sf=t.sf.to("meta"))), ValueError, ("out.sf: has device meta, needs cpu",)),
}


@pytest.mark.parametrize("what", LOADS)
def test_load(what: str) -> None:
    change, error, fragments = LOADS[what]
    refuse(good(Op.LOAD), change, error, *fragments)


@pytest.mark.parametrize("what", INDEX_LOADS)
def test_load_of_an_index_layout(what: str) -> None:
    change, error, fragments = INDEX_LOADS[what]
    refuse(good(Op.LOAD, MXFP8_INDEX_KV_FORMAT), change, error, *fragments)


SLOT_LOADS: dict[str, Entry] = {
    "dtype": (lambda c: {"slots": c["slots"].short()}, ValueError, ("slots: has dtype torch.int16, needs torch.int32",)),
    "stride": (lambda c: {"slots": c["slots"].t()}, ValueError, ("slots: has strides (1, 3), needs a contiguous tensor",)),
    "device": (
        lambda c: {"slots": c["slots"].to("meta")},
        ValueError,
        ("slots: has device meta, needs cpu, where kv_cache is",),
    ),
    "out-shape": (
        lambda c: {"out": c["out"].flatten(0, 1)},
        ValueError,
        ("out: has shape (6, 512), needs (2, 3, 512), one record a slot",),
    ),
    "out-dtype": (lambda c: {"out": c["out"].half()}, ValueError, ("out: has dtype torch.float16, needs torch.bfloat16",)),
    "out-stride": (
        lambda c: {"out": torch.empty(3, 2, 512, dtype=torch.bfloat16).transpose(0, 1)},
        ValueError,
        ("out: has strides (512, 1024, 1), needs rows of one stride",),
    ),
    "out-overlap": (
        lambda c: {"out": c["out"][:1, :1].expand(2, 3, 512)},
        ValueError,
        ("out: has strides",),
    ),
    "out-device": (lambda c: {"out": c["out"].to("meta")}, ValueError, ("out: has device meta, needs cpu",)),
}


@pytest.mark.parametrize("what", SLOT_LOADS)
def test_load_slots(what: str) -> None:
    change, error, fragments = SLOT_LOADS[what]
    refuse(good(Op.LOAD_SLOTS), change, error, *fragments)


def test_a_layout_of_the_same_width_is_still_checked_against_sf_format() -> None:
    other = replace(V41_FORMAT, sf_format="fp32", elements_per_sf=128)
    assert other.bytes_per_token == V41_FORMAT.bytes_per_token == 528
    refuse(good(Op.LOAD), lambda c: {"layout": other, "sf_format": "ue8m0"}, ValueError, "sf_format: has 'ue8m0', but layout")
