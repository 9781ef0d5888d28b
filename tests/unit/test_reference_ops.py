"""Each operation of reference_torch against a loop written from the contract, on small caches and hostile metadata.

Launchers are bound directly; the cache lies between guard bytes, everything is filled with a pattern, and all bytes are
compared. Codecs have their own tests: the loops here use `kvhal.numerics` a record at a time, and plain integers for
every address.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvhal.backends.reference_torch.manifest import BACKEND
from kvhal.formats import BF16_FORMAT, SUPPORTED_KV_CACHE_FORMATS, V41_FORMAT, KVCacheFormat
from kvhal.interface import HadamardArgs, NormArgs, Op, Request, RopeArgs
from kvhal.layout import DATA_DTYPES, cache_view, min_block_stride, sf_output
from kvhal.numerics import dequantize, quantize, round_bf16, widen
from kvhal.platform import Platform
from kvhal.stages import hadamard, rms_norm, rope

CPU = Platform("cpu", "test")
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
GUARD = 4096

FORMATS = (
    *SUPPORTED_KV_CACHE_FORMATS,
    BF16_FORMAT,
    KVCacheFormat("e2m1", 22, 5, 0, True, "e4m3", "odd bytes", token_interleaved=True),
    KVCacheFormat("e4m3", 33, 8, 0, True, "fp32", "scales at odd addresses", token_interleaved=True),
    KVCacheFormat("e4m3", 33, 8, 0, False, "fp32", "raw scales at odd addresses", token_interleaved=True),
    KVCacheFormat("e4m3", 50, 16, 0, False, "ue8m0", "four scales, a short last group"),
    KVCacheFormat("e4m3", 40, 8, 0, False, "ue8m0", "five scales"),
)
MAIN_FORMATS = [layout for layout in FORMATS if not layout.is_index]


def bind(op: Op, layout: KVCacheFormat | None = None) -> Any:
    return BACKEND.bind(Request(op, layout, CPU))


class Cache:
    """A paged cache between guards, with the byte addresses of a record computed by hand."""

    def __init__(self, layout: KVCacheFormat, num_blocks: int, block_size: int, spare: int = 0) -> None:
        self.layout, self.num_blocks, self.block_size = layout, num_blocks, block_size
        self.stride = min_block_stride(layout, block_size) + spare
        size = GUARD + num_blocks * self.stride + GUARD
        self.raw = (torch.arange(size) * 167 + (torch.arange(size) >> 8) * 31).to(torch.uint8)
        storage = self.raw[GUARD : GUARD + num_blocks * self.stride].view(num_blocks, self.stride)
        self.tensor = cache_view(storage, block_size, layout)
        self.capacity = num_blocks * block_size

    def places(self, slot: int) -> tuple[slice, slice]:
        """Where the data and the scales of a slot lie in `raw`."""
        block, token = divmod(slot, self.block_size)
        start, record = GUARD + block * self.stride, self.layout.bytes_per_token
        if self.layout.token_interleaved:
            data = start + token * record
            sf = data + self.layout.data_bytes
        else:
            data = start + token * self.layout.data_bytes
            sf = start + self.block_size * self.layout.data_bytes + token * self.layout.sf_bytes
        return slice(data, data + self.layout.data_bytes), slice(sf, sf + self.layout.sf_bytes)

    def record(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        data, sf = self.places(slot)
        return self.raw[data].clone(), self.raw[sf].clone()

    def row(self, slot: int) -> torch.Tensor:
        """The dequantised bf16 row of a slot."""
        data, sf = self.record(slot)
        return dequantize(data.unsqueeze(0), sf.unsqueeze(0), self.layout)[0]

    def fill(self, seed: int) -> None:
        """A stored record in every slot."""
        data, sf = quantize(values(self.capacity, self.layout.elements, seed), self.layout)
        for slot in range(self.capacity):
            for place, bytes_ in zip(self.places(slot), (data[slot], sf[slot]), strict=True):
                self.raw[place] = bytes_


def values(n: int, elements: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, elements, generator=generator) * torch.randn(n, 1, generator=generator).exp()
    return rows.to(torch.bfloat16)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


SLOTS = {
    "distinct": lambda c: list(range(c - 1, -1, -1)),
    "hostile": lambda c: [-1, 0, c, -5, c - 1, c + 1, INT_MIN, INT_MAX, 1],
    "padding only": lambda c: [-1] * 7,
    "all invalid": lambda c: [c, INT_MIN, INT_MAX, -2],
    "one": lambda c: [c - 1],
    "one padding": lambda c: [-1],
}


@pytest.mark.parametrize("layout", FORMATS, ids=str)
@pytest.mark.parametrize("case", SLOTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_store(layout: KVCacheFormat, case: str, dtype: torch.dtype) -> None:
    cache = Cache(layout, 3, 3, spare=64)
    slots = SLOTS[case](cache.capacity)
    if dtype == torch.int64:
        slots = [*slots, 2**62, -(2**63), 2**63 - 1, 2**32]  # 2**32 is slot 0 to whoever cuts it to 32 bits
    kv = values(len(slots), layout.elements + 3)[:, : layout.elements]
    expected = Cache(layout, 3, 3, spare=64)
    for token, slot in enumerate(slots):
        if 0 <= slot < cache.capacity:
            data, sf = quantize(kv[token : token + 1], layout)
            for place, bytes_ in zip(expected.places(slot), (data, sf), strict=True):
                expected.raw[place] = bytes_[0]
    bind(Op.STORE, layout)(kv, cache.tensor, torch.tensor(slots, dtype=dtype))
    assert torch.equal(cache.raw, expected.raw)


@pytest.mark.parametrize("layout", [V41_FORMAT, BF16_FORMAT, *SUPPORTED_KV_CACHE_FORMATS[2:4]], ids=str)
def test_store_duplicates_keep_one_whole_writer(layout: KVCacheFormat) -> None:
    """Enough tokens for torch to split the write over threads."""
    cache, tokens = Cache(layout, 2, 5), 3000
    slots = torch.randint(-2, cache.capacity + 2, (tokens,), generator=torch.Generator().manual_seed(1))
    kv = values(tokens, layout.elements)
    bind(Op.STORE, layout)(kv, cache.tensor, slots)
    data, sf = quantize(kv, layout)
    for slot in range(cache.capacity):
        writer = int(torch.nonzero(slots == slot)[-1])
        stored = cache.record(slot)
        assert torch.equal(stored[0], data[writer]) and torch.equal(stored[1], sf[writer])


def test_store_takes_expanded_rows_and_chunks_of_many() -> None:
    """More tokens than one pass of the codec or of the scatter takes, all views of one row."""
    layout = V41_FORMAT
    cache = Cache(layout, 20, 64)
    kv = values(1, layout.elements).expand(1280, layout.elements)
    bind(Op.STORE, layout)(kv, cache.tensor, torch.randperm(1280))
    first = cache.record(0)
    assert all(torch.equal(a, b) for slot in range(0, 1280, 7) for a, b in zip(cache.record(slot), first, strict=True))


@pytest.mark.parametrize("layout", MAIN_FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_load_slots(layout: KVCacheFormat, dtype: torch.dtype) -> None:
    cache = Cache(layout, 3, 5)
    cache.fill(3)
    before = cache.raw.clone()
    slots = [0, -1, 14, 7, 7, 15, 16, -5, INT_MIN, INT_MAX, 3]
    slots += [2**32, 2**62, -(2**63)] if dtype == torch.int64 else []
    out = torch.full((len(slots), layout.elements + 2), 7.0, dtype=torch.bfloat16)
    bind(Op.LOAD_SLOTS, layout)(cache.tensor, torch.tensor(slots, dtype=dtype), out[:, : layout.elements])
    zero = torch.zeros(layout.elements, dtype=torch.bfloat16)
    want = torch.stack([cache.row(slot) if 0 <= slot < cache.capacity else zero for slot in slots])
    assert same_bits(out[:, : layout.elements], want)
    assert (out[:, layout.elements :] == 7.0).all() and torch.equal(cache.raw, before)


SEGMENTS = {
    "plan": [[2, 0, 5, 0], [0, 1, 4, 5], [-1, 0, 3, 8], [1, 4, 5, 11]],
    "gaps": [[1, 0, 2, 3], [0, 3, 3, 0], [2, 4, 2, 9]],
    "outside the block": [[0, -3, 2, 1], [1, 3, 99, 8], [2, INT_MIN, INT_MAX, 0], [0, INT_MAX, INT_MIN, 0]],
    "outside the output": [[0, 0, 5, -2], [1, 0, 5, 12], [2, 0, 5, INT_MAX], [2, 0, 5, INT_MIN]],
    "sums that wrap": [[0, INT_MIN, 5, INT_MIN], [1, -1, INT_MAX, INT_MAX - 1], [0, 4, 5, INT_MAX], [2, -2, 5, -2]],
    "blocks": [[3, 0, 5, 0], [-2, 0, 2, 5], [INT_MAX, 1, 3, 7], [INT_MIN, 0, 5, 9]],
    "zero rows outside": [[-1, -4, 50, 2], [-1, INT_MIN, INT_MAX, INT_MIN]],
    "nothing": [[0, 5, 9, 0], [0, -9, 0, 0]],
}


def outputs(layout: KVCacheFormat, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Poisoned outputs, row slices of wider buffers."""
    if not layout.is_index:
        return torch.full((rows, layout.elements + 2), 7.0, dtype=torch.bfloat16)[:, : layout.elements], None
    data = torch.full((rows, layout.data_bytes + 3), 0x5A, dtype=torch.uint8).view(DATA_DTYPES[layout.quantized_dtype])
    dtype, tail = sf_output(layout)
    sf = torch.full((rows, *tail), 77, dtype=torch.int32).to(dtype)
    return data[:, : layout.data_bytes], sf


def expected_load(
    cache: Cache, segments: list[list[int]], total_k: int, out: torch.Tensor, sf: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Byte rows after a load, one row at a time."""
    layout = cache.layout
    rows = out.clone().view(torch.uint8)
    scales = None if sf is None else sf.clone().view(len(rows), -1).view(torch.uint8)
    for block, begin, end, offset in segments:
        for token in range(max(begin, 0), min(end, cache.block_size)):
            row = offset + token - begin
            if not 0 <= row < total_k:
                continue
            rows[row] = 0
            if scales is not None:
                scales[row] = 0
            if 0 <= block < cache.num_blocks:
                slot = block * cache.block_size + token
                data, scale = cache.record(slot)
                rows[row] = data if layout.is_index else cache.row(slot).view(torch.uint8)
                if scales is not None:
                    scales[row] = scale
    return rows, scales


@pytest.mark.parametrize("layout", FORMATS, ids=str)
@pytest.mark.parametrize("case", SEGMENTS)
def test_load(layout: KVCacheFormat, case: str) -> None:
    cache, total_k = Cache(layout, 3, 5), 13
    cache.fill(4)
    before = cache.raw.clone()
    out, sf = outputs(layout, total_k + 2)
    segments = SEGMENTS[case]
    want, want_sf = expected_load(cache, segments, total_k, out, sf)
    bind(Op.LOAD, layout)(cache.tensor, torch.tensor(segments, dtype=torch.int32), total_k, out, sf)
    assert torch.equal(out.view(torch.uint8), want)
    if sf is not None and want_sf is not None:
        assert torch.equal(sf.view(len(want_sf), -1).view(torch.uint8), want_sf)
    assert torch.equal(cache.raw, before)


def test_load_overlap_gives_one_whole_row() -> None:
    cache = Cache(V41_FORMAT, 3, 5)
    cache.fill(5)
    out, _ = outputs(V41_FORMAT, 5)
    bind(Op.LOAD, V41_FORMAT)(cache.tensor, torch.tensor([[b % 3, 0, 5, 0] for b in range(600)]).int(), 5, out, None)
    for token in range(5):
        assert any(same_bits(out[token], cache.row(block * 5 + token)) for block in range(3))


@pytest.mark.parametrize("layout", FORMATS, ids=str)
def test_a_cache_without_blocks_reads_as_zeros_and_takes_nothing(layout: KVCacheFormat) -> None:
    cache = Cache(layout, 0, 4)
    out, sf = outputs(layout, 3)
    bind(Op.LOAD, layout)(cache.tensor, torch.tensor([[0, 0, 2, 0]], dtype=torch.int32), 3, out, sf)
    assert not out.view(torch.uint8)[:2].any() and out.view(torch.uint8)[2].any()
    bind(Op.STORE, layout)(values(2, layout.elements), cache.tensor, torch.tensor([0, 1]))


def test_bf16_records_keep_every_bit() -> None:
    """Payloads of NaN included: nothing is rounded, so nothing is made canonical."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(128, 512)
    cache = Cache(BF16_FORMAT, 2, 64)
    bind(Op.STORE, BF16_FORMAT)(bits.view(torch.bfloat16), cache.tensor, torch.arange(128))
    out = torch.empty(128, 512, dtype=torch.bfloat16)
    bind(Op.LOAD_SLOTS, BF16_FORMAT)(cache.tensor, torch.arange(128), out)
    assert torch.equal(out.view(torch.int16), bits)


STAGES = [(norm, rotary, transform) for norm in (0, 1) for rotary in (0, 1) for transform in (0, 1)]


@pytest.mark.parametrize("layout", [V41_FORMAT, BF16_FORMAT, SUPPORTED_KV_CACHE_FORMATS[2]], ids=str)
@pytest.mark.parametrize("stages", STAGES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fused_store(layout: KVCacheFormat, stages: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The stages are `kvhal.stages`, in their order, then one rounding, the store, and the load of what was stored."""
    elements = layout.elements
    slots = [3, -1, 0, 99, INT_MIN, 5]
    kv = (torch.randn(len(slots), elements + 8, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)[:, :elements]
    kv[2, 5] = float("nan")
    norm = NormArgs(torch.randn(elements), 1e-6) if stages[0] else None
    positions = torch.tensor([0, 3, 9, 10, -1, INT_MAX], dtype=torch.int32)
    rotary = RopeArgs(positions, torch.randn(10, 16), 16, offset=elements - 16) if stages[1] else None
    transform = HadamardArgs() if stages[2] else None
    x = widen(kv)
    x = rms_norm(x, norm.weight, norm.eps) if norm else x
    x = rope(x, rotary) if rotary else x
    rows = round_bf16(hadamard(x) if transform else x)
    cache, expected = Cache(layout, 2, 4), Cache(layout, 2, 4)
    bind(Op.STORE, layout)(rows, expected.tensor, torch.tensor(slots))
    back = torch.empty(len(slots), elements, dtype=torch.bfloat16)
    launch = bind(Op.FUSED_STORE, layout)
    launch(kv, norm, rotary, transform, cache.tensor, torch.tensor(slots), back)
    assert torch.equal(cache.raw, expected.raw)
    assert same_bits(back, dequantize(*quantize(rows, layout), layout))
    again = torch.empty_like(back)
    launch(kv, norm, rotary, transform, None, None, again)
    assert same_bits(again, back)


def test_manifest_serves_all_but_unspecified_codecs() -> None:
    assert set(BACKEND.binders) == set(Op)
    for kind in ("cpu", "cuda", "npu", "privateuseone"):
        assert all(not BACKEND.why_not(Request(Op.STORE, layout, Platform(kind, ""))) for layout in FORMATS)
    layout = KVCacheFormat("e4m3", 64, 32, 0, True, "e4m3", "", token_interleaved=True)
    (reason,) = BACKEND.why_not(Request(Op.STORE, layout, CPU))
    assert reason.what == "codec" and reason.have == "e4m3 data with e4m3 scales" and "e4m3 with ue8m0" in reason.need
    layout = KVCacheFormat("e4m3", 96, 32, 0, True, "ue8m0", "", token_interleaved=True)
    request = Request(Op.FUSED_STORE, layout, CPU, stages=("hadamard",))
    assert [reason.what for reason in BACKEND.why_not(request)] == ["hadamard"]
