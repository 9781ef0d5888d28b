"""cuda_tilelang on a GPU, beyond the conformance suite: graphs, far addresses, exhaustive codecs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import kvhal
from kvhal.errors import CaptureError
from kvhal.formats import BUILTIN_FORMATS, SUPPORTED_KV_CACHE_FORMATS, V41_FORMAT, V41_FP4_FORMAT, KVCacheFormat
from kvhal.interface import FORMAT_OPS, CastArgs, KVCacheOutArgs, NormArgs, Op, RopeArgs
from kvhal.layout import alloc_kv_cache, split_kv_cache
from kvhal.numerics import dequantize, quantize, round_bf16, widen
from kvhal.stages import rms_norm, rope
from kvhal.testing import cases, run_case
from kvhal.testing.case import format_name

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).resolve().parent.parent / "golden"
BACKEND = "cuda_tilelang"


@pytest.fixture(autouse=True)
def _forced() -> Iterator[None]:
    with kvhal.use_backend(BACKEND):
        yield


def same(have: torch.Tensor, need: torch.Tensor) -> bool:
    return torch.equal(have.contiguous().view(torch.uint8), need.contiguous().view(torch.uint8))


def stored(rows: torch.Tensor, layout: KVCacheFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(cache, data bytes, scale bytes) after storing rows one behind the other."""
    cache = alloc_kv_cache(-(-rows.shape[0] // 64), 64, layout, "cuda")
    kvhal.store_kv_cache(rows, cache, torch.arange(rows.shape[0], device="cuda"), layout=layout)
    data, sf = split_kv_cache(cache, layout)
    assert sf is not None
    data, sf = (part.reshape(-1, part.shape[-1])[: rows.shape[0]].contiguous().view(torch.uint8) for part in (data, sf))
    return cache, data, sf


#: one case that reaches each kernel; also what compute-sanitizer runs
EACH = [
    *((op, layout) for op in (Op.STORE, Op.LOAD, Op.LOAD_SLOTS, Op.FUSED_STORE) for layout in BUILTIN_FORMATS.values()),
    *((op, None) for op in Op if op not in FORMAT_OPS),
]


@pytest.mark.parametrize(
    "op, layout", EACH, ids=lambda part: format_name(part) if isinstance(part, KVCacheFormat) else str(part)
)
def test_each_kernel_once(op: Op, layout: KVCacheFormat | None) -> None:
    wanted = {Op.STORE: "slots-int32-rows", Op.LOAD: "hostile", Op.LOAD_SLOTS: "int32-rows", Op.FUSED_STORE: "all"}.get(op, "")
    case = next(case for case in cases(op, layout) if case.name.startswith(wanted))
    run_case(BACKEND, case, "cuda").check()


@pytest.mark.parametrize("layout", SUPPORTED_KV_CACHE_FORMATS, ids=str)
def test_golden_tables(layout: KVCacheFormat) -> None:
    table = np.load(GOLDEN / f"{format_name(layout)}.npz")
    rows = torch.from_numpy(table["x"].view(np.int16)).view(torch.bfloat16).cuda()
    cache, data, sf = stored(rows, layout)
    assert same(data, torch.from_numpy(table["data"]).cuda())
    assert same(sf, torch.from_numpy(table["sf"]).cuda())
    back = kvhal.load_kv_slots(cache, torch.arange(rows.shape[0], device="cuda"), layout=layout).view(torch.int16)
    need = torch.from_numpy(table["back"].view(np.int16)).cuda()
    nan = (need & 0x7FFF) > 0x7F80
    assert torch.equal(back[~nan], need[~nan])
    assert bool((back[nan] == 0x7FFF).all())


@pytest.mark.parametrize("layout", SUPPORTED_KV_CACHE_FORMATS, ids=str)
def test_every_element_under_many_scales(layout: KVCacheFormat) -> None:
    """Each group: one element sets the scale, the others run through all magnitudes that are not larger, both signs."""
    group, width = layout.elements_per_sf, layout.elements
    largest = torch.arange(0x3480 if layout.sf_format == "e4m3" else 0x0080, 0x7F80, 0x11, device="cuda")
    if layout.sf_format == "e4m3":
        largest = largest[largest < 0x4600]
    picks = torch.arange(24 * (group - 1), device="cuda")
    below = (largest[:, None].float() * (1 - picks / picks.numel()) ** 0.25).to(torch.int32).view(-1, 24, group - 1)
    near = (largest[:, None].to(torch.int32) - torch.arange(24 * (group - 1), device="cuda").to(torch.int32)).clamp(min=0)
    rest = torch.cat((below, near.view(-1, 24, group - 1)), 1)
    bits = torch.cat((largest.to(torch.int32)[:, None, None].expand(-1, 48, 1), rest), 2)
    sign = (torch.arange(bits.numel(), device="cuda").view(bits.shape) % 3 == 0).to(torch.int32) << 15
    flat = (bits | sign).flatten()
    flat = flat[: flat.numel() // width * width]
    rows = torch.where(flat >= 1 << 15, flat - (1 << 16), flat).to(torch.int16).view(torch.bfloat16).view(-1, width)
    _, data, sf = stored(rows, layout)
    need_data, need_sf = quantize(rows, layout)
    assert same(sf, need_sf)
    assert same(data, need_data)


@pytest.mark.parametrize("layout", SUPPORTED_KV_CACHE_FORMATS, ids=str)
def test_every_code_under_every_scale(layout: KVCacheFormat) -> None:
    """Random records meet every pair of data byte and scale byte."""
    generator = torch.Generator("cuda").manual_seed(1)
    n = 4096
    cache = alloc_kv_cache(n // 64, 64, layout, "cuda")
    view = cache.view(torch.uint8)
    view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8, device="cuda", generator=generator))
    data, sf = split_kv_cache(cache, layout)
    assert sf is not None
    flat = [part.reshape(n, -1).contiguous().view(torch.uint8) for part in (data, sf)]
    assert same(kvhal.load_kv_slots(cache, torch.arange(n, device="cuda"), layout=layout), dequantize(*flat, layout))


def _graph_calls(layout: KVCacheFormat, cache: torch.Tensor, state: dict[str, torch.Tensor]) -> list[Callable[[], object]]:
    cast, where = CastArgs.for_layout(layout), KVCacheOutArgs(cache, state["fused_slots"], layout)
    norm = NormArgs(state["weight"])
    turn = RopeArgs(state["positions"], state["table"], 64)
    return [
        lambda: kvhal.store_kv_cache(state["kv"], cache, state["slots"], layout=layout),
        lambda: kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
            state["kv"], norm_args=norm, rope_args=turn, cast_args=cast, out_args=where
        ),
        lambda: kvhal.load_paged_kv_cache(cache, state["segments"], 128, state["out"], layout=layout),
        lambda: kvhal.convert_kv_index(state["topk"], state["tables"], state["lens"], 64),
    ]


@pytest.mark.parametrize("layout", [V41_FORMAT, V41_FP4_FORMAT], ids=str)
def test_graph_replays_changed_metadata(layout: KVCacheFormat) -> None:
    generator = torch.Generator("cuda").manual_seed(2)

    def whole(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=dtype, device="cuda", generator=generator)

    def fresh() -> dict[str, torch.Tensor]:
        slots = torch.randperm(512, device="cuda", generator=generator)
        slots[::7] = -1
        begin = whole(0, 32, 4)
        segments = torch.stack((whole(-1, 9, 4), begin, begin + whole(0, 33, 4), torch.arange(4, device="cuda").int() * 32), 1)
        return {
            "kv": torch.randn((128, 512), device="cuda", generator=generator).to(torch.bfloat16),
            "slots": slots[:128].contiguous(),
            "fused_slots": slots[128:256].to(torch.int32),
            "weight": torch.randn(512, device="cuda", generator=generator),
            "positions": whole(-2, 70, 128, dtype=torch.int64),
            "table": torch.rand((64, 64), device="cuda", generator=generator),
            "segments": segments.contiguous(),
            "out": torch.zeros((128, 512), dtype=torch.bfloat16, device="cuda"),
            "topk": whole(-1, 600, 2, 3, 40),
            "tables": whole(-1, 100, 2, 8),
            "lens": whole(0, 50, 2, 3),
        }

    state, cache = fresh(), alloc_kv_cache(8, 64, layout, "cuda")
    cache.view(torch.uint8).zero_()
    calls = _graph_calls(layout, cache, state)
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(5):
        for name, value in fresh().items():
            state[name].copy_(value)
        before = cache.clone(), state["topk"].clone()
        graph.replay()
        replayed = [cache.clone(), state["out"].clone(), state["topk"].clone()]
        cache.copy_(before[0])
        state["topk"].copy_(before[1])
        state["out"].zero_()
        for call in calls:
            call()
        assert all(same(a, b) for a, b in zip(replayed, (cache, state["out"], state["topk"]), strict=True))


@pytest.mark.parametrize("layout", [V41_FORMAT, kvhal.MXFP8_INDEX_KV_FORMAT], ids=str)
@pytest.mark.parametrize("n", [3168, 3169, 9510])
def test_fused_store_of_more_tokens_than_warps(layout: KVCacheFormat, n: int) -> None:
    """A warp takes several tokens one behind the other, whose rows, slots and positions are read ahead."""
    generator = torch.Generator("cuda").manual_seed(n)
    width = layout.elements
    kv = torch.randn((n, width), device="cuda", generator=generator).to(torch.bfloat16)
    weight = torch.rand(width, device="cuda", generator=generator) + 0.5
    table = torch.rand((97, 64), device="cuda", generator=generator)
    positions = torch.randint(-1, 99, (n,), device="cuda", generator=generator)
    slots = torch.randperm(n, device="cuda", generator=generator)
    slots[::17] = -1
    cache = alloc_kv_cache(-(-n // 64), 64, layout, "cuda")
    cache.zero_()
    need = cache.clone()
    back = kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
        kv,
        norm_args=NormArgs(weight),
        rope_args=RopeArgs(positions, table, 64),
        cast_args=CastArgs.for_layout(layout, cast_back=True),
        out_args=KVCacheOutArgs(cache, slots, layout),
    )
    rows = round_bf16(rope(rms_norm(widen(kv), weight, 1e-6), RopeArgs(positions, table, 64)))
    kvhal.store_kv_cache(rows, need, slots, layout=layout)
    assert same(cache, need)
    assert back is not None
    assert same(back, dequantize(*quantize(rows, layout), layout))


def test_nothing_is_built_during_capture() -> None:
    cache = alloc_kv_cache(2, 77, V41_FORMAT, "cuda")
    rows, slots = torch.zeros((1, 512), dtype=torch.bfloat16, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(CaptureError, match="warmup"):
        kvhal.store_kv_cache(rows, cache, slots)


@pytest.mark.parametrize("layout", [V41_FORMAT, kvhal.BF16_FORMAT, kvhal.FP4_INDEX_KV_FORMAT], ids=str)
def test_a_cache_beyond_4_gib(layout: KVCacheFormat) -> None:
    block = 64 * layout.bytes_per_token
    blocks = (5 << 30) // block
    cache = alloc_kv_cache(blocks, 64, layout, "cuda")
    cache.view(torch.uint8).fill_(0xA5)
    capacity = blocks * 64
    far = torch.tensor([0, (2 << 30) // block * 64 + 5, (4 << 30) // block * 64 + 7, capacity - 1, capacity], device="cuda")
    rows = torch.randn((5, layout.elements), device="cuda").to(torch.bfloat16)
    kvhal.store_kv_cache(rows, cache, far, layout=layout)
    back = kvhal.load_kv_slots(cache, far, layout=layout)
    need = dequantize(*quantize(rows, layout), layout)
    need[4] = 0
    assert same(back, need)
    segments = torch.stack((far // 64, far % 64, far % 64 + 1, torch.arange(5, device="cuda")), 1).to(torch.int32)
    loaded = kvhal.load_paged_kv_cache(cache, segments, 5, layout=layout)
    if not layout.is_index:
        assert same(loaded.kv, need)
    changed = sum(int((part != 0xA5).sum()) for part in cache.view(torch.uint8).split(1 << 16))
    assert changed <= 4 * layout.bytes_per_token
