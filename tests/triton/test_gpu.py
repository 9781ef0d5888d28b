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
SCALES = 247 - 105 + 1  #: scale bytes that e4m3 data can have


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


def test_inverse_root_of_every_fp32() -> None:
    from tests.triton.kernels import count_root_mismatches

    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    count_root_mismatches[(2**32 // SIZE,)](count, SIZE, enable_fp_fusion=False)
    assert int(count) == 0


def test_packed_codes_of_every_bf16_under_every_scale() -> None:
    if not native():
        pytest.skip("only where the hardware's casts are proven")
    from tests.triton.kernels import codes_of_halves, codes_of_pairs

    scaled, multiplied, need = torch.full((3, SCALES, 2**16), -1, dtype=torch.int32, device="cuda")
    codes_of_pairs[(2**16 // SIZE, SCALES)](scaled, multiplied, SIZE, enable_fp_fusion=False)
    codes_of_halves[(2**16 // SIZE, SCALES)](need, SIZE, enable_fp_fusion=False)
    for name, have in (("scaled_codes", scaled), ("multiplied_codes", multiplied)):
        wrong = (have != need).nonzero().tolist()
        assert not wrong, f"{name}: {len(wrong)} words, {[(at, *(hex(int(t[*at])) for t in (have, need))) for at in wrong[:5]]}"


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("layout", SUPPORTED_KV_CACHE_FORMATS, ids=str)
def test_fused_rows_of_every_magnitude(layout: KVCacheFormat, hadamard: bool) -> None:
    """20,001 rows, with NaN, Inf and zeros among them, through the packed path: whole caches as the reference's."""
    random = torch.Generator("cuda").manual_seed(3)
    rows = torch.randn((20001, layout.elements), device="cuda", generator=random)
    rows *= torch.exp2(torch.randint(-60, 60, (20001, 1), device="cuda", generator=random).float())
    rows[::11, ::7] *= 2.0**20
    rows[5::100, 3], rows[6::100, 9], rows[7::100] = float("nan"), float("inf"), 0.0
    slots = torch.randperm(25000, device="cuda", generator=random)[:20001]
    table = torch.rand((512, 64), device="cuda", generator=random)
    positions = torch.randint(-2, 515, (20001,), device="cuda", generator=random)
    weight = torch.randn(layout.elements, device="cuda", generator=random)
    for norm in (None, kvhal.NormArgs(weight), kvhal.NormArgs(weight.bfloat16(), 0.0)):
        caches = []
        for backend in (BACKEND, "reference_torch"):
            cache = alloc_kv_cache(400, 63, layout, "cuda")
            cache.view(torch.uint8).fill_(0x5A)
            with kvhal.use_backend(backend):
                kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
                    rows.bfloat16(),
                    norm_args=norm,
                    rope_args=kvhal.RopeArgs(positions, table, 64),
                    hadamard_args=kvhal.HadamardArgs() if hadamard else None,
                    cast_args=kvhal.CastArgs.for_layout(layout),
                    out_args=kvhal.KVCacheOutArgs(cache, slots, layout),
                )
            caches.append(cache)
        assert same(*caches)


@pytest.mark.parametrize("layout", SUPPORTED_KV_CACHE_FORMATS, ids=str)
def test_every_bf16_beside_every_maximum(layout: KVCacheFormat) -> None:
    """Groups of any bf16 under maxima from the smallest to NaN, both signs, stored as the reference stores them."""
    random = torch.Generator("cuda").manual_seed(4)
    per = layout.elements_per_sf
    maxima = torch.arange(0, 0x7FFF, device="cuda").repeat_interleave(3)
    maxima = maxima[: len(maxima) // layout.num_scales * layout.num_scales]
    share = torch.rand((len(maxima), per), device="cuda", generator=random) * 1.002  # of a maximum's bits: any smaller bf16
    near = torch.rand((len(maxima), 1), device="cuda", generator=random) < 0.7  # mostly of its own few binades
    floor = torch.where(near, (maxima[:, None] - 600).clamp(min=0), 0)
    bits = (floor + share * (maxima[:, None] - floor)).to(torch.int32).clamp(max=0x7FFF)
    bits[:, 0] = maxima
    bits |= torch.randint(0, 2, bits.shape, device="cuda", generator=random, dtype=torch.int32) << 15
    rows = bits.to(torch.int16).view(torch.bfloat16).view(-1, layout.elements)
    slots = torch.randperm(len(rows), device="cuda", generator=random)
    caches = []
    for backend in (BACKEND, "reference_torch"):
        cache = alloc_kv_cache(-(-len(rows) // 64), 64, layout, "cuda")
        cache.view(torch.uint8).fill_(0x5A)
        with kvhal.use_backend(backend):
            kvhal.store_kv_cache(rows, cache, slots, layout=layout)
        caches.append(cache)
    assert same(*caches)


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
