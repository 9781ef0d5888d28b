"""What the public functions promise beside the bytes: results, inference, defaults, warm-up, threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

import kvhal
from kvhal import (
    FP8_FLOAT32_SF_INDEX_KV_FORMAT,
    MXFP8_INDEX_KV_FORMAT,
    SUPPORTED_KV_CACHE_FORMATS,
    V41_FORMAT,
    CastArgs,
    KVCacheFormat,
    KVCacheOutArgs,
    KVCacheTensors,
    Op,
)
from kvhal.config import current
from kvhal.interface import FORMAT_OPS


def filled(layout: KVCacheFormat, blocks: int = 3, size: int = 4) -> torch.Tensor:
    cache = kvhal.alloc_kv_cache(blocks, size, layout, "cpu")
    rows = torch.randn(blocks * size, layout.elements, generator=torch.Generator().manual_seed(1)).bfloat16()
    kvhal.store_kv_cache(rows, cache, torch.arange(blocks * size), layout=layout)
    return cache


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


SEGMENTS = torch.tensor([[1, 0, 4, 0], [0, 2, 3, 4]], dtype=torch.int32)


def test_layouts_are_inferred_by_every_operation() -> None:
    cache = filled(V41_FORMAT)
    rows = torch.randn(2, 1, 512).bfloat16()
    explicit = filled(V41_FORMAT)
    kvhal.store_kv_cache(rows, cache, torch.tensor([0, 5]))
    kvhal.store_kv_cache(rows, explicit, torch.tensor([0, 5]), layout=V41_FORMAT)
    assert same(cache, explicit)
    assert same(kvhal.load_paged_kv_cache(cache, SEGMENTS, 5).kv, kvhal.load_kv_slots(cache, torch.tensor([4, 5, 6, 7, 2])))
    kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
        rows, cast_args=CastArgs.for_layout(V41_FORMAT), out_args=KVCacheOutArgs(cache, torch.tensor([7, 8]))
    )
    assert same(kvhal.load_kv_slots(cache, torch.tensor([7, 8])), kvhal.load_kv_slots(cache, torch.tensor([0, 5])))


def test_a_scale_format_is_enough_for_132_byte_records() -> None:
    for layout in (MXFP8_INDEX_KV_FORMAT, FP8_FLOAT32_SF_INDEX_KV_FORMAT):
        cache = filled(layout)
        by_layout = kvhal.load_paged_kv_cache(cache, SEGMENTS, 5, layout=layout)
        by_scale = kvhal.load_paged_kv_cache(cache, SEGMENTS, 5, sf_format=layout.sf_format)
        assert by_layout.sf is not None and by_scale.sf is not None
        assert same(by_layout.kv, by_scale.kv) and same(by_layout.sf, by_scale.sf)


def test_out_comes_back_as_it_was_passed() -> None:
    cache = filled(V41_FORMAT)
    buffer = torch.zeros(9, 1, 512, dtype=torch.bfloat16)
    result = kvhal.load_paged_kv_cache(cache, SEGMENTS, 5, buffer[2:])
    assert result.kv.data_ptr() == buffer[2:].data_ptr() and result.kv.shape == (7, 1, 512) and result.sf is None
    pair = KVCacheTensors(buffer[2:, 0], None)
    assert kvhal.load_paged_kv_cache(cache, SEGMENTS, 5, pair).kv is pair.kv
    index = filled(MXFP8_INDEX_KV_FORMAT)
    fresh = kvhal.load_paged_kv_cache(index, SEGMENTS, 5, layout=MXFP8_INDEX_KV_FORMAT)
    again = kvhal.load_paged_kv_cache(index, SEGMENTS, 5, tuple(fresh), layout=MXFP8_INDEX_KV_FORMAT)  # type: ignore[arg-type]
    assert isinstance(again, KVCacheTensors) and again.kv is fresh.kv and again.sf is fresh.sf
    out = torch.zeros(2, 512, dtype=torch.bfloat16)
    assert kvhal.load_kv_slots(cache, torch.tensor([3, 1]), out) is out
    topk = torch.zeros(1, 1, 2, dtype=torch.int32)
    ones = torch.ones(1, 1, dtype=torch.int32)
    assert kvhal.convert_kv_index(topk, ones, ones, 4) is topk
    table = torch.zeros(1, 4, dtype=torch.int32)
    assert kvhal.expand_swa_index(torch.tensor([[5, 2, 0, 0]], dtype=torch.int32), 4, table) is table
    assert kvhal.get_kv_swa_index_decode(torch.tensor([[5, 2]], dtype=torch.int32), 4, 4, table) is table
    assert kvhal.expand_load_plan(torch.zeros(1, 5, dtype=torch.int32), ones, 4, 1, table) is table
    assert kvhal.kv_index_cat(topk[0], ones.repeat(1, 2), 3, 4, table) is table


def test_rows_that_no_segment_covers_keep_their_values() -> None:
    out = torch.full((8, 512), 7.0, dtype=torch.bfloat16)
    kvhal.load_paged_kv_cache(filled(V41_FORMAT), torch.tensor([[0, 0, 2, 3]], dtype=torch.int32), 6, out)
    assert [bool((row == 7).all()) for row in out] == [True, True, True, False, False, True, True, True]


def test_index_layouts_are_dequantised_by_slot() -> None:
    for layout in (MXFP8_INDEX_KV_FORMAT, FP8_FLOAT32_SF_INDEX_KV_FORMAT):
        rows = kvhal.load_kv_slots(filled(layout), torch.tensor([[2, -1]]), layout=layout)
        assert rows.shape == (1, 2, 128) and rows.dtype == torch.bfloat16
        assert rows[0, 0].float().abs().sum() > 1 and not rows[0, 1].any()


def test_one_slot_as_a_scalar_tensor() -> None:
    cache = filled(V41_FORMAT)
    assert kvhal.load_kv_slots(cache, torch.tensor(3)).shape == (512,)
    assert not kvhal.load_kv_slots(cache, torch.tensor(12)).any()
    kvhal.configure(strict=True)
    with pytest.raises(kvhal.InvalidMetadata, match=r"slots\[\]: has 12, needs -1 or 0 <= slot < 12"):
        kvhal.load_kv_slots(cache, torch.tensor(12))


def test_numpy_integers_are_integers() -> None:
    cache = filled(V41_FORMAT)
    result = kvhal.load_paged_kv_cache(cache, SEGMENTS, np.int64(5))  # type: ignore[arg-type]
    assert same(result.kv, kvhal.load_paged_kv_cache(cache, SEGMENTS, 5).kv)
    pivots = torch.tensor([[5, 2, 0, 0]], dtype=torch.int32)
    assert kvhal.expand_swa_index(pivots, np.int32(3)).tolist() == [[5, 6, -1]]  # type: ignore[arg-type]


def test_strict_mode_changes_no_result() -> None:
    cache = filled(V41_FORMAT)
    plain = kvhal.load_paged_kv_cache(cache, SEGMENTS, 5).kv
    kvhal.configure(strict=True)
    assert same(kvhal.load_paged_kv_cache(cache, SEGMENTS, 5).kv, plain)
    assert same(filled(V41_FORMAT)[:, :, :, :], cache)


def test_a_fused_store_without_a_cache_returns_what_a_load_would() -> None:
    rows = torch.randn(3, 512).bfloat16()
    cache = filled(V41_FORMAT)
    kvhal.store_kv_cache(rows, cache, torch.tensor([1, 2, 3]))
    back = kvhal.fused_norm_rope_hadamard_cast_store_kvcache(rows, cast_args=CastArgs.for_layout(V41_FORMAT, cast_back=True))
    assert back is not None and same(back, kvhal.load_kv_slots(cache, torch.tensor([1, 2, 3])))


def test_cast_back_covers_skipped_rows() -> None:
    rows = torch.randn(2, 512).bfloat16()
    cache = filled(V41_FORMAT)
    before = cache.clone()
    back = kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
        rows,
        cast_args=CastArgs.for_layout(V41_FORMAT, cast_back=True),
        out_args=KVCacheOutArgs(cache, torch.tensor([-1, -1])),
    )
    assert back is not None and back.float().abs().sum(1).min() > 1
    assert same(cache, before)


def test_gradients_do_not_enter_a_cache() -> None:
    cache = filled(V41_FORMAT)
    rows = torch.randn(1, 512, dtype=torch.bfloat16, requires_grad=True)
    kvhal.store_kv_cache(rows, cache, torch.tensor([0]))
    assert not cache.requires_grad


@pytest.mark.parametrize("op", Op)
def test_warmup_binds_what_later_calls_use(op: Op) -> None:
    kvhal.configure(backend="reference_torch")
    kvhal.warmup([op], layouts=[V41_FORMAT, MXFP8_INDEX_KV_FORMAT], block_size=4)
    bound = {entry[0] for entry in current().table}
    assert bound == {op}
    assert len(current().table) == (2 if op in FORMAT_OPS else 1)


def test_warmup_of_everything() -> None:
    kvhal.configure(backend="reference_torch", strict=True)
    kvhal.warmup(block_size=3)
    assert len(current().table) == len(FORMAT_OPS) * len(SUPPORTED_KV_CACHE_FORMATS) + len(Op) - len(FORMAT_OPS)
    with pytest.raises(ValueError, match="op: has 'store', needs one of store_kv_cache, load"):
        kvhal.warmup(["store"])


def test_calls_from_many_threads() -> None:
    cache, wrong = filled(V41_FORMAT), []
    want = kvhal.load_paged_kv_cache(cache, SEGMENTS, 5).kv

    def work(strict: bool) -> None:
        for turn in range(20):
            with kvhal.use_backend("reference_torch", ops=["load_paged_kv_cache"] if turn % 2 else None):
                if not same(kvhal.load_paged_kv_cache(cache, SEGMENTS, 5).kv, want):
                    wrong.append(turn)

    threads = [threading.Thread(target=work, args=(number % 2 == 0,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("layout", SUPPORTED_KV_CACHE_FORMATS, ids=str)
@pytest.mark.parametrize("op", FORMAT_OPS)
def test_explain_is_the_decision_that_the_call_takes(op: Op, layout: KVCacheFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    from kvhal import binding

    def note(*arguments: Any) -> Any:
        decision = binding_resolve(*arguments)
        taken.append(decision)
        return decision

    binding_resolve = binding.resolve
    monkeypatch.setattr(binding, "resolve", note)
    kvhal.configure()
    kvhal.warmup([op], layouts=[layout], block_size=4)
    assert taken and all(decision == taken[0] for decision in taken)
    assert kvhal.explain(op, layout=layout, device="cpu", block_size=4) == taken[0]
