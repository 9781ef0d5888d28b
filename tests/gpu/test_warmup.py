"""On a GPU: whatever was named to a warm-up is captured into a graph without building anything."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch

import kvhal
from kvhal import CastArgs, FusedStages, KVCacheOutArgs, NormArgs, RopeArgs
from kvhal.layout import alloc_kv_cache

pytestmark = pytest.mark.gpu
BLOCK_SIZE = 29  # no other test builds for it


@pytest.mark.parametrize("backend", ["cuda_tilelang", "portable_triton"])
@pytest.mark.parametrize("layout", [kvhal.V41_FORMAT, kvhal.V41_FP4_FORMAT], ids=str)
@pytest.mark.parametrize("n", [37, 4096])
def test_a_fused_store_is_captured_at_once(backend: str, layout: kvhal.KVCacheFormat, n: int) -> None:
    """Norm, rotary embedding and cast-back; the graph's bytes are those of an eager call."""
    kind = FusedStages(norm=torch.bfloat16, rope_dim=64, cast_back=True)
    device = torch.device("cuda", torch.cuda.current_device())
    kv = torch.randn((n, 512), device=device).bfloat16()
    norm = NormArgs(torch.randn(512, device=device).bfloat16())
    rope = RopeArgs(torch.arange(n, device=device) % 99, torch.randn((99, 64), device=device), 64)
    blocks = n // BLOCK_SIZE + 1
    casting, slots = CastArgs.for_layout(layout, cast_back=True), torch.randperm(blocks * BLOCK_SIZE, device=device)[:n]
    caches = [alloc_kv_cache(blocks, BLOCK_SIZE, layout, device).zero_() for _ in range(2)]

    def call(cache: torch.Tensor) -> torch.Tensor | None:
        return kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
            kv, norm_args=norm, rope_args=rope, cast_args=casting, out_args=KVCacheOutArgs(cache, slots, layout)
        )

    with kvhal.use_backend(backend):
        kvhal.warmup(layouts=[layout], block_size=BLOCK_SIZE, device=device, fused=[kind])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            back = call(caches[0])
            loaded = kvhal.load_kv_slots(caches[0], slots, layout=layout)
        graph.replay()
        assert back is not None and torch.equal(back, loaded)
        eager = call(caches[1])
        assert eager is not None and torch.equal(back, eager) and torch.equal(caches[0], caches[1])


@pytest.mark.parametrize("backend", ["cuda_tilelang", "portable_triton"])
@pytest.mark.parametrize("rows", [3, 2048])
def test_other_operations_are_captured_at_once(backend: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and many segments, small and large tables of indices; nothing that an earlier test built is at hand."""
    layout, device = kvhal.V41_FORMAT, torch.device("cuda", torch.cuda.current_device())
    if backend == "cuda_tilelang":
        monkeypatch.setattr(importlib.import_module("kvhal.backends.cuda_tilelang.build"), "_kernels", {})
    new = partial(torch.zeros, dtype=torch.int32, device=device)
    cache, table, out = alloc_kv_cache(3, BLOCK_SIZE, layout, device).zero_(), new(rows, 64), new(rows, 128)
    segments = torch.tensor([[1, 0, BLOCK_SIZE, 0]], dtype=torch.int32, device=device).expand(rows, -1).contiguous()
    record = torch.empty((BLOCK_SIZE, 512), dtype=torch.bfloat16, device=device)
    calls = [
        lambda: kvhal.load_paged_kv_cache(cache, segments, BLOCK_SIZE, record, layout=layout),
        lambda: kvhal.convert_kv_index(table[None], new(1, 64), new(1, rows), BLOCK_SIZE),
        lambda: kvhal.kv_index_cat(table, table, 1, 2, out),
        lambda: kvhal.expand_swa_index(new(rows, 4), 64, table),
        lambda: kvhal.get_kv_swa_index_decode(new(rows, 2), 64, BLOCK_SIZE, table),
        lambda: kvhal.expand_load_plan(new(2, 5), table, BLOCK_SIZE, rows, new(rows, 4)),
    ]
    with kvhal.use_backend(backend):
        kvhal.configure()
        kvhal.warmup(layouts=[layout], block_size=BLOCK_SIZE, device=device)
        for call in calls:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                call()
