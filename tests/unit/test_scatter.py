"""The scatter of reference_torch on caches beyond 2 and 4 GiB, under a model of Ascend's IndexPutV2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvhal.backends.reference_torch.scatter import gather_records, scatter_records
from kvhal.formats import FP4_INDEX_KV_FORMAT, V41_FORMAT, KVCacheFormat
from kvhal.layout import alloc_kv_cache, cache_geometry, split_kv_cache

BLOCK = 64
GIB = 2**30


class IndexPutV2(TorchDispatchMode):
    """A model of the device's fault.

    An `index_put_` into a tensor of several dimensions turns the indices into element offsets, `sum(index * stride)`,
    that it keeps in 32 bits: an offset of 2^31 or more wraps. What wraps below zero is lost here (on the device it
    would go to an address before the cache). A one-dimensional tensor needs no sum, its int64 index is the offset:
    that form works.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dims: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default):
            return func(*args, **(kwargs or {}))
        target, indices, rows = args[:3]
        self.dims.append(target.dim())
        if target.dim() == 1:
            assert indices[0].dtype == torch.int64
            return func(*args, **(kwargs or {}))
        offset = sum(index.long() * stride for index, stride in zip(indices, target.stride(), strict=False))
        assert isinstance(offset, torch.Tensor) and target.dim() == len(indices) + 1 and target.stride(-1) == 1
        wrapped = offset.to(torch.int32).long()
        kept = wrapped >= 0
        flat = target.as_strided((target.untyped_storage().nbytes() // target.element_size(),), (1,), 0)
        places = target.storage_offset() + wrapped[kept].unsqueeze(1) + torch.arange(target.shape[-1])
        flat.index_put_((places,), rows[kept])
        return target


@pytest.fixture(scope="module", params=[V41_FORMAT, FP4_INDEX_KV_FORMAT], ids=str)
def cache(request: pytest.FixtureRequest) -> Iterator[torch.Tensor]:
    """5 GiB of addresses; only the touched pages take memory."""
    layout = request.param
    yield alloc_kv_cache(5 * GIB // cache_geometry(layout, BLOCK).block_stride, BLOCK, layout, "cpu")


def layout_of(cache: torch.Tensor) -> KVCacheFormat:
    return V41_FORMAT if cache.shape[-1] == V41_FORMAT.bytes_per_token else FP4_INDEX_KV_FORMAT


def far_slots(cache: torch.Tensor) -> torch.Tensor:
    """Slots in blocks just below and above 2 and 4 GiB, the first and the last."""
    blocks = [boundary * GIB // cache.stride(0) + step for boundary in (2, 4) for step in (-1, 1, 2)]
    return torch.tensor([3, *(block * BLOCK + 5 for block in blocks), cache.shape[0] * BLOCK - 1])


def records(n: int, layout: KVCacheFormat) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    widths = (layout.data_bytes, layout.sf_bytes)
    data, sf = (torch.randint(0, 256, (n, width), generator=generator).to(torch.uint8) for width in widths)
    return data, sf


def bytes_at(cache: torch.Tensor, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scales of a slot, from slices of the raw bytes."""
    geometry = cache_geometry(layout_of(cache), BLOCK, cache.stride(0))
    block, token = divmod(slot, BLOCK)
    raw = cache.as_strided((cache.untyped_storage().nbytes(),), (1,), 0)
    data = block * geometry.block_stride + token * geometry.data_token_stride
    sf = block * geometry.block_stride + geometry.sf_offset + token * geometry.sf_token_stride
    return raw[data : data + geometry.layout.data_bytes].clone(), raw[sf : sf + geometry.layout.sf_bytes].clone()


def test_flat_scatter_is_right_where_the_device_wraps(cache: torch.Tensor) -> None:
    layout, slots = layout_of(cache), far_slots(cache)
    data, sf = records(len(slots), layout)
    neighbours = [slot + step for slot in slots.tolist()[:-1] for step in (-1, 1)]
    before = [bytes_at(cache, slot) for slot in neighbours]
    with IndexPutV2() as device:
        scatter_records(cache, layout, slots, data, sf)
    assert set(device.dims) == {1}, "a multi-dimensional index_put_ reaches the device"
    for token, slot in enumerate(slots.tolist()):
        stored = bytes_at(cache, slot)
        assert torch.equal(stored[0], data[token]) and torch.equal(stored[1], sf[token])
    for slot, old in zip(neighbours, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(bytes_at(cache, slot), old, strict=True))
    got_data, got_sf, valid = gather_records(cache, layout, slots)
    assert valid.all() and torch.equal(got_data, data) and torch.equal(got_sf, sf)


def test_the_model_breaks_the_plain_scatter(cache: torch.Tensor) -> None:
    """Below 2 GiB the model writes what torch writes; above, records are lost and others are overwritten."""
    layout, slots = layout_of(cache), far_slots(cache)
    victim = 4 * GIB + 64 * cache.stride(0)  # an address whose low 32 bits are block 64 or so
    far = victim // cache.stride(0) * BLOCK
    slots = torch.cat((slots, torch.tensor([far])))
    data, _ = records(len(slots), layout)
    zeros = torch.zeros_like(data)
    view = split_kv_cache(cache, layout)[0].view(torch.uint8)
    view[slots // BLOCK, slots % BLOCK] = zeros
    near = cache.as_strided((128 * cache.stride(0),), (1,), 0)
    near.zero_()
    with IndexPutV2() as device:
        view[slots // BLOCK, slots % BLOCK] = data
    assert device.dims == [3]
    for token, slot in enumerate(slots.tolist()):
        below = slot // BLOCK * cache.stride(0) < 2 * GIB - cache.stride(0)
        assert torch.equal(bytes_at(cache, slot)[0], data[token] if below else zeros[token])
    wrapped = far // BLOCK * cache.stride(0) - 4 * GIB
    overwritten = near[wrapped : wrapped + layout.data_bytes]
    assert torch.equal(overwritten, data[-1]), "the model should hit another token's record"
