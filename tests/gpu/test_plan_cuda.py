"""Plans expanded on a GPU: the host's rows from every backend, and no wait for the device anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvhal
from kvhal import plan
from kvhal.errors import CaptureError
from tests.unit.test_plan_device import BATCHES, check_equal, tables

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["reference_torch", "portable_triton", "cuda_tilelang"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Serves every call."""
    with kvhal.use_backend(request.param):
        decision = kvhal.explain("expand_load_plan", device="cuda")
        if decision.chosen is None:
            pytest.skip(str(decision))
        yield request.param


@pytest.fixture
def no_sync() -> Iterator[Any]:
    """Turns every wait that torch knows of into an error, from the call on."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", BATCHES)
def test_equals_the_hosts_plan(backend: str, name: str) -> None:
    lengths, block_size, ratio = BATCHES[name]
    table = tables(lengths, block_size, 2)
    need = plan.build_compressed_load_plan(lengths, table, block_size=block_size, ratio=ratio)
    storage = torch.full((len(lengths), table.shape[1] + 3), -9, dtype=torch.int32, device="cuda")
    moved = storage[:, 1 : table.shape[1] + 1].copy_(table)
    check_equal(plan.build_compressed_load_plan(lengths, moved, block_size=block_size, ratio=ratio, device="cuda"), need)


@pytest.mark.parametrize(("sequences", "ragged"), [(256, False), (256, True), (1, False)])
def test_half_a_million_segments(backend: str, sequences: int, ragged: bool) -> None:
    lengths = torch.full((sequences,), 131072)
    if ragged:
        lengths = torch.randint(0, 131073, (sequences,), generator=torch.Generator().manual_seed(0))
    table = torch.randperm(sequences * 2048, dtype=torch.int32).view(sequences, 2048)
    need = plan.build_compressed_load_plan(lengths, table, block_size=64, ratio=1)
    check_equal(plan.build_compressed_load_plan(lengths, table.cuda(), block_size=64, ratio=1, device="cuda"), need)


def build(table: torch.Tensor) -> list[plan.LoadPlan]:
    """Both plans of a step."""
    k = [4000, 0, 129]
    compressed = plan.build_compressed_load_plan(k, table, block_size=64, ratio=4, device="cuda")
    ring: dict[str, Any] = {"window_size": 64, "swa_block_size": 128, "device": "cuda"}
    return [compressed, plan.build_swa_load_plan(k, [5, 0, 1], [2, -1, 0], **ring)]


def test_nothing_waits_for_the_device(backend: str, no_sync: Any) -> None:
    """No wait that torch reports, and a device that is busy all the while."""
    table = tables([4000, 0, 129], 64).cuda()
    need = [built.to("cpu") for built in build(table)]  # compiles, and leaves page-locked memory to the next plans
    torch.cuda.synchronize()
    no_sync()
    torch.cuda._sleep(1_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    have = build(table)
    assert not busy.query(), "the host waited"
    torch.cuda.set_sync_debug_mode("default")
    for mine, other in zip(have, need, strict=True):
        assert torch.equal(mine.segments.cpu(), other.segments) and mine.total_k == other.total_k


def test_page_locked_memory_lives_until_it_is_read(backend: str) -> None:
    """Many plans wait behind a busy device, each with numbers of its own."""
    table = torch.arange(64, dtype=torch.int32, device="cuda").view(1, 64)
    torch.cuda._sleep(200_000_000)
    plans = [plan.build_compressed_load_plan([n], table, block_size=4, ratio=1, device="cuda") for n in range(1, 257)]
    for n, built in enumerate(plans, 1):
        assert built.segments.shape[0] == -(-n // 4) and built.segments[-1].tolist()[2] == (n - 1) % 4 + 1
        assert built.cu_compressed_seqlens.tolist() == [0, n]


def test_plans_are_made_outside_of_graphs_and_expanded_inside(backend: str) -> None:
    spans = torch.tensor([[0, 0, 0, 0, 9], [3, 9, 1, 4, 8]], dtype=torch.int32, device="cuda")
    table = torch.tensor([[5, 6, 7], [1, 2, 3]], dtype=torch.int32, device="cuda")
    out = torch.zeros((4, 4), dtype=torch.int32, device="cuda")
    kvhal.expand_load_plan(spans, table, 4, 4, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kvhal.expand_load_plan(spans, table, 4, 4, out)
        with pytest.raises(CaptureError, match="make plans before the capture"):
            plan.build_compressed_load_plan([9, 4], table, block_size=4, ratio=1, device="cuda")
    table += 10
    graph.replay()
    assert out.tolist() == [[15, 0, 4, 0], [16, 0, 4, 4], [17, 0, 1, 8], [12, 0, 4, 9]]


def test_strict_mode_reads_the_ids(backend: str) -> None:
    kvhal.configure(strict=True)
    table = torch.tensor([[0, -7]], dtype=torch.int32, device="cuda")
    with pytest.raises(kvhal.InvalidMetadata, match=r"block_tables\[0, 1\]: has -7"):
        plan.build_compressed_load_plan([5], table, block_size=4, ratio=1, device="cuda")
