"""Planning: every refusal names the argument, what it has and what it needs."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvhal.plan

plan: Any = kvhal.plan  # wrong types are passed on purpose
INT32_MAX = 2**31 - 1


def builder() -> Any:
    return plan.BlockLoadPlanBuilder(16)


REFUSED = [
    # block tables
    (
        lambda: plan.build_compressed_load_plan([4, 65], [[0, 1]] * 2, block_size=32, ratio=1),
        "block_tables: sequence 1 has 2 blocks of 32 tokens (64), needs 3 blocks for tokens [0, 65)",
    ),
    (
        lambda: plan.build_compressed_load_plan([132], [[0, 1]], block_size=64, ratio=4),
        "block_tables: sequence 0 has 2 blocks of 16 compressed tokens (32), needs 3 blocks",
    ),
    (
        lambda: plan.build_paged_slot_mapping([33, 8], [1, 1], [[0], [0]], block_size=32),
        "block_tables: sequence 0 has 1 blocks of 32 tokens (32), needs 2 blocks for tokens [32, 33); give",
    ),
    (
        lambda: plan.build_compressed_slot_mapping([36], [4], [[0]], block_size=32, ratio=4),
        "block_tables: sequence 0 has 1 blocks of 8 compressed tokens (8), needs 2 blocks for compressed tokens [8, 9)",
    ),
    (
        lambda: builder().append_paged_range([1], 3, 17),
        "block_table: sequence 0 has 1 blocks of 16 tokens (16), needs 2",
    ),
    (
        lambda: plan.build_compressed_load_plan([64, 40], [[0, 1], [2, -1]], block_size=32, ratio=1),
        "block_tables: entry 1 of sequence 1 is -1, needs a block id 0..2147483647",
    ),
    (
        lambda: plan.build_compressed_load_plan([1], np.array([[2**31]]), block_size=32, ratio=1),
        "block_tables: entry 0 of sequence 0 is 2147483648, needs a block id 0..2147483647",
    ),
    (
        lambda: plan.build_paged_slot_mapping([64, 40], [1, 1], [[-1, 1], [2, -7]], block_size=32),
        "block_tables: entry 1 of sequence 1 is -7, needs a block id",
    ),
    (lambda: builder().append_paged_range([0, -1, 5], 14, 40), "block_table: entry 1 of sequence 0 is -1, needs"),
    (
        lambda: plan.build_compressed_load_plan([1, 1], [[0]], block_size=4, ratio=1),
        "block_tables has shape (1, 1), needs one row of block ids per sequence: [2, width]",
    ),
    (
        lambda: plan.build_compressed_load_plan([1], [0], block_size=4, ratio=1),
        "block_tables has shape (1,), needs one row of block ids per sequence: [1, width]",
    ),
    (
        lambda: plan.build_compressed_load_plan([1, 1], [[0], [0, 1]], block_size=4, ratio=1),
        "block_tables has rows of different lengths, needs equal ones; pad them with -1",
    ),
    # sizes
    (
        lambda: plan.build_compressed_load_plan([1], [[0]], block_size=30, ratio=4),
        "block_size is 30, needs a multiple of ratio 4",
    ),
    (
        lambda: plan.build_compressed_slot_mapping([1], [1], [[0]], block_size=2, ratio=4),
        "block_size is 2, needs a mul",
    ),
    (lambda: plan.build_compressed_load_plan([1], [[0]], block_size=4, ratio=0), "ratio is 0, needs 1..2147483647"),
    (lambda: plan.build_paged_slot_mapping([1], [1], [[0]], block_size=0), "block_size is 0, needs 1..2147483647"),
    (lambda: plan.BlockLoadPlanBuilder(-1), "source_block_size is -1, needs 1..2147483647"),
    (lambda: plan.build_swa_slot_mapping([1], [1], [0], swa_block_size=0), "swa_block_size is 0, needs 1"),
    (lambda: plan.build_prefill_swa_pivots([1], [1], window_size=0), "window_size is 0, needs 1"),
    (lambda: plan.mirror_cp_index([4], 0), "cp_size is 0, needs 1"),
    (
        lambda: plan.build_swa_load_plan([1], [1], [0], window_size=9, swa_block_size=8),
        "window_size is 9, needs at most swa_block_size 8",
    ),
    (
        lambda: plan.build_decode_swa_index([1], [0], window_size=9, swa_block_size=8),
        "window_size is 9, needs at most swa_block_size 8",
    ),
    (
        lambda: plan.build_decode_swa_index([9], [0], window_size=7, swa_block_size=8, seqlens_q=[3]),
        "swa_block_size is 8, needs 9 (window_size 7 + 2 more tokens of one step)",
    ),
    # lengths and ids
    (
        lambda: plan.build_compressed_load_plan([3, -1], [[0]] * 2, block_size=4, ratio=1),
        "seqlens_k[1] is -1, needs 0..",
    ),
    (lambda: plan.build_compressed_load_plan([2**62], [[0]], block_size=4, ratio=1), f"seqlens_k[0] is {2**62}, needs"),
    (lambda: plan.build_compressed_load_plan([[3]], [[0]], block_size=4, ratio=1), "seqlens_k has shape (1, 1), needs"),
    (lambda: plan.build_prefill_swa_pivots([3, 4], [3, 5], window_size=4), "seqlens_q[1] is 5, needs 0..4"),
    (lambda: plan.build_prefill_swa_pivots([3, 4], [3], window_size=4), "seqlens_q has 1 entries, needs 2"),
    (
        lambda: plan.build_prefill_swa_pivots([INT32_MAX] * 2, [2**30] * 2, window_size=4),
        "seqlens_q has 2147483648 tokens in total, needs at most 2147483647",
    ),
    (lambda: plan.build_swa_slot_mapping([3], [1], [0, 1], swa_block_size=4), "state_ids has 2 entries, needs 1"),
    (
        lambda: plan.build_swa_slot_mapping([3], [1], [-1], swa_block_size=4),
        "state_ids[0] is -1, needs a ring block id",
    ),
    (lambda: plan.build_swa_slot_mapping([3], [1], [-2], swa_block_size=4), "state_ids[0] is -2, needs -1..2147483647"),
    (
        lambda: plan.build_swa_load_plan([3, 9], [3, 1], [-1, -1], window_size=4, swa_block_size=4),
        "state_ids[1] is -1, needs a ring block id >= 0",
    ),
    (lambda: plan.build_decode_swa_index([3], [-1], window_size=4, swa_block_size=4), "state_ids[0] is -1, needs"),
    (
        lambda: plan.build_decode_swa_index([1, 8], [0, INT32_MAX], window_size=4, swa_block_size=4),
        "state_ids[1] is 2147483647 with swa_block_size 4: slot 8589934588, needs at most 2147483647",
    ),
    (
        lambda: plan.build_prefill_swa_pivots([1], [1], window_size=4, swa_valid_starts=[0, 0]),
        "swa_valid_starts has 2 entries, needs 1",
    ),
    # int32 offsets
    (
        lambda: plan.build_swa_load_plan([0] * 4, [0] * 4, [-1] * 4, window_size=2**29, swa_block_size=2**29),
        "the plan has 2147483648 rows, needs at most 2147483647",
    ),
    (
        lambda: plan.build_compressed_load_plan([2**30] * 2, [[0]] * 2, block_size=2**30, ratio=1),
        "the plan has 2147483648 rows, needs at most 2147483647",
    ),
    (
        lambda: plan.build_prefill_swa_pivots([1] * 4, [0, 0, 0, 1], window_size=2**29),
        "window_size is 536870912 for 4 seq",
    ),
    (
        lambda: plan.mirror_cp_index([INT32_MAX], 2),
        "seqlens_q has 2147483648 padded tokens in total for cp_size 2, needs",
    ),
    # the builder
    (lambda: builder().append_segment(-2, 0, 1), "src_block is -2, needs -1.."),
    (lambda: builder().append_segment(0, 0, 17), "src_end is 17, needs 0..16"),
    (lambda: builder().append_segment(0, 5, 4), "src_end is 4, needs 5..16"),
    (lambda: builder().append_segment(0, -1, 4), "src_begin is -1, needs 0..16"),
    (lambda: builder().append_zero_fill(-1), "num_tokens is -1, needs 0.."),
    (lambda: builder().append_paged_range([0], 2, 1), "end is 1, needs 2.."),
    (lambda: builder().append_ring_range(-1, 0, 1), "block_id is -1, needs 0.."),
    (lambda: builder().append_ring_range(0, 3, 20), "end is 20, needs at most begin + 16: [3, 20) has 17 tokens"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[text[:60] for _, text in REFUSED])
def test_refusals_name_the_argument_what_it_has_and_needs(call: Any, text: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    assert text in str(error.value)


WRONG_TYPES = [
    (
        lambda: plan.build_compressed_load_plan([1.5], [[0]], block_size=4, ratio=1),
        "seqlens_k has dtype float64, needs int",
    ),
    (
        lambda: plan.build_compressed_load_plan(torch.ones(1), [[0]], block_size=4, ratio=1),
        "seqlens_k has dtype torch.float",
    ),
    (lambda: plan.build_compressed_load_plan([True], [[0]], block_size=4, ratio=1), "seqlens_k has dtype bool, needs"),
    (
        lambda: plan.build_compressed_load_plan([2**70], [[0]], block_size=4, ratio=1),
        "seqlens_k has dtype object, needs",
    ),
    (
        lambda: plan.build_compressed_load_plan(np.empty(0), [], block_size=4, ratio=1),
        "seqlens_k has dtype float64, needs",
    ),
    (lambda: plan.build_compressed_load_plan([1], [["a"]], block_size=4, ratio=1), "block_tables has dtype <U1, needs"),
    (
        lambda: plan.build_compressed_load_plan([1], [[0]], block_size=4.0, ratio=1),
        "block_size is 4.0, needs an integer",
    ),
    (lambda: builder().append_zero_fill("3"), "num_tokens is '3', needs an integer"),
]


@pytest.mark.parametrize(("call", "text"), WRONG_TYPES, ids=[text for _, text in WRONG_TYPES])
def test_wrong_types_are_named(call: Any, text: str) -> None:
    with pytest.raises(TypeError) as error:
        call()
    assert text in str(error.value)


def test_device_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="seqlens_k is on meta, needs cpu"):
        plan.build_compressed_load_plan(torch.ones(1, dtype=torch.int32, device="meta"), [[0]], block_size=4, ratio=1)


@contextmanager
def little_memory() -> Iterator[None]:
    """This process can have 1 GiB more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 2**30, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def fill_behind_ten_rows() -> None:
    made = plan.BlockLoadPlanBuilder(1)
    made.append_zero_fill(10)
    made.append_zero_fill(INT32_MAX)


HUGE = [INT32_MAX]
TOO_LONG = {
    "paged": (
        lambda: plan.build_paged_slot_mapping(HUGE, HUGE, [[0]], block_size=64),
        "block_tables: sequence 0 has 1 blocks of 64 tokens (64), needs 33554432 blocks",
    ),
    "compressed": (
        lambda: plan.build_compressed_slot_mapping(HUGE, HUGE, [[0]], block_size=64, ratio=4),
        "block_tables: sequence 0 has 1 blocks of 16 compressed tokens (16), needs 33554432 blocks",
    ),
    "load plan": (
        lambda: plan.build_compressed_load_plan(HUGE * 2, np.broadcast_to(0, (2, INT32_MAX)), block_size=1, ratio=1),
        "the plan has 4294967294 rows, needs at most 2147483647",
    ),
    "ring": (
        lambda: plan.build_swa_slot_mapping(HUGE, HUGE, [-1], swa_block_size=4),
        "state_ids[0] is -1, needs a ring block id",
    ),
    "ring ids": (lambda: plan.build_swa_slot_mapping(HUGE, HUGE, [0, 0], swa_block_size=4), "state_ids has 2 entries, needs 1"),
    "pivots": (
        lambda: plan.build_prefill_swa_pivots(HUGE, HUGE, window_size=4),
        "window_size is 4 for 1 sequences and 2147483647",
    ),
    "pivots, valid": (
        lambda: plan.build_prefill_swa_pivots([2**30], [2**30], window_size=4, swa_valid_starts=[]),
        "swa_valid_starts has 0 entries, needs 1",
    ),
    "decode": (
        lambda: plan.build_decode_swa_index(HUGE, [0], window_size=4, swa_block_size=8, seqlens_q=HUGE),
        "swa_block_size is 8, needs 2147483650",
    ),
    "decode, valid": (
        lambda: plan.build_decode_swa_index(
            HUGE, [0], window_size=1, swa_block_size=INT32_MAX, seqlens_q=HUGE, swa_valid_starts=[0, 0]
        ),
        "swa_valid_starts has 2 entries, needs 1",
    ),
    "zeros": (fill_behind_ten_rows, "the plan has 2147483657 rows, needs at most 2147483647"),
}


@pytest.mark.parametrize("what", TOO_LONG)
def test_lengths_are_refused_before_they_take_memory(what: str) -> None:
    call, text = TOO_LONG[what]
    with little_memory(), pytest.raises(ValueError) as error:
        call()
    assert text in str(error.value)


@pytest.mark.parametrize("device", ["bogus", "xpu:7", 3.5])
def test_a_plan_goes_to_devices_that_are_there(device: Any) -> None:
    made = plan.build_compressed_load_plan([3], [[0]], block_size=4, ratio=1)
    with pytest.raises(ValueError, match=f"device: has {device!r}, needs a torch device of this machine"):
        made.to(device)


def test_a_refused_append_changes_nothing() -> None:
    b = builder()
    b.append_segment(0, 0, 16)
    b.append_zero_fill(0)
    with pytest.raises(ValueError, match="needs at most 2147483647 for int32 offsets"):
        big = plan.BlockLoadPlanBuilder(INT32_MAX)
        big.append_zero_fill(INT32_MAX)
        big.append_segment(0, 0, 1)
    assert big.build().total_k == INT32_MAX
    with pytest.raises(ValueError, match="block_table"):
        b.append_paged_range([0], 0, 17)
    assert b.build().segments.tolist() == [[0, 0, 16, 0]]
