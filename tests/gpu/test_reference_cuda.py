"""reference_torch on CUDA: the CPU's bytes, and every operation inside a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvhal.backends.reference_torch.manifest import BACKEND
from kvhal.formats import BUILTIN_FORMATS, KVCacheFormat
from kvhal.interface import HadamardArgs, NormArgs, Op, Request, RopeArgs
from kvhal.layout import DATA_DTYPES, alloc_kv_cache, cache_view, sf_output
from kvhal.numerics import dequantize, quantize
from kvhal.platform import Platform
from kvhal.stages import hadamard, rms_norm, rope

pytestmark = pytest.mark.gpu
LAYOUTS = list(BUILTIN_FORMATS.values())


def bind(op: Op, layout: KVCacheFormat | None = None) -> Any:
    return BACKEND.bind(Request(op, layout, Platform("cuda", "")))


def every_bf16(elements: int) -> torch.Tensor:
    """All 65,536 bit patterns in a fixed shuffle, then in order, as rows."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.cat((torch.randperm(1 << 16, generator=generator), torch.arange(1 << 16))) - (1 << 15)
    return bits.to(torch.int16).view(torch.bfloat16).view(-1, elements)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.cpu().contiguous().view(torch.uint8), want.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_codec_bytes(layout: KVCacheFormat) -> None:
    x = every_bf16(layout.elements)
    data, sf = quantize(x, layout)
    on_gpu = quantize(x.cuda(), layout)
    assert same(on_gpu[0], data) and same(on_gpu[1], sf)
    assert same(dequantize(*on_gpu, layout), dequantize(data, sf, layout))


@pytest.mark.parametrize("elements", [96, 512])
def test_stages(elements: int) -> None:
    generator = torch.Generator().manual_seed(elements)
    x = torch.randn(4096, elements, generator=generator) * torch.randn(4096, 1, generator=generator).mul(8).exp()
    weight = torch.randn(elements, generator=generator)
    table = torch.randn(50, 64, generator=generator)
    positions = torch.randint(-3, 53, (4096,), generator=generator)
    assert same(rms_norm(x.cuda(), weight.cuda(), 1e-6), rms_norm(x, weight, 1e-6))
    for neox in (False, True):
        on_gpu = rope(x.cuda(), RopeArgs(positions.cuda(), table.cuda(), 64, neox))
        assert same(on_gpu, rope(x, RopeArgs(positions, table, 64, neox)))
    if elements == 512:
        assert same(hadamard(x.cuda()), hadamard(x))


def replay(call: Callable[[], None], change: Callable[[], None]) -> None:
    """Captures `call` after a warm-up, changes its inputs in place, and replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    change()
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_captured_store(layout: KVCacheFormat, fused: bool) -> None:
    """Slots of the replay differ from those of the capture, which has none that is valid."""
    kv = torch.randn(300, layout.elements, device="cuda", dtype=torch.bfloat16)
    slots = torch.full((300,), -1, device="cuda")
    cache = alloc_kv_cache(20, 16, layout, "cuda")
    cache.view(torch.uint8).zero_()
    back = torch.empty_like(kv)
    norm = NormArgs(torch.randn(layout.elements, device="cuda"))
    rotary = RopeArgs(torch.arange(300, device="cuda"), torch.randn(200, 64, device="cuda"), 64)

    def call() -> None:
        if fused:
            bind(Op.FUSED_STORE, layout)(kv, norm, rotary, HadamardArgs(), cache, slots, back)
        else:
            bind(Op.STORE, layout)(kv, cache, slots)

    def change() -> None:
        assert not cache.view(torch.uint8).any(), "nothing is valid, nothing is written"
        slots.copy_(torch.randint(-40, 360, (300,)))
        kv.normal_()

    replay(call, change)
    expected = torch.zeros_like(cache)
    if fused:
        norm, rotary = NormArgs(norm.weight.cpu()), RopeArgs(rotary.positions.cpu(), rotary.cos_sin_cache.cpu(), 64)
        expected, want = expected.cpu(), back.cpu()
        bind(Op.FUSED_STORE, layout)(kv.cpu(), norm, rotary, HadamardArgs(), expected, slots.cpu(), want)
        assert same(back, want)
    else:
        expected = expected.cpu()
        bind(Op.STORE, layout)(kv.cpu(), expected, slots.cpu())
    assert same(cache, expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_captured_loads(layout: KVCacheFormat) -> None:
    storage = torch.randint(0, 256, (20, 16 * layout.bytes_per_token // 32 * 32 + 32), device="cuda").to(torch.uint8)
    cache = cache_view(storage, 16, layout)
    segments = torch.zeros((30, 4), dtype=torch.int32, device="cuda")
    slots = torch.full((100,), -1, device="cuda")
    if layout.is_index:
        raw = torch.zeros(200, layout.data_bytes, dtype=torch.uint8, device="cuda")
        out = raw.view(DATA_DTYPES[layout.quantized_dtype])
        dtype, tail = sf_output(layout)
        sf: torch.Tensor | None = torch.zeros(200, *tail, dtype=dtype, device="cuda")
    else:
        out, sf = torch.zeros(200, layout.elements, dtype=torch.bfloat16, device="cuda"), None
    rows = torch.zeros(100, layout.elements, dtype=torch.bfloat16, device="cuda")

    def launch(cache: torch.Tensor, segments: torch.Tensor, slots: torch.Tensor, *outs: Any) -> None:
        bind(Op.LOAD, layout)(cache, segments, 200, *outs[:2])
        if not layout.is_index:
            bind(Op.LOAD_SLOTS, layout)(cache, slots, outs[2])

    def change() -> None:
        starts = torch.arange(30) * 7
        segments.copy_(torch.stack((torch.randint(-2, 22, (30,)), starts % 5 - 2, starts % 5 + 5, starts), 1))
        slots.copy_(torch.randint(-50, 400, (100,)))

    replay(lambda: launch(cache, segments, slots, out, sf, rows), change)
    wanted = [torch.zeros_like(x, device="cpu") if x is not None else None for x in (out, sf, rows)]
    launch(cache_view(storage.cpu(), 16, layout), segments.cpu(), slots.cpu(), *wanted)
    for got, want in zip((out, sf, rows), wanted, strict=True):
        assert got is None or (want is not None and same(got, want))


def test_captured_index_operations() -> None:
    topk = torch.randint(-5, 200, (4, 8, 64), device="cuda", dtype=torch.int32)
    given = topk.clone()
    tables = torch.randint(-1, 50, (4, 10), device="cuda", dtype=torch.int32)
    lens = torch.randint(0, 64, (4, 8), device="cuda", dtype=torch.int32)
    pivots = torch.randint(-2, 9, (50, 4), device="cuda", dtype=torch.int32)
    outs = [torch.empty(50, 16, device="cuda", dtype=torch.int32) for _ in range(3)]
    outs.append(torch.empty(40, 4, device="cuda", dtype=torch.int32))

    def launch(topk: Any, tables: Any, lens: Any, pivots: Any, outs: Any) -> None:
        bind(Op.CONVERT_INDEX)(topk, tables, lens, 16)
        bind(Op.EXPAND_SWA_INDEX)(pivots, outs[0])
        bind(Op.DECODE_SWA_INDEX)(pivots[:, :2].contiguous(), 8, outs[1])
        bind(Op.INDEX_CAT)(outs[0][:, :8], outs[1][:, :8], 5, outs[2])
        bind(Op.EXPAND_LOAD_PLAN)(pivots.view(40, 5).abs().cumsum(0, dtype=torch.int32), tables, 4, outs[3])

    def change() -> None:
        topk.copy_(given)

    replay(lambda: launch(topk, tables, lens, pivots, outs), change)
    wanted = [torch.empty(50, 16, dtype=torch.int32) for _ in range(3)] + [torch.empty(40, 4, dtype=torch.int32)]
    given = given.cpu()
    launch(given, tables.cpu(), lens.cpu(), pivots.cpu(), wanted)
    assert same(topk, given) and all(same(got, want) for got, want in zip(outs, wanted, strict=True))
