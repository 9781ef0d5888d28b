"""Programmatic dependent launch: a kernel that starts before the one in front of it has ended reads nothing stale."""

from __future__ import annotations

import pytest
import torch

import kvhal
from kvhal.formats import V41_FORMAT
from kvhal.layout import alloc_kv_cache
from kvhal.numerics import dequantize, quantize

pytestmark = pytest.mark.gpu
BACKENDS = ("cuda_tilelang", "portable_triton")


def same(have: torch.Tensor, need: torch.Tensor) -> bool:
    return torch.equal(have.contiguous().view(torch.uint8), need.contiguous().view(torch.uint8))


@pytest.mark.parametrize("consumer", BACKENDS)
@pytest.mark.parametrize("producer", BACKENDS)
def test_dependent_launches_see_fresh_metadata(producer: str, consumer: str) -> None:
    """kv_index_cat writes slots and segments; store and loads that follow must see them, every time."""
    rounds, n = 2000, 96
    cache = alloc_kv_cache(rounds // 64 + 4, 64, V41_FORMAT, "cuda")
    empty = torch.empty((n, 0), dtype=torch.int32, device="cuda")
    right = torch.arange(n, dtype=torch.int32, device="cuda")[:, None]
    kv = torch.randn((rounds, n, 512), device="cuda").to(torch.bfloat16)
    slots = torch.full((n, 1), -1, dtype=torch.int32, device="cuda")
    whole = torch.tensor([[0, 0, 64], [1, 0, 64]], dtype=torch.int32, device="cuda")
    place = torch.tensor([[0], [64]], dtype=torch.int32, device="cuda")
    segments = torch.full((2, 4), -1, dtype=torch.int32, device="cuda")
    read = torch.empty((rounds, n, 512), dtype=torch.bfloat16, device="cuda")
    loaded = torch.zeros((rounds + 128, 512), dtype=torch.bfloat16, device="cuda")
    with kvhal.use_backend(consumer), kvhal.use_backend(producer, ops=[kvhal.Op.INDEX_CAT]):
        for i in range(rounds):
            kvhal.kv_index_cat(empty, right, i, 0, out=slots)
            kvhal.store_kv_cache(kv[i], cache, slots.view(-1))
            kvhal.load_kv_slots(cache, slots.view(-1), read[i])
            kvhal.kv_index_cat(whole, place, i, 0, out=segments)
            kvhal.load_paged_kv_cache(cache, segments, rounds + 128, loaded)
    records = quantize(kv.view(-1, 512), V41_FORMAT)
    assert same(read.view(-1, 512), dequantize(*records, V41_FORMAT))
    first = kvhal.load_kv_slots(cache, torch.zeros(1, dtype=torch.int64, device="cuda"))
    assert same(loaded[:rounds], first.expand(rounds, -1))
