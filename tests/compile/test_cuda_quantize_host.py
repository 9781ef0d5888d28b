"""The device functions that quantise, on the CPU: bytes of every kind of record, for every way that it lies on lanes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvhal.formats import BF16_INF, BF16_NAN, SPECIFIED_CODECS, KVCacheFormat
from kvhal.layout import CacheGeometry, cache_geometry
from kvhal.numerics import decode_e2m1, decode_e4m3, dequantize, quantize
from tests.compile.simulated import Programs

codec = pytest.importorskip("kvhal.backends.cuda_tilelang.codec")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")

TOKENS, THREADS, FILL = 48, 128, 0xEE  #: of a record's test; of a thread block; what was written by nobody
#: elements, elements of a group, octets of a lane; groups of as many octets as lanes or rounds, of fewer, of more, cut short,
#: and records that leave lanes without an octet
SHAPES = [
    *((512, group, rounds) for group in (16, 32, 128) for rounds in (2, 4, 8)),
    *((128, 32, 1), (128, 32, 2), (128, 64, 4), (128, 8, 8), (384, 64, 4), (384, 128, 8), (448, 32, 4), (1000, 16, 4)),
    *((8, 16, 1), (16, 8, 2), (24, 8, 4), (40, 16, 2), (40, 16, 4), (56, 32, 4), (96, 16, 4), (136, 32, 4)),
    *((128, 128, 4), (512, 512, 4), (520, 64, 2), (1024, 64, 4), (1536, 256, 8), (2048, 16, 8)),
]
#: largest magnitudes of which some e4m3 scale covers less than all: below a scale's step of its own, and above all scales
BETWEEN, ABOVE = (7 * 2.0**-9, 15 * 2.0**-9), 6 * 448.0

#: a store that reads octets as kernels do, and writes what a load would give
STORE = r"""
extern "C" __global__ void store_kernel(uchar* rows, uchar* cache, uchar* back, int count) {
  using namespace kv;
  const int lane = threadIdx.x % LANES, token = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  u32 raw[4 * ROUNDS] = {}, data[DATA_WORDS * ROUNDS], sf[ROUNDS], scales[ROUNDS];
  for (int h = 0; h < ROUNDS; ++h) {
    const int octet = h * LANES + lane;
    if (token < count && octet < OCTETS) get_row(raw + 4 * h, rows + (token * OCTETS + octet) * 16);
  }
  quantize(data, sf, raw);
  if (token < count) put_record(cache + token * DATA_STRIDE, cache + SF_OFFSET + token * SF_STRIDE, lane, data, sf);
  spread(scales, sf);
  for (int h = 0; h < ROUNDS; ++h) {
    const int octet = h * LANES + lane;
    if (token < count && octet < OCTETS) decode_row(back + (token * OCTETS + octet) * 16, data + DATA_WORDS * h, scales[h]);
  }
}
"""


@dataclass(frozen=True)
class Record:
    """A format, and how it lies in a block and on lanes."""

    geometry: CacheGeometry
    octets: codec.Octets
    alignment: int

    @property
    def source(self) -> str:
        where = self.geometry
        strides = {"DATA_STRIDE": where.data_token_stride, "SF_OFFSET": where.sf_offset, "SF_STRIDE": where.sf_token_stride}
        constants = "".join(f"constexpr int {name} = {value};\n" for name, value in strides.items())
        return f"namespace kv {{\n{constants}}}\n{codec.source(where, self.alignment, self.octets)}{STORE}"


def records(data: str, scale: str) -> list[Record]:
    found = []
    for i, (elements, group, rounds) in enumerate(SHAPES):
        layout = KVCacheFormat(data, elements, group, 0, i % 2 == 0, scale, "a record", token_interleaved=i % 2 == 0)
        octets = codec.Octets.of(layout, rounds)
        if octets.rounds == 2 and group <= 256 and i % 3 == 0:  # one a lane, over two warps
            octets = replace(octets, lanes=2 * octets.lanes, rounds=1)
        found.append(Record(cache_geometry(layout, TOKENS), octets, 2 if i % 5 == 4 else 16))
    return found


def rows(layout: KVCacheFormat, amax: Tensor, generator: torch.Generator) -> Tensor:
    """Rows whose groups have these largest magnitudes; half of the other elements lie on ties, or are exact."""
    n, elements, size = amax.shape[0], layout.elements, layout.elements_per_sf
    only = torch.zeros((n, elements), dtype=torch.bfloat16)
    only[:, ::size] = amax
    data, sf = quantize(only, layout)
    one = dequantize(torch.full_like(data, 0x22 if layout.quantized_dtype == "e2m1" else 0x38), sf, layout)
    decode, codes = (decode_e2m1, 8) if layout.quantized_dtype == "e2m1" else (decode_e4m3, 127)
    known = decode(torch.arange(codes, dtype=torch.uint8))
    known = torch.cat((known, (known[1:] + known[:-1]) / 2))
    most = amax.repeat_interleave(size, 1)[:, :elements]
    on = known[torch.randint(len(known), only.shape, generator=generator)] * one.float()
    free = torch.rand(only.shape, generator=generator) * most.float()
    value = torch.where(torch.rand(only.shape, generator=generator) < 0.5, on, free).bfloat16().minimum(most)
    for group in range(amax.shape[1]):
        place = group * size + (7 * group + 3) % min(size, elements - group * size)
        value[:, place] = amax[:, group]
    return torch.where(torch.rand(only.shape, generator=generator) < 0.5, value, -value)


def finite(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Magnitudes of all sizes, near 1 more often; bf16."""
    bits = torch.randint(BF16_INF, shape, generator=generator)
    near = torch.randint(0x3A00, 0x4528, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, bits, near).to(torch.int16).view(torch.bfloat16)


def spoilt(values: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Some Inf and NaN, in some groups of `size` elements."""
    share = torch.rand((values.shape[0], -(-values.shape[1] // size)), generator=generator)
    share = share.repeat_interleave(size, 1)[:, : values.shape[1]]
    dice = torch.rand(values.shape, generator=generator)
    bits = values.view(torch.int16).clone()
    bits[(share < 0.2) & (dice < 0.1)] = BF16_INF
    bits[(share > 0.1) & (share < 0.3) & (dice > 0.9)] = BF16_NAN - 3
    bits[(share > 0.25) & (share < 0.35) & (dice > 0.9)] = -5  # a NaN as well
    bits[(share > 0.95) & (dice < 1)] = -0x8000
    return bits.view(torch.bfloat16)


def check(programs: Programs, name: str, record: Record, given: Tensor, units_off: int = 0) -> None:
    """Bytes of a block, and rows that come back, are the specification's; nothing else is written."""
    where, n = record.geometry, given.shape[0]
    data, sf = quantize(given, where.layout)
    need = torch.full((where.block_stride,), FILL, dtype=torch.uint8)
    need.as_strided(data.shape, (where.data_token_stride, 1)).copy_(data)
    need.as_strided(sf.shape, (where.sf_token_stride, 1), where.sf_offset).copy_(sf)
    storage = torch.full((where.block_stride + 64,), FILL, dtype=torch.uint8)
    cache = storage[-storage.data_ptr() % 32 :][: where.block_stride]
    shift = record.alignment % 16 // 2
    source, back = (torch.zeros(given.numel() + 8 + shift, dtype=torch.bfloat16)[shift:] for _ in range(2))
    source[: given.numel()] = given.flatten()
    tokens = THREADS // record.octets.lanes  # of a thread block
    programs.run(name, -(-n // tokens), THREADS, source, cache, back, n, units_off=units_off)
    assert torch.equal(cache, need), f"{where.layout}, {record.octets}"
    decoded = dequantize(data, sf, where.layout).flatten().view(torch.int16)
    assert torch.equal(back.view(torch.int16)[: given.numel()], decoded), f"{where.layout}, {record.octets}"


@pytest.mark.parametrize(("data", "scale"), sorted(SPECIFIED_CODECS))
def test_records_of_every_shape(data: str, scale: str, tmp_path: Path) -> None:
    """With scales that cover all groups of all tokens, with some that do not, and with elements that are no numbers."""
    found = records(data, scale)
    programs = Programs({f"store{i}": record.source for i, record in enumerate(found)}, tmp_path)
    generator = torch.Generator().manual_seed(20)
    for i, record in enumerate(found):
        layout = record.geometry.layout
        amax = finite((TOKENS, layout.num_scales), generator)
        plain = rows(layout, amax, generator)
        covered = (amax <= ABOVE) & ((amax < BETWEEN[0]) | (amax > BETWEEN[1]))
        all_covered = rows(layout, torch.where(covered, amax, amax.new_tensor(3.0)), generator)
        given = (all_covered, plain, spoilt(all_covered, layout.elements_per_sf, generator))
        for rows_given, units_off in zip(given, (i % 3 - 1, (i + 1) % 3 - 1, (i + 2) % 3 - 1), strict=True):
            check(programs, f"store{i}", record, rows_given, units_off)


@pytest.mark.parametrize(("data", "scale"), sorted(SPECIFIED_CODECS))
def test_every_largest_magnitude(data: str, scale: str, tmp_path: Path) -> None:
    """Where all groups of a warp have it, so that it alone says whether codes are clamped; all where that changes."""
    layout = KVCacheFormat(data, 512, 16, 0, True, scale, "main", token_interleaved=True)
    bits = torch.arange(BF16_INF)
    values = bits.to(torch.int16).view(torch.bfloat16).float()
    near = (values > BETWEEN[0] / 2) & (values < BETWEEN[1] * 2) | (values > 0.99 * ABOVE) & (values < 1.02 * ABOVE)
    amax = values[near | (bits % 61 == 0) | (bits > BF16_INF - 8)].bfloat16()
    octets = codec.Octets.of(layout, 4)
    amax = amax.repeat_interleave(octets.tokens_a_warp)[:, None].expand(-1, layout.num_scales)
    record = Record(cache_geometry(layout, len(amax)), octets, 16)
    programs = Programs({"store": record.source}, tmp_path)
    check(programs, "store", record, rows(layout, amax, torch.Generator().manual_seed(21)))
