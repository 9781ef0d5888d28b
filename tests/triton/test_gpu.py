"""portable_triton on a GPU, beyond the conformance suite: every input of the native casts, far addresses, graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kvhal
from kvhal.errors import CaptureError
from kvhal.formats import SUPPORTED_KV_CACHE_FORMATS, V41_FORMAT, KVCacheFormat
from kvhal.layout import alloc_kv_cache, cache_geometry
from kvhal.numerics import decode_e4m3, dequantize, quantize
from kvhal.platform import detect

pytestmark = pytest.mark.gpu
BACKEND = "portable_triton"
SIZE = 4096


@pytest.fixture(autouse=True)
def _forced() -> Iterator[None]:
    with kvhal.use_backend(BACKEND):
        yield


def native() -> bool:
    from kvhal.backends.portable_triton.record import record_of

    return record_of(V41_FORMAT, 64, detect("cuda")).native


def same(have: torch.Tensor, need: torch.Tensor) -> bool:
    return torch.equal(have.cpu().contiguous().view(torch.uint8), need.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", ["count_e4m3_mismatches", "count_bf16_mismatches"])
def test_native_casts_of_every_fp32(name: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 casts below sm_89")
    from tests.triton import kernels

    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    getattr(kernels, name)[(2**32 // SIZE,)](count, SIZE, enable_fp_fusion=False)
    assert int(count) == 0


def test_native_reciprocal_of_every_scale() -> None:
    from tests.triton.kernels import both_reciprocals

    value = decode_e4m3(torch.arange(1, 127, dtype=torch.uint8)).cuda()
    value = torch.cat((value, torch.ones(2, device="cuda")))
    out = torch.zeros((2, 128), device="cuda")
    both_reciprocals[(1,)](value, out, 128, enable_fp_fusion=False)
    assert same(out[0], out[1]) and same(out[1], 1 / value.cpu())


@pytest.mark.parametrize("layout", SUPPORTED_KV_CACHE_FORMATS, ids=str)
def test_every_code_under_every_scale_byte(layout: KVCacheFormat) -> None:
    """Dequantised rows of records that hold all pairs of a code and a scale byte."""
    codes = 256 if layout.quantized_dtype == "e4m3" else 16
    data = torch.arange(256, dtype=torch.uint8) if codes == 256 else torch.arange(16, dtype=torch.uint8) * 0x11
    per_group = layout.elements_per_sf if codes == 256 else layout.elements_per_sf // 2
    groups = -(-len(data) // per_group)
    data = data.repeat(-(-groups * per_group // len(data)))[: groups * per_group].view(1, groups, per_group)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).expand(256, groups, 1)
    data = data.expand(256, groups, per_group).reshape(-1, per_group)
    scales = scales.reshape(-1, 1)
    if layout.sf_format == "fp32":
        scales = torch.randint(0, 256, (len(scales), 4), dtype=torch.uint8)
    rows = len(data) // layout.num_scales
    data = data[: rows * layout.num_scales].reshape(rows, layout.data_bytes)
    sf = scales[: rows * layout.num_scales].reshape(rows, layout.sf_bytes).contiguous()
    cache = alloc_kv_cache(1, rows, layout, "cuda")
    place(cache, layout, data, sf)
    have = kvhal.load_kv_slots(cache, torch.arange(rows, device="cuda"), layout=layout)
    assert same(have, dequantize(data, sf, layout))


def place(cache: torch.Tensor, layout: KVCacheFormat, data: torch.Tensor, sf: torch.Tensor) -> None:
    geometry = cache_geometry(layout, cache.shape[1], cache.stride(0))
    rows = (data.shape[0],)
    cache.as_strided((*rows, layout.data_bytes), (geometry.data_token_stride, 1)).copy_(data)
    cache.as_strided((*rows, layout.sf_bytes), (geometry.sf_token_stride, 1), geometry.sf_offset).copy_(sf)


def test_addresses_beyond_four_gib() -> None:
    block_size = 64
    blocks = 5 * 2**30 // (block_size * V41_FORMAT.bytes_per_token)
    cache = alloc_kv_cache(blocks, block_size, V41_FORMAT, "cuda").zero_()
    rows = torch.randn((192, 512), device="cuda").bfloat16()
    slots = torch.arange(192, device="cuda") + (blocks - 3) * block_size
    kvhal.store_kv_cache(rows, cache, slots)
    need = dequantize(*quantize(rows.cpu(), V41_FORMAT), V41_FORMAT)
    assert same(kvhal.load_kv_slots(cache, slots.to(torch.int32)), need)
    segments = torch.tensor([[blocks - 3 + i, 0, 64, 64 * i] for i in range(3)], dtype=torch.int32, device="cuda")
    assert same(kvhal.load_paged_kv_cache(cache, segments, 192).kv, need)
    assert not cache[: blocks - 3].any()


def test_capture_replays_what_is_compiled_and_refuses_what_is_not() -> None:
    cache = alloc_kv_cache(4, 31, V41_FORMAT, "cuda").zero_()
    rows = torch.randn((100, 512), device="cuda").bfloat16()
    slots = torch.arange(100, device="cuda")
    out = torch.zeros((100, 512), dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="warmup"), torch.cuda.graph(graph):
        kvhal.store_kv_cache(rows, cache, slots)
    kvhal.store_kv_cache(rows[:1], cache, slots[:1])
    kvhal.load_kv_slots(cache, slots, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kvhal.store_kv_cache(rows, cache, slots)
        kvhal.load_kv_slots(cache, slots, out)
    rows.copy_(torch.randn((100, 512), device="cuda"))
    graph.replay()
    assert same(out, dequantize(*quantize(rows.cpu(), V41_FORMAT), V41_FORMAT))


def test_native_where_it_is_proven() -> None:
    assert native() == (detect("cuda").arch == "sm_90")
