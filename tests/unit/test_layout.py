"""Where the bytes lie: strides, offsets, views, inference."""

from __future__ import annotations

import math

import pytest
import torch

import kvhal
from kvhal import (
    BF16_FORMAT,
    FP4_INDEX_KV_FORMAT,
    FP8_FLOAT32_SF_INDEX_KV_FORMAT,
    MXFP8_INDEX_KV_FORMAT,
    V41_FORMAT,
    V41_FP4_FORMAT,
    KVCacheFormat,
    alloc_kv_cache,
    resolve_kv_cache_layout,
    sf_data_as_int32,
    split_kv_cache,
)
from kvhal.layout import cache_geometry, geometry_of, sf_output
from kvhal.testing import CONFORMANCE_FORMATS

BLOCK_SIZES = (1, 3, 16, 48, 64, 133)
#: (format, block size): bytes from one block to the next, from the definition: lcm(32, record) when interleaved, else 32
STRIDES = {
    (V41_FORMAT, 1): 1056, (V41_FORMAT, 64): 33792, (V41_FORMAT, 133): 70752,
    (V41_FP4_FORMAT, 1): 288, (V41_FP4_FORMAT, 64): 18432, (V41_FP4_FORMAT, 133): 38304,
    (FP4_INDEX_KV_FORMAT, 1): 96, (FP4_INDEX_KV_FORMAT, 64): 4352, (FP4_INDEX_KV_FORMAT, 133): 9056,
    (MXFP8_INDEX_KV_FORMAT, 3): 416, (FP8_FLOAT32_SF_INDEX_KV_FORMAT, 64): 8448,
    (BF16_FORMAT, 3): 3072,
}  # fmt: skip


@pytest.mark.parametrize(("layout", "block_size"), STRIDES, ids=str)
def test_block_strides(layout: KVCacheFormat, block_size: int) -> None:
    cache = alloc_kv_cache(2, block_size, layout, "cpu")
    item = cache.element_size()
    assert cache.stride(0) * item == STRIDES[layout, block_size]
    record = layout.bytes_per_token // item
    assert cache.shape == (2, block_size, 1, record)
    assert cache.stride() == (STRIDES[layout, block_size] // item, record, record, 1)
    assert cache.untyped_storage().nbytes() == 2 * STRIDES[layout, block_size]
    assert cache.data_ptr() % 32 == 0


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("name", CONFORMANCE_FORMATS)
def test_views_address_every_byte_of_every_record_once(name: str, block_size: int) -> None:
    layout = CONFORMANCE_FORMATS[name]
    cache = alloc_kv_cache(3, block_size, layout, "cpu")
    raw = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    geometry = geometry_of(cache, layout)
    seen = torch.zeros(raw.numel(), dtype=torch.int32)
    for block in range(3):
        for token in range(block_size):
            start = block * geometry.block_stride
            data = start + token * geometry.data_token_stride
            scales = start + geometry.sf_offset + token * geometry.sf_token_stride
            seen[data : data + layout.data_bytes] += 1
            seen[scales : scales + layout.sf_bytes] += 1
            assert data % geometry.token_alignment == 0
    assert seen.max() == 1
    assert int(seen.sum()) == 3 * block_size * layout.bytes_per_token
    per_block = seen.view(3, -1)
    assert per_block[:, : block_size * layout.bytes_per_token].all(), "padding lies behind the records"


@pytest.mark.parametrize("name", CONFORMANCE_FORMATS)
def test_split_gives_views_of_the_same_bytes(name: str) -> None:
    layout, block_size = CONFORMANCE_FORMATS[name], 3
    whole = alloc_kv_cache(4, block_size, layout, "cpu")
    cache = whole[1:]  # a slice of whole blocks
    raw = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    raw.copy_(torch.arange(raw.numel()) % 251)
    geometry = cache_geometry(layout, block_size)
    if layout.sf_format == "fp32" and (geometry.sf_offset % 4 or geometry.sf_token_stride % 4):
        with pytest.raises(ValueError, match="needs multiples of 4 for a float32 view; read the record's bytes instead"):
            split_kv_cache(cache, layout)
        return
    data, sf = split_kv_cache(cache, layout)
    block, token = 2, 1
    start = (block + 1) * geometry.block_stride
    here = start + token * geometry.data_token_stride
    assert data.shape[:2] == (3, block_size)
    assert torch.equal(data[block, token].contiguous().view(torch.uint8), raw[here : here + layout.data_bytes])
    if layout.quantized_dtype is None:
        assert sf is None and data.dtype == torch.bfloat16
        return
    assert data.dtype == {"e4m3": torch.float8_e4m3fn, "e2m1": torch.int8}[layout.quantized_dtype]
    assert sf is not None and sf.shape == (3, block_size, layout.num_scales)
    assert sf.dtype == {"ue8m0": torch.uint8, "e4m3": torch.float8_e4m3fn, "fp32": torch.float32}[str(layout.sf_format)]
    there = start + geometry.sf_offset + token * geometry.sf_token_stride
    assert torch.equal(sf[block, token].contiguous().view(torch.uint8), raw[there : there + layout.sf_bytes])
    sf.view(torch.uint8).zero_()
    assert not raw[there : there + layout.sf_bytes].any(), "a view, not a copy"


def test_scales_of_index_layouts_lie_behind_all_data_rows() -> None:
    geometry = cache_geometry(MXFP8_INDEX_KV_FORMAT, 64)
    assert (geometry.data_token_stride, geometry.sf_offset, geometry.sf_token_stride) == (128, 64 * 128, 4)
    geometry = cache_geometry(V41_FP4_FORMAT, 64)
    assert (geometry.data_token_stride, geometry.sf_offset, geometry.sf_token_stride) == (288, 256, 288)


def test_token_alignment() -> None:
    assert [cache_geometry(layout, 64).token_alignment for layout in (V41_FORMAT, V41_FP4_FORMAT)] == [16, 32]
    assert [cache_geometry(layout, 64).token_alignment for layout in (MXFP8_INDEX_KV_FORMAT, FP4_INDEX_KV_FORMAT)] == [32, 32]


def test_one_geometry_object_for_the_same_facts() -> None:
    first, second = (alloc_kv_cache(blocks, 16, V41_FORMAT, "cpu") for blocks in (2, 5))
    assert geometry_of(first) is geometry_of(second, V41_FORMAT) is geometry_of(first[1:])


@pytest.mark.parametrize("blocks", [0, 1])
def test_caches_of_few_blocks(blocks: int) -> None:
    cache = alloc_kv_cache(blocks, 5, V41_FORMAT, "cpu")
    assert geometry_of(cache).block_size == 5
    assert math.prod(split_kv_cache(cache, V41_FORMAT)[0].shape) == blocks * 5 * 512


@pytest.mark.parametrize(
    ("blocks", "size", "text"), [(-1, 4, "num_blocks has -1, needs >= 0"), (2, 0, "block_size has 0, needs >= 1")]
)
def test_alloc_refuses(blocks: int, size: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        alloc_kv_cache(blocks, size, V41_FORMAT, "cpu")


@pytest.mark.parametrize("layout", [V41_FORMAT, V41_FP4_FORMAT, FP4_INDEX_KV_FORMAT, BF16_FORMAT], ids=str)
def test_inference(layout: KVCacheFormat) -> None:
    assert resolve_kv_cache_layout(alloc_kv_cache(2, 16, layout, "cpu")) is layout


def test_132_bytes_need_a_scale_format() -> None:
    cache = alloc_kv_cache(2, 16, MXFP8_INDEX_KV_FORMAT, "cpu")
    with pytest.raises(ValueError, match=r"132 bytes is ambiguous.*FP8_FLOAT32_SF_INDEX_KV_FORMAT.* or MXFP8_INDEX_KV_FORMAT"):
        resolve_kv_cache_layout(cache)
    assert resolve_kv_cache_layout(cache, sf_format="ue8m0") is MXFP8_INDEX_KV_FORMAT
    assert resolve_kv_cache_layout(cache, sf_format="fp32") is FP8_FLOAT32_SF_INDEX_KV_FORMAT
    assert resolve_kv_cache_layout(cache, MXFP8_INDEX_KV_FORMAT, "ue8m0") is MXFP8_INDEX_KV_FORMAT
    with pytest.raises(ValueError, match="sf_format: has 'fp32', but layout MXFP8_INDEX_KV_FORMAT has 'ue8m0'"):
        resolve_kv_cache_layout(cache, MXFP8_INDEX_KV_FORMAT, "fp32")


def test_bf16_caches_are_told_by_dtype() -> None:
    cache = alloc_kv_cache(2, 16, BF16_FORMAT, "cpu")
    with pytest.raises(
        ValueError, match=r"kv_cache: has dtype torch.bfloat16 and last dimension 512, needs torch.uint8 and 528"
    ):
        resolve_kv_cache_layout(cache, V41_FORMAT)
    with pytest.raises(ValueError, match=r"needs torch.bfloat16 and 512 for layout BF16_FORMAT"):
        resolve_kv_cache_layout(alloc_kv_cache(2, 16, V41_FORMAT, "cpu"), BF16_FORMAT)


def test_scales_as_int32() -> None:
    sf = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    assert sf_data_as_int32(sf).tolist() == [[0x03020100, 0x07060504], [0x0B0A0908, 0x0F0E0D0C]]
    _, scales = split_kv_cache(alloc_kv_cache(2, 3, V41_FORMAT, "cpu"), V41_FORMAT)
    assert scales is not None and sf_data_as_int32(scales).shape == (2, 3, 4)
    for bad, text in ((sf.int(), "has dtype torch.int32, needs torch.uint8"), (sf[:, :6], "whole, 4-byte aligned groups of 4")):
        with pytest.raises(ValueError, match=text):
            sf_data_as_int32(bad)
    for bad in (sf[:, 1:5], torch.zeros(2, 7, dtype=torch.uint8)[:, :4], torch.zeros(2, 8, dtype=torch.uint8)[:, ::2]):
        with pytest.raises(ValueError, match="4-byte aligned groups of 4"):
            sf_data_as_int32(bad)


def test_scales_that_an_index_load_returns() -> None:
    assert sf_output(MXFP8_INDEX_KV_FORMAT) == (torch.int32, ())
    assert sf_output(FP8_FLOAT32_SF_INDEX_KV_FORMAT) == (torch.float32, ())
    assert sf_output(CONFORMANCE_FORMATS["ODD_INDEX_36"]) == (torch.uint8, (3,))
    assert sf_output(CONFORMANCE_FORMATS["ODD_INDEX_FP32_30"]) == (torch.float32, (2,))
    assert sf_output(KVCacheFormat("e4m3", 512, 32, 0, False, "ue8m0", "")) == (torch.int32, (4,))
    assert sf_output(KVCacheFormat("e2m1", 32, 16, 0, False, "e4m3", "")) == (torch.float8_e4m3fn, (2,))


def test_layers_may_share_an_allocation() -> None:
    """Blocks of several layers interleaved: a larger block stride, a start inside the allocation."""
    stride = alloc_kv_cache(1, 4, V41_FORMAT, "cpu").stride(0)
    pool = torch.zeros(5, 3, stride, dtype=torch.uint8)
    cache = pool[:, 1].as_strided((5, 4, 1, 528), (3 * stride, 528, 528, 1), stride)
    kvhal.store_kv_cache(torch.ones(2, 512, dtype=torch.bfloat16), cache, torch.tensor([0, 19]))
    assert not pool[:, 0].any() and not pool[:, 2].any()
    assert pool[0, 1, :528].any() and pool[4, 1, 3 * 528 : 4 * 528].any()
