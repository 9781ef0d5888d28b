"""Hostile metadata: strict mode names the first bad entry and writes nothing; otherwise only the good entries have effect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import kvhal
from kvhal import InvalidMetadata, Op
from kvhal.testing.case import Call
from tests.faults.calls import CAPACITY, good, refuse

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@pytest.fixture
def strict() -> None:
    kvhal.configure(strict=True)


def with_values(name: str, values: Any, dtype: torch.dtype = torch.int32) -> Any:
    return lambda c: {name: torch.tensor(values, dtype=dtype)}


def put(name: str, index: tuple[int, ...], value: int) -> Any:
    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        changed = arguments[name].clone()
        changed[index] = value
        return {name: changed}

    return change


SLOTS = "needs -1 or 0 <= slot < 12 (strict mode; nothing was written)"
SEGMENT = "with -1 <= src_block < 3, 0 <= src_begin <= src_end <= 4, dst_offset >= 0 and dst_offset + src_end - src_begin <= 9"
STRICT: dict[str, tuple[Op, Any, str, str]] = {
    "slot-5": (Op.STORE, put("slot_mapping", (1,), -5), "slot_mapping[1]: has -5", SLOTS),
    "slot-capacity": (Op.STORE, put("slot_mapping", (4,), CAPACITY), "slot_mapping[4]: has 12", SLOTS),
    "slot-int64": (Op.STORE, put("slot_mapping", (0,), 2**32), "slot_mapping[0]: has 4294967296", SLOTS),
    "slot-min": (Op.STORE, put("slot_mapping", (0,), -(2**63)), "slot_mapping[0]: has -9223372036854775808", SLOTS),
    "slot-twice": (Op.STORE, put("slot_mapping", (3,), 3), "slot_mapping[3]: has 3", "needs each slot at most once"),
    "read-slot": (Op.LOAD_SLOTS, put("slots", (1, 0), 12), "slots[1, 0]: has 12", SLOTS),
    "read-slot-negative": (Op.LOAD_SLOTS, put("slots", (0, 2), -2), "slots[0, 2]: has -2", SLOTS),
    "block": (Op.LOAD, put("load_segments", (2, 0), 3), "load_segments[2]: has [3, 0, 4, 5]", SEGMENT),
    "block-negative": (Op.LOAD, put("load_segments", (0, 0), -2), "load_segments[0]: has [-2, 1, 4, 0]", SEGMENT),
    "begin": (Op.LOAD, put("load_segments", (0, 1), -1), "load_segments[0]: has [0, -1, 4, 0]", SEGMENT),
    "reversed": (Op.LOAD, put("load_segments", (1, 1), 3), "load_segments[1]: has [-1, 3, 2, 3]", SEGMENT),
    "past-block": (Op.LOAD, put("load_segments", (0, 2), 5), "load_segments[0]: has [0, 1, 5, 0]", SEGMENT),
    "past-output": (Op.LOAD, put("load_segments", (2, 3), 6), "load_segments[2]: has [2, 0, 4, 6]", SEGMENT),
    "before-output": (Op.LOAD, put("load_segments", (2, 3), -1), "load_segments[2]: has [2, 0, 4, -1]", SEGMENT),
    "far-output": (Op.LOAD, put("load_segments", (2, 3), INT_MAX), "load_segments[2]: has [2, 0, 4, 2147483647]", SEGMENT),
    "topk": (Op.CONVERT_INDEX, put("topk_idxs", (0, 1, 1), 12), "topk_idxs[0, 1, 1]: has 12", "needs 0 <= index < 12"),
    "topk-negative": (Op.CONVERT_INDEX, put("topk_idxs", (1, 1, 2), -1), "topk_idxs[1, 1, 2]: has -1", "0 <= index < 12"),
    "table": (Op.CONVERT_INDEX, put("block_tables", (1, 2), -7), "block_tables[1, 2]: has -7", "a block id >= 0"),
    "table-large": (Op.CONVERT_INDEX, put("block_tables", (0, 1), 2**29), "block_tables[0, 1]: has 536870912", "fit int32"),
    "no-table": (
        Op.CONVERT_INDEX,
        lambda c: {"block_tables": c["block_tables"][:, :0]},
        "topk_idxs[0, 0, 0]: has 0",
        "needs 0 <= index < 0",
    ),
    "right": (Op.INDEX_CAT, put("right", (1, 3), -2), "right[1, 3]: has -2", "needs -1 or 0 <= index < 2147483638"),
    "right-large": (Op.INDEX_CAT, put("right", (0, 0), INT_MAX - 9), "right[0, 0]: has 2147483638", "needs -1 or 0 <= index <"),
    "span-first": (Op.EXPAND_LOAD_PLAN, put("spans", (0, 0), 1), "spans[0]: has [1, 0, 1, 2, 9]", "the last span ends at 5"),
    "span-none": (Op.EXPAND_LOAD_PLAN, lambda c: {"spans": c["spans"][:0]}, "spans[0]: has no span", "5 segments"),
    "span-gap": (Op.EXPAND_LOAD_PLAN, put("spans", (2, 0), 5), "spans[1]: has [3, 7, -1, 0, 1]", "where the span before ends"),
    "span-short": (Op.EXPAND_LOAD_PLAN, put("spans", (2, 4), 9), "spans[2]: has [4, 8, 0, 4, 9]", "the last span ends at 5"),
    "span-begin": (Op.EXPAND_LOAD_PLAN, put("spans", (1, 3), -1), "spans[1]: has [3, 7, -1, -1, 1]", "0 <= begin <= end"),
    "span-row": (Op.EXPAND_LOAD_PLAN, put("spans", (1, 1), -4), "spans[1]: has [3, -4, -1, 0, 1]", "spans"),
    "span-far": (Op.EXPAND_LOAD_PLAN, put("spans", (2, 1), INT_MAX), "spans[2]: has [4, 2147483647, 0, 4, 6]", "spans"),
    "span-table": (Op.EXPAND_LOAD_PLAN, put("spans", (2, 2), 2), "spans[2]: has [4, 8, 2, 4, 6]", "a table_row < 2 or -1"),
    "span-id": (Op.EXPAND_LOAD_PLAN, put("block_tables", (1, 2), -7), "block_tables[1, 2]: has -7", "a block id >= 0"),
    "span-width": (
        Op.EXPAND_LOAD_PLAN,
        lambda c: {"block_tables": c["block_tables"][:, :2]},
        "spans[0]: has [0, 0, 1, 2, 9]",
        "in the 2 blocks of a table_row",
    ),
    "pivot": (Op.EXPAND_SWA_INDEX, put("pivots", (1, 1), -1), "pivots[1]: has [0, -1, 7, 5]", "none negative"),
    "pivot-wide": (Op.EXPAND_SWA_INDEX, put("pivots", (0, 1), 4), "pivots[0]: has [4, 4, 9, 3]", "len1 + len2 <= 6"),
    "pivot-start": (Op.EXPAND_SWA_INDEX, put("pivots", (0, 2), -9), "pivots[0]: has [4, 2, -9, 3]", "none negative"),
    "window": (
        Op.DECODE_SWA_INDEX,
        put("kv_swa_index_offset_len", (0, 1), 7),
        "kv_swa_index_offset_len[0]: has [13, 7]",
        "0 <= valid_length <= 6",
    ),
    "window-start": (
        Op.DECODE_SWA_INDEX,
        put("kv_swa_index_offset_len", (1, 0), -2),
        "kv_swa_index_offset_len[1]: has [-2, 0]",
        "start_slot >= -1",
    ),
}


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("what", STRICT)
def test_strict_mode_names_the_first_bad_entry(what: str) -> None:
    op, change, *fragments = STRICT[what]
    refuse(good(op), change, InvalidMetadata, *fragments)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(
    ("field", "argument", "index", "value", "text"),
    [
        ("slot_mapping", "out_args", 1, 12, "slot_mapping[1]: has 12"),
        ("slot_mapping", "out_args", 4, 3, "slot_mapping[4]: has 3, needs each slot at most once"),
        ("positions", "rope_args", 2, 6, "positions[2]: has 6, needs 0 <= position < 6"),
        ("positions", "rope_args", 2, -1, "positions[2]: has -1, needs 0 <= position < 6"),
    ],
)
def test_strict_mode_in_the_fused_store(field: str, argument: str, index: int, value: int, text: str) -> None:
    from dataclasses import replace

    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        values = getattr(arguments[argument], field).clone()
        values[index] = value
        return {argument: replace(arguments[argument], **{field: values})}

    refuse(good(Op.FUSED_STORE), change, InvalidMetadata, text)


@pytest.mark.usefixtures("strict")
def test_strict_mode_lets_tables_without_columns_pass_when_nothing_asks_them() -> None:
    call = good(Op.CONVERT_INDEX)
    arguments = {**call.arguments, "block_tables": call.arguments["block_tables"][:, :0]}
    arguments["context_lens"] = torch.zeros(2, 2, dtype=torch.int32)
    assert kvhal.convert_kv_index(**arguments).unique().tolist() == [-1]


def test_strict_mode_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHAL_STRICT", "1")
    refuse(good(Op.STORE), put("slot_mapping", (1,), -5), InvalidMetadata, "slot_mapping[1]: has -5")
    monkeypatch.setenv("KVHAL_STRICT", "0")
    call = good(Op.STORE)
    Call(call.op, {**call.arguments, **put("slot_mapping", (1,), -5)(call.arguments)}, call.buffers)()


def changed_slots(call: Call, before: np.ndarray) -> set[int]:
    """Slots whose records changed; fails when a byte changed that belongs to no record."""
    buffer, stride = call.buffers["kv_cache"], call.arguments["kv_cache"].stride(0)
    places = np.flatnonzero(buffer.bytes() != before) - buffer.begin
    blocks, bytes_in = np.divmod(places, stride)
    assert ((places >= 0) & (blocks < 3) & (bytes_in < 4 * 528)).all()
    return set((blocks * 4 + bytes_in // 528).tolist())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_store_skips_slots_that_are_not_in_the_cache(dtype: torch.dtype) -> None:
    wide = [2**32 + 1, -(2**63)] if dtype == torch.int64 else [INT_MAX, INT_MIN]
    call = good(Op.STORE)
    before = call.buffers["kv_cache"].bytes()
    slots = torch.tensor([CAPACITY, -1, *wide, 6], dtype=dtype)
    kvhal.store_kv_cache(**{**call.arguments, "slot_mapping": slots})
    assert changed_slots(call, before) == {6}


def test_of_duplicate_slots_one_writer_wins_whole() -> None:
    alone = []
    for token in range(5):
        call = good(Op.STORE)
        kvhal.store_kv_cache(**{**call.arguments, "slot_mapping": torch.tensor([9 if i == token else -1 for i in range(5)])})
        alone.append(call.arguments["kv_cache"][2, 1].tolist())
    call = good(Op.STORE)
    before = call.buffers["kv_cache"].bytes()
    kvhal.store_kv_cache(**{**call.arguments, "slot_mapping": torch.full((5,), 9)})
    assert changed_slots(call, before) == {9}
    assert call.arguments["kv_cache"][2, 1].tolist() in alone


def test_a_load_drops_rows_outside_the_block_or_the_output_and_reads_zeros_for_other_blocks() -> None:
    plan = [[0, 2, 9, 0], [7, 0, 2, 2], [-1, 0, 1, 4], [1, 0, 4, 7], [2, 3, 1, 5], [1, -1, 1, 4]]
    call = good(Op.LOAD)
    before = call.arguments["out"].clone()
    kvhal.load_paged_kv_cache(**{**call.arguments, "load_segments": torch.tensor(plan, dtype=torch.int32)})
    every = torch.arange(CAPACITY)
    rows = kvhal.load_kv_slots(call.arguments["kv_cache"], every, layout=call.arguments["layout"]).view(torch.int16)
    out, before = call.arguments["out"].view(torch.int16), before.view(torch.int16)
    assert torch.equal(out[:2], rows[2:4])  # the block ends after token 3
    assert not out[2:5].any()
    assert torch.equal(out[5], rows[4])  # token -1 of the segment is dropped, token 0 follows at its place
    assert torch.equal(out[6], before[6])
    assert torch.equal(out[7:9], rows[4:6])  # total_k is 9
