"""Calls with nothing to do: they return at once, whatever the backend, and write nothing."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import kvhal
from kvhal import Op, binding
from kvhal.ops import fused_calls
from kvhal.testing.case import PUBLIC
from tests.faults.calls import good


def first(arguments: dict[str, Any], count: int) -> dict[str, Any]:
    """A fused store of the first `count` tokens."""
    rope, out = arguments["rope_args"], arguments["out_args"]
    return {
        "kv": arguments["kv"][:count],
        "rope_args": replace(rope, positions=rope.positions[:count]),
        "out_args": replace(out, slot_mapping=out.slot_mapping[:count]),
    }


EMPTY: dict[str, tuple[Op, Any]] = {
    "store": (Op.STORE, lambda c: {"kv": c["kv"][:0], "slot_mapping": c["slot_mapping"][:0]}),
    "store-no-blocks": (Op.STORE, lambda c: {"kv_cache": c["kv_cache"][:0]}),
    "load-no-segments": (Op.LOAD, lambda c: {"load_segments": c["load_segments"][:0]}),
    "load-no-rows": (Op.LOAD, lambda c: {"total_k": 0}),
    "slots": (Op.LOAD_SLOTS, lambda c: {"slots": c["slots"][:0], "out": c["out"][:0]}),
    "fused": (Op.FUSED_STORE, lambda c: first(c, 0)),
    "fused-no-blocks": (Op.FUSED_STORE, lambda c: {"out_args": replace(c["out_args"], kv_cache=c["out_args"].kv_cache[:0])}),
    "convert-no-sequence": (Op.CONVERT_INDEX, lambda c: {n: c[n][:0] for n in ("topk_idxs", "block_tables", "context_lens")}),
    "convert-no-entry": (Op.CONVERT_INDEX, lambda c: {"topk_idxs": c["topk_idxs"][:, :, :0]}),
    "cat-no-row": (Op.INDEX_CAT, lambda c: {n: c[n][:0] for n in ("left", "right", "out")}),
    "cat-no-column": (Op.INDEX_CAT, lambda c: {n: c[n][:, :0] for n in ("left", "right", "out")}),
    "expand-no-row": (Op.EXPAND_SWA_INDEX, lambda c: {"pivots": c["pivots"][:0], "out": c["out"][:0]}),
    "expand-no-column": (Op.EXPAND_SWA_INDEX, lambda c: {"width": 0, "out": c["out"][:, :0]}),
    "decode-no-row": (
        Op.DECODE_SWA_INDEX,
        lambda c: {"kv_swa_index_offset_len": c["kv_swa_index_offset_len"][:0], "out": c["out"][:0]},
    ),
    "plan-no-segment": (Op.EXPAND_LOAD_PLAN, lambda c: {"num_segments": 0, "out": c["out"][:0]}),
    "decode-no-column": (Op.DECODE_SWA_INDEX, lambda c: {"window_size": 0, "out": c["out"][:, :0]}),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("what", EMPTY)
def test_nothing_is_launched(what: str, strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("a launcher was asked for")

    for module in (binding, fused_calls):
        monkeypatch.setattr(module, "launcher", fail)
    kvhal.configure(strict=strict)
    op, change = EMPTY[what]
    call = good(op)
    before = {name: buffer.bytes() for name, buffer in call.buffers.items()}
    no_slot = strict and "no-blocks" in what  # slots that lie in no block
    with pytest.raises(kvhal.InvalidMetadata, match=r"slot_mapping\[0\]: has 3") if no_slot else nullcontext():
        PUBLIC[op](**{**call.arguments, **change(call.arguments)})
    for name, buffer in call.buffers.items():
        assert np.array_equal(buffer.bytes(), before[name]), name


def test_empty_results_have_their_shapes() -> None:
    cache = kvhal.alloc_kv_cache(2, 4, kvhal.V41_FORMAT, "cpu")
    none = torch.empty((0, 4), dtype=torch.int32)
    assert kvhal.load_paged_kv_cache(cache, none, 0).kv.shape == (0, 512)
    index = kvhal.alloc_kv_cache(2, 4, kvhal.MXFP8_INDEX_KV_FORMAT, "cpu")
    kv, sf = kvhal.load_paged_kv_cache(index, none, 0, sf_format="ue8m0")
    assert (kv.shape, kv.dtype) == ((0, 128), torch.float8_e4m3fn)
    assert sf is not None and (sf.shape, sf.dtype) == ((0,), torch.int32)
    assert kvhal.load_kv_slots(cache, torch.empty((3, 0), dtype=torch.int64)).shape == (3, 0, 512)
    back = kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
        torch.empty((0, 512), dtype=torch.bfloat16), cast_args=kvhal.CastArgs.for_layout(kvhal.V41_FORMAT, cast_back=True)
    )
    assert back is not None and back.shape == (0, 512)
    assert kvhal.expand_swa_index(none, 7).shape == (0, 7)


def test_a_cache_without_blocks_reads_as_zeros() -> None:
    cache = kvhal.alloc_kv_cache(0, 4, kvhal.V41_FORMAT, "cpu")
    segments = torch.tensor([[0, 0, 2, 0], [-1, 0, 1, 2]], dtype=torch.int32)
    assert not kvhal.load_paged_kv_cache(cache, segments, 3).kv.view(torch.int16).any()
    assert not kvhal.load_kv_slots(cache, torch.tensor([0, 5, -1])).view(torch.int16).any()
