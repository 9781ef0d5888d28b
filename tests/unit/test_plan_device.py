"""Plans made where their block tables live: the host's plan to the last row, from every backend that runs on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvhal
from kvhal import plan
from kvhal.plan import device as plan_device

INT32_MAX = 2**31 - 1
BATCHES: dict[str, tuple[list[int], int, int]] = {  # lengths, block_size, ratio
    "ragged": ([1000, 1, 64, 65, 63, 0, 128, 517], 64, 1),
    "tokens": ([3, 0, 1, 5], 1, 1),
    "odd": ([133, 134, 132, 0, 400], 133, 1),
    "ratio": ([256, 255, 3, 4, 0, 259, 515], 64, 4),
    "one-token-blocks": ([7, 8, 40, 0], 8, 8),
    "empty": ([0, 3, 0], 64, 4),
    "no-sequence": ([], 64, 1),
    "one": ([130], 64, 1),
    "many": ([(i * 37) % 90 for i in range(70)], 16, 2),
}


@pytest.fixture(params=["reference_torch", "portable_triton", "ascend_tilelang"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Serves every call."""
    name = request.param
    simulate = name == "ascend_tilelang"
    with kvhal.use_backend(name, simulate=simulate):
        decision = kvhal.explain("expand_load_plan")
        if decision.chosen is None:
            pytest.skip(str(decision))
        if simulate:
            from kvhal.backends.ascend_tilelang import simulator

            if (reason := simulator.why_unavailable()) is not None:
                pytest.skip(reason)
        yield name


def tables(lengths: list[int], block_size: int, spare: int = 0) -> torch.Tensor:
    """Shuffled blocks where a sequence reaches, -1 behind, as a slice of something wider and misaligned."""
    width = max((-(-n // block_size) for n in lengths), default=0) + spare
    storage = torch.full((len(lengths), width + 4), -9, dtype=torch.int32)
    table = storage[:, 1 : width + 1]
    table.copy_(
        torch.randperm(max(table.numel(), 1), generator=torch.Generator().manual_seed(1))[: table.numel()].view(table.shape)
    )
    for row, n in zip(table, lengths, strict=True):
        row[-(-n // block_size) :] = -1
    return table


def check_equal(have: plan.CompressedLoadPlan, need: plan.CompressedLoadPlan) -> None:
    assert have.total_k == need.total_k
    for name in ("segments", "cu_compressed_seqlens"):
        mine, other = getattr(have, name), getattr(need, name)
        assert mine.dtype == other.dtype == torch.int32
        assert torch.equal(mine.cpu(), other), name
    assert have.segments.is_contiguous()


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_the_hosts_plan(backend: str, name: str, spare: int) -> None:
    lengths, block_size, ratio = BATCHES[name]
    table = tables(lengths, block_size, spare)
    need = plan.build_compressed_load_plan(lengths, table, block_size=block_size, ratio=ratio)
    have = plan.build_compressed_load_plan(
        torch.tensor(lengths, dtype=torch.int64), table, block_size=block_size, ratio=ratio, device="cpu"
    )
    check_equal(have, need)


@st.composite
def batches(draw: Any) -> tuple[list[int], int, int]:
    lengths = draw(st.lists(st.integers(0, 90), max_size=9))
    ratio = draw(st.integers(1, 4))
    return lengths, draw(st.integers(1, 9)) * ratio, ratio


@settings(max_examples=40, deadline=None)
@given(batches(), st.integers(0, 2))
def test_equals_the_hosts_plan_of_any_batch(batch: tuple[list[int], int, int], spare: int) -> None:
    lengths, block_size, ratio = batch
    table = tables(lengths, block_size, spare)
    need = plan.build_compressed_load_plan(lengths, table, block_size=block_size, ratio=ratio)
    check_equal(plan.build_compressed_load_plan(lengths, table, block_size=block_size, ratio=ratio, device="cpu"), need)


def test_the_ring_plan_goes_to_the_device() -> None:
    arguments: dict[str, Any] = {"window_size": 4, "swa_block_size": 6, "swa_valid_starts": [5, 0]}
    need = plan.build_swa_load_plan([9, 3], [1, 3], [2, -1], **arguments)
    have = plan.build_swa_load_plan([9, 3], [1, 3], [2, -1], **arguments, device="meta")
    assert have.segments.device.type == "meta" and have.segments.shape == need.segments.shape
    assert have.total_k == need.total_k
    assert torch.equal(plan.build_swa_load_plan([9, 3], [1, 3], [2, -1], **arguments, device="cpu").segments, need.segments)


def test_ids_that_are_no_blocks_are_loaded_as_zeros(backend: str) -> None:
    table = torch.tensor([[1, -1, 0], [-5, INT32_MAX, -1]], dtype=torch.int32)
    built = plan.build_compressed_load_plan([10, 6], table, block_size=4, ratio=1, device="cpu")
    assert built.segments.tolist() == [[1, 0, 4, 0], [-1, 0, 4, 4], [0, 0, 2, 8], [-5, 0, 4, 10], [INT32_MAX, 0, 2, 14]]
    cache = kvhal.alloc_kv_cache(2, 4, kvhal.BF16_FORMAT, "cpu").fill_(1)
    with kvhal.use_backend("reference_torch"):
        loaded = kvhal.load_paged_kv_cache(cache, built.segments, built.total_k).kv
    assert loaded[:, 0].tolist() == [1.0] * 4 + [0.0] * 4 + [1.0] * 2 + [0.0] * 6


def test_strict_mode_looks_at_the_ids_that_a_plan_reaches() -> None:
    kvhal.configure(strict=True)
    table = torch.tensor([[1, 2, -1], [0, -7, -1]], dtype=torch.int32)
    plan.build_compressed_load_plan([8, 4], table, block_size=4, ratio=1, device="cpu")
    plan.build_compressed_load_plan([0, 0, 9, 0], tables([0, 0, 9, 0], 4), block_size=4, ratio=1, device="cpu")
    plan.build_compressed_load_plan([0, 3], torch.empty((2, 0), dtype=torch.int32), block_size=4, ratio=4, device="cpu")
    zeros = torch.tensor([[0, 0, -1, 0, 3]], dtype=torch.int32)
    assert kvhal.expand_load_plan(zeros, table[:0], 4, 1).tolist() == [[-1, 0, 3, 0]]
    with pytest.raises(kvhal.InvalidMetadata, match=r"block_tables\[1, 1\]: has -7, needs a block id >= 0"):
        plan.build_compressed_load_plan([8, 5], table, block_size=4, ratio=1, device="cpu")


def test_spans_may_begin_anywhere(backend: str) -> None:
    spans = torch.tensor([[0, 0, 1, 5, 14], [3, 9, 0, 4, 4], [3, 9, -1, 2, 6], [5, 13, 0, 3, 8]], dtype=torch.int32)
    table = torch.tensor([[7, 8], [4, 5]], dtype=torch.int32)
    need = [
        [5, 1, 4, 0],
        [-1, 0, 4, 3],
        [-1, 0, 2, 7],
        [-1, 2, 4, 9],
        [-1, 0, 2, 11],
        [7, 3, 4, 13],
        [8, 0, 4, 14],
        [-1, 0, 0, 0],
    ]
    assert kvhal.expand_load_plan(spans, table, 4, 8).tolist() == need


REFUSED = [
    ([65], {}, ValueError, "block_tables: sequence 0 has 1 blocks of 64 tokens (64), needs 2 blocks for tokens [0, 65)"),
    ([5], {"block_tables": [[0]]}, TypeError, "block_tables is a list, needs an int32 tensor on cpu; make it one, or leave"),
    ([5], {"block_tables": torch.zeros(1, 1)}, TypeError, "block_tables has dtype torch.float32, needs torch.int32"),
    ([5], {"block_tables": torch.zeros(1, 1).long()}, TypeError, "block_tables has dtype torch.int64, needs torch.int32"),
    ([5, 5], {}, ValueError, "block_tables has shape (1, 1), needs one row of block ids per sequence: [2, width]"),
    ([5], {"device": "meta"}, ValueError, "block_tables is on cpu, needs meta, where the plan is to be; move it, or leave"),
    ([-1], {}, ValueError, "seqlens_k[0] is -1, needs 0.."),
    ([5], {"ratio": 3}, ValueError, "block_size is 64, needs a multiple of ratio 3"),
    ([2**30] * 2, {"block_size": 2**30}, ValueError, "the plan has 2147483648 rows, needs at most 2147483647"),
]


@pytest.mark.parametrize(("lengths", "change", "error", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_refusals(lengths: list[int], change: dict[str, Any], error: type[Exception], text: str) -> None:
    ids = torch.zeros((2 if "block_size" in change else 1, 1), dtype=torch.int32)
    arguments = {"block_tables": ids, "block_size": 64, "ratio": 1, "device": "cpu"} | change
    with pytest.raises(error) as raised:
        plan.build_compressed_load_plan(lengths, **arguments)
    assert text in str(raised.value)


def test_no_plan_goes_to_a_device_whose_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_device, "is_capturing", lambda device: True)
    monkeypatch.setattr("kvhal.plan.segments.usable_device", torch.device)
    with pytest.raises(kvhal.CaptureError, match="make plans before the capture"):
        plan.build_swa_load_plan([3], [1], [0], window_size=2, swa_block_size=2, device="cuda")
