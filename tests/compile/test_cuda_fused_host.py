"""A fused store's kernels on the CPU, as their launcher chooses them and their host functions launch them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvhal
from kvhal.formats import FP4_INDEX_KV_FORMAT, V41_FORMAT, V41_FP4_FORMAT, KVCacheFormat
from kvhal.interface import Op, Request
from kvhal.layout import alloc_kv_cache, cache_geometry
from kvhal.numerics import widen
from kvhal.platform import Platform
from kvhal.stages import rms_norm

pytest.importorskip("tilelang")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")

from kvhal.backends.cuda_tilelang import build, fused  # noqa: E402
from kvhal.backends.cuda_tilelang.codec import Octets  # noqa: E402
from kvhal.backends.cuda_tilelang.fused_stages import fused_source  # noqa: E402
from tests.compile.simulated import Programs, simulated  # noqa: E402

FEW, CHUNK, MULTIPROCESSORS = 40, 200, 4  #: most tokens of the first two kernels; of a device that few tokens fill
#: its lanes have four octets or three
PADDED = KVCacheFormat("e2m1", 448, 16, 0, True, "e4m3", "448 elements", token_interleaved=True)
#: octets of a lane, dtypes of the rows and of the weights; rotated elements, Neox style, offset
FUSED = {
    "main": (V41_FP4_FORMAT, 4, torch.bfloat16, torch.bfloat16, (64, False, None), False),
    "main, all stages": (V41_FORMAT, 4, torch.bfloat16, torch.float32, (128, True, 200), True),
    "index": (FP4_INDEX_KV_FORMAT, 2, torch.float32, torch.float32, (64, True, 32), True),
    "padded": (PADDED, 4, torch.bfloat16, torch.float32, (256, False, 64), False),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three, with tokens enough for several waves of each: cache and rows that come back are the reference's."""
    layout, octets, dtype, weight_dtype, (dim, neox, offset), with_hadamard = FUSED[name]
    shapes = {"chunk": (8, 4 if layout.is_index else 1, 1, octets, CHUNK), "fused": (4, 2, 1, octets, FEW)}
    built: dict[tuple[Any, ...], Any] = {}

    def kernel(*what: Any, platform: Platform, device: torch.device) -> Any:
        if what not in built:
            folder = tmp_path / str(len(built))
            folder.mkdir()
            built[what] = simulated(*what, folder=folder)
        return built[what]

    monkeypatch.setattr(fused, "kernel", kernel)
    for module in (build, fused):
        monkeypatch.setattr(module, "MULTIPROCESSORS", MULTIPROCESSORS)
    monkeypatch.setattr(fused, "shape_of", lambda arch, kernel, dtype: shapes[kernel.removesuffix("_index")])
    launch = fused.bind_fused_store(Request(Op.FUSED_STORE, layout, Platform("cuda", "sm_90"), 64))
    generator = torch.Generator().manual_seed(22)
    weight = torch.randn(layout.elements, generator=generator).to(weight_dtype)
    turns = torch.randn((50, dim), generator=generator)
    for n in (1, FEW - 1, FEW, FEW + 1, CHUNK, CHUNK + 1, 333):
        kv = torch.randn((n, layout.elements), generator=generator).to(dtype)
        positions = torch.randint(-1, 51, (n,), generator=generator)
        slots = torch.randperm(n + 64, generator=generator)[:n] - 32  # some for no slot
        norm, rope = kvhal.NormArgs(weight), kvhal.RopeArgs(positions, turns, dim, neox, offset)
        hadamard = kvhal.HadamardArgs() if with_hadamard else None
        have, need = (alloc_kv_cache(-(-n // 64), 64, layout, "cpu") for _ in range(2))
        for cache in (have, need):
            cache.untyped_storage().fill_(0xEE)
        back = torch.zeros((n, layout.elements), dtype=torch.bfloat16)
        launch(kv, norm, rope, hadamard, have, slots, back)
        stages = {"norm_args": norm, "rope_args": rope, "hadamard_args": hadamard}
        out = kvhal.KVCacheOutArgs(need, slots, layout)
        with kvhal.use_backend("reference_torch"):
            wanted = kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
                kv, **stages, cast_args=kvhal.CastArgs.for_layout(layout, cast_back=True), out_args=out
            )
        assert torch.equal(have, need), n
        assert wanted is not None and torch.equal(back.view(torch.int16), wanted.view(torch.int16)), n
    assert len(built) == 3


#: elements, octets of a lane: one, powers of two, other numbers, more than there are lanes; some lanes without an octet
SUMS = [
    (8, 1),
    (16, 2),
    (24, 4),
    (64, 8),
    (128, 1),
    (128, 2),
    (128, 4),
    (192, 4),
    (448, 4),
    (512, 2),
    (512, 4),
    (512, 8),
    (2048, 8),
]
#: fp32 after the norm, which a record's bytes rarely tell from others
NORM = r"""
extern "C" __global__ void norm_kernel(bfloat16_t* rows, float* weight, float* out, float eps, int count) {
  using namespace kv;
  const int lane = threadIdx.x % LANES, token = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  u32 raw[4 * ROUNDS] = {};
  float v[VALUES], factors[VALUES] = {};
  for (int h = 0; h < ROUNDS; ++h) {
    const int octet = h * LANES + lane;
    if (octet >= OCTETS) continue;
    if (token < count) get_row(raw + 4 * h, rows + token * ELEMENTS + octet * 8);
    for (int i = 0; i < 8; ++i) factors[8 * h + i] = weight[octet * 8 + i];
  }
  widen_bf16(v, raw);
  norm(v, factors, eps, lane);
  for (int i = 0; i < VALUES; ++i) {
    const int element = i / 8 * LANES * 8 + lane * 8 + i % 8;
    if (token < count && element < ELEMENTS) out[token * ELEMENTS + element] = v[i];
  }
}
"""


def test_sums_of_squares_are_taken_in_one_order(tmp_path: Path) -> None:
    """The tree of docs/numerics.md, however a record's octets lie on lanes."""
    stages = fused.Stages("bfloat16", "float32", None, False, None, True, 16)
    layouts = [KVCacheFormat("e4m3", elements, 32, 0, True, "ue8m0", "rows", token_interleaved=True) for elements, _ in SUMS]
    octets = [Octets.of(layout, rounds) for layout, (_, rounds) in zip(layouts, SUMS, strict=True)]
    octets += [replace(octets[9], lanes=64, rounds=1)]  # over two warps
    layouts += [layouts[9]]
    sources = {}
    for i, (layout, each) in enumerate(zip(layouts, octets, strict=True)):
        sources[f"norm{i}"] = fused_source(cache_geometry(layout, 1), stages, each, 128 // each.lanes, staged=False) + NORM
    programs, generator, n = Programs(sources, tmp_path), torch.Generator().manual_seed(23), 100
    for i, (layout, each) in enumerate(zip(layouts, octets, strict=True)):
        rows = torch.randn((n, layout.elements), generator=generator).bfloat16()
        weight = torch.randn(layout.elements, generator=generator)
        out = torch.zeros((n, layout.elements))
        programs.run(f"norm{i}", -(-n * each.lanes // 128), 128, rows, weight, out, 1e-6, n)
        assert torch.equal(out, rms_norm(widen(rows), weight, 1e-6)), each
