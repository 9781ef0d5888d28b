"""Caches that do not fit, and bad arguments of a store: each is refused with a text that names it, and nothing is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvhal
from kvhal import MXFP8_INDEX_KV_FORMAT, V41_FP4_FORMAT, Op
from tests.faults.calls import BLOCK_SIZE, BLOCKS, Change, good, refuse

Entry = tuple[Change, type[Exception], tuple[str, ...]]


def test_the_good_calls_are_good() -> None:
    for op in Op:
        kvhal.configure(strict=True)
        good(op)()


def other_stride(cache: torch.Tensor) -> torch.Tensor:
    """Blocks that overlap."""
    return cache.as_strided(cache.shape, (528, 528, 528, 1))


def off_by(cache: torch.Tensor, count: int) -> torch.Tensor:
    return cache.flatten()[count : count + 2 * cache.stride(0)].as_strided((2, BLOCK_SIZE, 1, 528), cache.stride())


#: what is wrong with a cache, for every operation that takes one
CACHES: dict[str, Entry] = {
    "type": (lambda c: {"kv_cache": 3}, TypeError, ("kv_cache: has a int, needs a torch.Tensor",)),
    "dtype": (
        lambda c: {"kv_cache": c["kv_cache"].view(torch.int8)},
        ValueError,
        ("kv_cache: has dtype torch.int8, needs torch.uint8 or torch.bfloat16",),
    ),
    "rank": (
        lambda c: {"kv_cache": c["kv_cache"][:, :, 0]},
        ValueError,
        ("kv_cache: has shape (3, 4, 528), needs [num_blocks, block_size, 1, record]",),
    ),
    "width": (
        lambda c: {"kv_cache": c["kv_cache"][..., :500]},
        ValueError,
        ("kv_cache: has dtype torch.uint8 and last dimension 500, needs torch.uint8 and 528 for layout V41_FORMAT",),
    ),
    "width-inferred": (
        lambda c: {"kv_cache": c["kv_cache"][..., :500], "layout": None},
        ValueError,
        (
            "kv_cache: has dtype torch.uint8 and last dimension 500, no built-in format fits",
            "V41_FORMAT (528 bytes)",
            "layout=",
        ),
    ),
    "other-format": (
        lambda c: {"layout": V41_FP4_FORMAT},
        ValueError,
        ("kv_cache: has dtype torch.uint8 and last dimension 528, needs torch.uint8 and 288 for layout V41_FP4_FORMAT",),
    ),
    "layout-name": (lambda c: {"layout": "V41"}, ValueError, ("layout: has 'V41', needs a KVCacheFormat or None",)),
    "layout-unhashable": (lambda c: {"layout": {}}, ValueError, ("layout: has {}, needs a KVCacheFormat or None",)),
    "overlap": (
        lambda c: {"kv_cache": other_stride(c["kv_cache"])},
        ValueError,
        ("kv_cache: has a block stride of 528 bytes, needs a multiple of 32 that holds 2112 bytes", "alloc_kv_cache"),
    ),
    "token-stride": (
        lambda c: {"kv_cache": c["kv_cache"][:, ::2]},
        ValueError,
        ("kv_cache: has strides (2112, 1056, 528, 1), needs (block stride, 528, 528, 1)",),
    ),
    "misaligned": (
        lambda c: {"kv_cache": off_by(c["kv_cache"], 528)},
        ValueError,
        ("kv_cache: starts at an address that is 16 past a multiple of 32 bytes, needs 0", "slice whole blocks"),
    ),
    "no-block-size": (
        lambda c: {"kv_cache": c["kv_cache"][:, :0]},
        ValueError,
        ("kv_cache: has block_size 0, needs >= 1",),
    ),
}


@pytest.mark.parametrize("op", [Op.STORE, Op.LOAD, Op.LOAD_SLOTS])
@pytest.mark.parametrize("what", CACHES)
def test_cache(op: Op, what: str) -> None:
    change, error, fragments = CACHES[what]
    refuse(good(op), change, error, *fragments)


@pytest.mark.parametrize("op", [Op.STORE, Op.LOAD, Op.LOAD_SLOTS])
def test_a_132_byte_record_is_ambiguous(op: Op) -> None:
    for layout in (MXFP8_INDEX_KV_FORMAT, kvhal.FP8_FLOAT32_SF_INDEX_KV_FORMAT):
        both = (
            "FP8_FLOAT32_SF_INDEX_KV_FORMAT (sf_format='fp32')",
            "MXFP8_INDEX_KV_FORMAT (sf_format='ue8m0')",
            "pass layout= or sf_format=",
        )
        refuse(good(op, layout), lambda c: {"layout": None}, ValueError, "kv_cache: a record of 132 bytes is ambiguous", *both)


def kv(change: Any) -> Change:
    return lambda c: {"kv": change(c["kv"])}


def slots(change: Any) -> Change:
    return lambda c: {"slot_mapping": change(c["slot_mapping"])}


STORES: dict[str, Entry] = {
    "kv-type": (kv(lambda t: t.tolist()), TypeError, ("kv: has a list, needs a torch.Tensor",)),
    "kv-dtype": (kv(lambda t: t.float()), ValueError, ("kv: has dtype torch.float32, needs torch.bfloat16",)),
    "kv-width": (
        kv(lambda t: t[:, :511]),
        ValueError,
        ("kv: has shape (5, 511): 511 elements a record, needs 512 elements a record",),
    ),
    "kv-rank": (kv(lambda t: t[0]), ValueError, ("kv: has shape (512,), needs [n, 512] or [n, ..., 512 elements in all]",)),
    "kv-count": (kv(lambda t: t[:4]), ValueError, ("kv: has 4 rows, needs 5, one a token",)),
    "kv-stride": (
        kv(lambda t: t.t().contiguous().t()),
        ValueError,
        ("kv: has strides (1, 5), needs each record contiguous; pass kv.contiguous()",),
    ),
    "kv-inner-stride": (
        kv(lambda t: torch.cat([t, t], 1)[:, ::2].unflatten(1, (2, 256))),
        ValueError,
        ("kv: has strides (1024, 512, 2), needs each record contiguous",),
    ),
    "kv-device": (
        kv(lambda t: t.to("meta")),
        ValueError,
        ("kv: has device meta, needs cpu, where kv_cache is; move it with kv.to('cpu')",),
    ),
    "slots-type": (slots(lambda t: t.tolist()), TypeError, ("slot_mapping: has a list, needs a torch.Tensor",)),
    "slots-dtype": (
        slots(lambda t: t.short()),
        ValueError,
        ("slot_mapping: has dtype torch.int16, needs torch.int32 or torch.int64",),
    ),
    "slots-float": (slots(lambda t: t.float()), ValueError, ("slot_mapping: has dtype torch.float32, needs torch.int32",)),
    "slots-rank": (slots(lambda t: t[None]), ValueError, ("slot_mapping: has shape (1, 5), needs 1 dimensions",)),
    "slots-stride": (
        slots(lambda t: t.repeat(2)[::2]),
        ValueError,
        ("slot_mapping: has strides (2,), needs a contiguous tensor; pass slot_mapping.contiguous()",),
    ),
    "slots-device": (
        slots(lambda t: t.to("meta")),
        ValueError,
        ("slot_mapping: has device meta, needs cpu, where kv_cache is",),
    ),
}


@pytest.mark.parametrize("what", STORES)
def test_store(what: str) -> None:
    change, error, fragments = STORES[what]
    refuse(good(Op.STORE), change, error, *fragments)


def test_blocks_are_what_the_fixture_says() -> None:
    assert good(Op.STORE).arguments["kv_cache"].shape == (BLOCKS, BLOCK_SIZE, 1, 528)
