"""One good call of every operation, to be spoilt in one place by a test; and the check that a refusal wrote nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kvhal
from kvhal import CastArgs, KVCacheFormat, KVCacheOutArgs, NormArgs, Op, RopeArgs
from kvhal.testing.cache_cases import load_output
from kvhal.testing.case import Call
from kvhal.testing.maker import Maker
from kvhal.testing.values import plain_rows

BLOCKS, BLOCK_SIZE, TOKENS = 3, 4, 5
CAPACITY = BLOCKS * BLOCK_SIZE
Change = Callable[[dict[str, Any]], dict[str, Any]]


def good(op: Op, layout: KVCacheFormat = kvhal.V41_FORMAT) -> Call:
    """A call that every backend must accept, in strict mode too, on guarded buffers."""
    maker = Maker(f"good {op}")
    return Call(op, MAKE[op](maker, layout), maker.buffers)


def refuse(call: Call, change: Change, error: type[Exception], *fragments: str) -> None:
    """The spoilt call raises `error`, its text begins with the first fragment and holds all, and no byte changed."""
    before = {name: buffer.bytes() for name, buffer in call.buffers.items()}
    arguments = {**call.arguments, **change(call.arguments)}
    with pytest.raises(error) as raised:
        Call(call.op, arguments, call.buffers)()
    text = str(raised.value)
    assert text.startswith(fragments[0]), text
    for fragment in fragments[1:]:
        assert fragment in text, text
    for name, buffer in call.buffers.items():
        assert np.array_equal(buffer.bytes(), before[name]), f"{name} was written before the refusal: {text}"


def _store(maker: Maker, layout: KVCacheFormat) -> dict[str, Any]:
    return {
        "kv": maker.place("kv", plain_rows(maker.rng, TOKENS, layout.elements), dtype=torch.bfloat16),
        "kv_cache": maker.cache(layout, BLOCKS, BLOCK_SIZE, written=True),
        "slot_mapping": maker.place("slot_mapping", np.array([3, 0, -1, 11, 7])),
        "layout": layout,
    }


def _load(maker: Maker, layout: KVCacheFormat) -> dict[str, Any]:
    plan = np.array([[0, 1, 4, 0], [-1, 0, 2, 3], [2, 0, 4, 5]], np.int32)
    return {
        "kv_cache": maker.cache(layout, BLOCKS, BLOCK_SIZE),
        "load_segments": maker.place("load_segments", plan),
        "total_k": 9,
        "out": load_output(maker, layout, 9, "plain"),
        "layout": layout,
    }


def _load_slots(maker: Maker, layout: KVCacheFormat) -> dict[str, Any]:
    return {
        "kv_cache": maker.cache(layout, BLOCKS, BLOCK_SIZE),
        "slots": maker.place("slots", np.array([[3, 0, -1], [11, 3, 7]])),
        "out": maker.output("out", (2, 3, layout.elements), torch.bfloat16),
        "layout": layout,
    }


def _fused(maker: Maker, layout: KVCacheFormat) -> dict[str, Any]:
    store = _store(maker, layout)
    table = maker.rng.uniform(-1, 1, (6, 16)).astype(np.float32)
    positions = maker.place("positions", np.array([0, 5, 2, 3, 1]))
    weight = maker.place("weight", np.ones(layout.elements, np.float32))
    return {
        "kv": store["kv"],
        "norm_args": NormArgs(weight),
        "rope_args": RopeArgs(positions, maker.place("cos_sin_cache", table), 16),
        "cast_args": CastArgs.for_layout(layout),
        "out_args": KVCacheOutArgs(store["kv_cache"], store["slot_mapping"], layout),
    }


def _convert(maker: Maker, layout: KVCacheFormat) -> dict[str, Any]:
    return {
        "topk_idxs": maker.place("topk_idxs", np.arange(12, dtype=np.int32).reshape(2, 2, 3), written=True),
        "block_tables": maker.place("block_tables", np.array([[5, 1, 9], [0, 3, 2]], np.int32)),
        "context_lens": maker.place("context_lens", np.array([[3, 2], [1, 3]], np.int32)),
        "block_size": 4,
    }


def _cat(maker: Maker, layout: KVCacheFormat) -> dict[str, Any]:
    return {
        "left": maker.place("left", np.arange(6, dtype=np.int32).reshape(2, 3)),
        "right": maker.place("right", np.array([[0, 4, -1, 2], [1, -1, -1, 9]], np.int32)),
        "total_k_swa_cached": 8,
        "total_k_swa_cur": 2,
        "out": maker.output("out", (2, 7), torch.int32),
    }


def _expand(maker: Maker, layout: KVCacheFormat) -> dict[str, Any]:
    return {
        "pivots": maker.place("pivots", np.array([[4, 2, 9, 3], [0, 0, 7, 5]], np.int32)),
        "width": 6,
        "out": maker.output("out", (2, 6), torch.int32),
    }


def _decode(maker: Maker, layout: KVCacheFormat) -> dict[str, Any]:
    return {
        "kv_swa_index_offset_len": maker.place("windows", np.array([[13, 5], [-1, 0]], np.int32)),
        "window_size": 6,
        "swa_block_size": 8,
        "out": maker.output("out", (2, 6), torch.int32),
    }


def _expand_plan(maker: Maker, layout: KVCacheFormat) -> dict[str, Any]:
    spans = np.array([[0, 0, 1, 2, 9], [3, 7, -1, 0, 1], [4, 8, 0, 4, 6]], np.int32)
    return {
        "spans": maker.place("spans", spans),
        "block_tables": maker.place("block_tables", np.array([[5, 1, -1], [0, 3, 2]], np.int32)),
        "block_size": 4,
        "num_segments": 5,
        "out": maker.output("out", (5, 4), torch.int32),
    }


MAKE: dict[Op, Callable[[Maker, KVCacheFormat], dict[str, Any]]] = {
    Op.STORE: _store,
    Op.LOAD: _load,
    Op.LOAD_SLOTS: _load_slots,
    Op.FUSED_STORE: _fused,
    Op.CONVERT_INDEX: _convert,
    Op.INDEX_CAT: _cat,
    Op.EXPAND_SWA_INDEX: _expand,
    Op.DECODE_SWA_INDEX: _decode,
    Op.EXPAND_LOAD_PLAN: _expand_plan,
}
