"""Planning: worked examples, exact values."""

from __future__ import annotations

import pathlib
import runpy
from typing import Any

import numpy as np
import pytest
import torch

from kvhal import plan

INT32_MAX = 2**31 - 1


def rows(tensor: torch.Tensor) -> Any:
    assert tensor.dtype == torch.int32
    return tensor.tolist()


def test_known_answer_of_one_prefill_chunk() -> None:
    table = torch.randperm(200, dtype=torch.int32)[None, :]
    compressed = plan.build_compressed_load_plan([10000], table, block_size=64, ratio=4)
    assert len(compressed.segments) == 157
    assert rows(compressed.segments) == [[int(table[0, i]), 0, 16 if i < 156 else 4, 16 * i] for i in range(157)]
    assert compressed.total_k == 2500
    assert rows(compressed.cu_compressed_seqlens) == [0, 2500]

    swa = plan.build_swa_load_plan([10000], [1024], [7], window_size=4096, swa_block_size=4096, swa_valid_starts=[0])
    assert rows(swa.segments) == [[7, 784, 4096, 0], [7, 0, 784, 3312]]
    assert swa.total_k == 4096
    assert swa.total_k + 1024 == 5120
    assert swa.total_k + 1024 + compressed.total_k == 7620

    pivots = rows(plan.build_prefill_swa_pivots([10000], [1024], window_size=4096))
    assert pivots[0] == [1, 4095, 4096, 1]
    assert pivots[1023] == [1024, 3072, 4096, 1024]


def test_builder_places_each_range_after_the_previous_one() -> None:
    builder = plan.BlockLoadPlanBuilder(4)
    builder.append_zero_fill(9)
    builder.append_paged_range([5, 3, 8], 2, 9)
    builder.append_ring_range(6, 7, 10)
    builder.append_segment(2, 1, 3)
    built = builder.build()
    assert rows(built.segments) == [
        [-1, 0, 4, 0],
        [-1, 0, 4, 4],
        [-1, 0, 1, 8],
        [5, 2, 4, 9],
        [3, 0, 4, 11],
        [8, 0, 1, 15],
        [6, 3, 4, 16],
        [6, 0, 2, 17],
        [2, 1, 3, 19],
    ]
    assert built.total_k == 21
    builder.append_segment(-1, 0, 4)
    assert len(built.segments) == 9
    assert builder.build().total_k == 25


def test_builder_leaves_out_empty_ranges() -> None:
    builder = plan.BlockLoadPlanBuilder(4)
    builder.append_segment(3, 2, 2)
    builder.append_zero_fill(0)
    builder.append_paged_range([], 0, 0)
    builder.append_paged_range([-1], 1000, 1000)
    builder.append_paged_range([7], 3, 3)
    builder.append_ring_range(0, 9, 9)
    built = builder.build()
    assert built.segments.shape == (0, 4)
    assert built.segments.dtype == torch.int32
    assert built.total_k == 0


def test_sequence_without_compressed_tokens_gets_one_zero_row() -> None:
    built = plan.build_compressed_load_plan([3, 9, 0, 4, 1], np.full((5, 1), 7), block_size=12, ratio=4)
    assert rows(built.segments) == [[-1, 0, 1, 0], [7, 0, 2, 1], [-1, 0, 1, 3], [7, 0, 1, 4], [-1, 0, 1, 5]]
    assert built.total_k == 6
    assert rows(built.cu_compressed_seqlens) == [0, 1, 3, 4, 5, 6]


def test_a_batch_of_empty_sequences_needs_no_blocks() -> None:
    built = plan.build_compressed_load_plan([0, 1], np.empty((2, 0), np.int32), block_size=2, ratio=2)
    assert rows(built.segments) == [[-1, 0, 1, 0], [-1, 0, 1, 1]]
    assert plan.build_paged_slot_mapping([5, 0], [0, 0], [[], []], block_size=2).shape == (0,)


def test_swa_history_is_zero_filled_in_front() -> None:
    def segments(k: int, q: int, valid: int) -> Any:
        built = plan.build_swa_load_plan([k], [q], [2], window_size=4, swa_block_size=6, swa_valid_starts=[valid])
        assert built.total_k == 4
        return rows(built.segments)

    assert segments(3, 3, 0) == [[-1, 0, 4, 0]]
    assert segments(5, 3, 0) == [[-1, 0, 2, 0], [2, 0, 2, 2]]
    assert segments(8, 1, 0) == [[2, 3, 6, 0], [2, 0, 1, 3]]
    assert segments(9, 1, 5) == [[-1, 0, 1, 0], [2, 5, 6, 1], [2, 0, 2, 2]]
    assert segments(9, 1, 100) == [[-1, 0, 4, 0]]
    assert segments(9, 1, -100) == segments(9, 1, 0) == [[2, 4, 6, 0], [2, 0, 2, 2]]


def test_a_sequence_that_reads_no_history_needs_no_ring_block() -> None:
    built = plan.build_swa_load_plan([3, 6], [3, 1], [-1, 4], window_size=2, swa_block_size=8)
    assert rows(built.segments) == [[-1, 0, 2, 0], [4, 3, 5, 2]]


def test_paged_slots() -> None:
    slots = plan.build_paged_slot_mapping([5, 2, 7], [3, 0, 1], [[4, 1], [-1, -1], [0, 9]], block_size=4)
    assert rows(slots) == [4 * 4 + 2, 4 * 4 + 3, 1 * 4, 9 * 4 + 2]


def test_compressed_slots_stand_at_the_completing_token() -> None:
    slots = plan.build_compressed_slot_mapping([9, 2], [6, 2], [[4, 1], [-1, -1]], block_size=8, ratio=4)
    assert rows(slots) == [4 * 2 + 0, -1, -1, -1, 4 * 2 + 1, -1, -1, -1]


def test_ring_slots_keep_only_the_last_lap_of_a_chunk() -> None:
    slots = plan.build_swa_slot_mapping([12, 3], [7, 1], [2, 0], swa_block_size=5)
    assert rows(slots) == [-1, -1, 12, 13, 14, 10, 11, 2]


def test_slots_widen_only_when_int32_cannot_hold_them() -> None:
    block = INT32_MAX // 64
    assert plan.build_paged_slot_mapping([64], [64], [[block]], block_size=64).tolist()[-1] == INT32_MAX
    assert plan.build_paged_slot_mapping([64], [64], [[block]], block_size=64).dtype == torch.int32
    wide = plan.build_paged_slot_mapping([64, 1], [1, 1], [[block + 1], [0]], block_size=64)
    assert wide.dtype == torch.int64
    assert wide.tolist() == [INT32_MAX + 64, 0]
    assert plan.build_swa_slot_mapping([1], [1], [INT32_MAX], swa_block_size=4096).tolist() == [INT32_MAX * 4096]


def test_prefill_pivots_index_the_concatenated_buffer() -> None:
    pivots = plan.build_prefill_swa_pivots([3, 6], [3, 2], window_size=3, swa_valid_starts=[0, 3])
    assert rows(pivots) == [
        [3, 0, 6, 1],
        [3, 0, 6, 2],
        [3, 0, 6, 3],
        [5, 1, 9, 1],
        [5, 1, 9, 2],
    ]
    alone = rows(plan.build_prefill_swa_pivots([8], [5], window_size=2))
    assert alone == [[1, 1, 2, 1], [2, 0, 2, 2], [2, 0, 3, 2], [2, 0, 4, 2], [2, 0, 5, 2]]


def test_a_query_below_the_valid_start_sees_nothing() -> None:
    assert [row[1::2] for row in rows(plan.build_prefill_swa_pivots([4], [2], window_size=4, swa_valid_starts=[3]))] == [
        [0, 0],
        [0, 1],
    ]
    decode = plan.build_decode_swa_index([3], [1], window_size=4, swa_block_size=8, swa_valid_starts=[5])
    assert rows(decode)[0][1] == 0


def test_decode_index() -> None:
    index = plan.build_decode_swa_index([10001, 3, 4096], [7, 0, 2], window_size=4096, swa_block_size=4096)
    assert rows(index) == [[7 * 4096 + 10001 % 4096, 4096], [0, 3], [2 * 4096, 4096]]
    several = plan.build_decode_swa_index(
        [9, 5], [1, 0], window_size=3, swa_block_size=5, seqlens_q=[2, 0], swa_valid_starts=[6, 0]
    )
    assert rows(several) == [[5 + 6 % 5, 2], [5 + 6 % 5, 3]]


def test_mirror_index_pairs_an_early_and_a_late_chunk() -> None:
    index = plan.mirror_cp_index([10, 3], 2)
    assert rows(index) == [
        [0, 1, 2, 9, -1, -1, 10, -1],
        [3, 4, 5, 6, 7, 8, 11, 12],
    ]
    reverse = plan.mirror_cp_reverse_index([10, 3], 2)
    assert rows(reverse) == [0, 1, 2, 8, 9, 10, 11, 12, 13, 3, 6, 14, 15]
    assert rows(plan.mirror_cp_index([4, 0], 1)) == [[0, 1, 2, 3]]


def test_zero_sequences() -> None:
    compressed = plan.build_compressed_load_plan([], [], block_size=64, ratio=4)
    assert compressed.segments.shape == (0, 4)
    assert compressed.total_k == 0
    assert rows(compressed.cu_compressed_seqlens) == [0]
    swa = plan.build_swa_load_plan([], [], [], window_size=4, swa_block_size=4)
    assert (swa.segments.shape, swa.total_k) == ((0, 4), 0)
    for slots in (
        plan.build_paged_slot_mapping([], [], [], block_size=4),
        plan.build_compressed_slot_mapping([], [], torch.empty(0, 5, dtype=torch.int32), block_size=4, ratio=2),
        plan.build_swa_slot_mapping([], [], [], swa_block_size=4),
        plan.mirror_cp_reverse_index([], 4),
    ):
        assert (slots.shape, slots.dtype) == ((0,), torch.int32)
    assert plan.build_prefill_swa_pivots([], [], window_size=4).shape == (0, 4)
    assert plan.build_decode_swa_index([], [], window_size=4, swa_block_size=4).shape == (0, 2)
    assert plan.mirror_cp_index([], 4).shape == (4, 0)


@pytest.mark.parametrize("convert", [list, np.array, lambda x: np.array(x, np.int32)[::1], torch.tensor])
def test_every_input_kind_gives_the_same_plan(convert: Any) -> None:
    k, q, table, states = [70, 9], [5, 9], [[3, 1, 2], [0, -1, -1]], [1, 0]
    expected = plan.build_compressed_load_plan(k, table, block_size=32, ratio=2)
    built = plan.build_compressed_load_plan(convert(k), convert(table), block_size=32, ratio=2)
    assert torch.equal(built.segments, expected.segments)
    slots = plan.build_paged_slot_mapping(convert(k), convert(q), convert(table), block_size=32)
    assert torch.equal(slots, plan.build_paged_slot_mapping(k, q, table, block_size=32))
    ring = plan.build_swa_slot_mapping(convert(k), convert(q), convert(states), swa_block_size=8)
    assert torch.equal(ring, plan.build_swa_slot_mapping(k, q, states, swa_block_size=8))


def test_strided_tables_and_inputs_are_read_in_place_and_kept() -> None:
    wide = torch.arange(60, dtype=torch.int32).view(4, 15)
    before = wide.clone()
    table = wide[::2, 3:9]
    lengths = torch.tensor([[20, -1], [9, -1]])[:, 0]
    built = plan.build_compressed_load_plan(lengths, table, block_size=4, ratio=1)
    assert built.segments[:, 0].tolist() == [3, 4, 5, 6, 7, 33, 34, 35]
    slots = plan.build_paged_slot_mapping(lengths, [1, 1], table, block_size=4)
    assert rows(slots) == [7 * 4 + 3, 35 * 4]
    assert torch.equal(wide, before)
    transposed = np.asfortranarray(table.numpy())
    assert torch.equal(plan.build_compressed_load_plan(lengths, transposed, block_size=4, ratio=1).segments, built.segments)


def test_plans_move_between_devices_whole() -> None:
    built = plan.build_compressed_load_plan([9], [[1, 2]], block_size=8, ratio=1)
    moved = built.to("meta")
    assert isinstance(moved, plan.CompressedLoadPlan)
    assert moved.segments.device.type == moved.cu_compressed_seqlens.device.type == "meta"
    assert moved.total_k == 9
    assert built.segments.device.type == "cpu"
    assert plan.BlockLoadPlanBuilder(4).build().to(torch.device("meta")).segments.shape == (0, 4)


def test_the_timing_script_runs() -> None:
    script = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "benchmarks" / "bench_plan.py"))
    items = [timing.items for timing in script["measure"](3, 130, 64, 8, repeats=1)]
    assert items == [9, 6, 6, 48, 48, 48, 3, 96]
