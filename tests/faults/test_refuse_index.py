"""The index conversions refuse bad arguments with a text that names them, and write nothing."""

from __future__ import annotations

import pytest
import torch

from kvhal import Op
from tests.faults.calls import Change, good, refuse

Entry = tuple[Change, type[Exception], tuple[str, ...]]


def swap(name: str, value: object) -> Change:
    return lambda c: {name: value}


CONVERT: dict[str, Entry] = {
    "topk-type": (swap("topk_idxs", [[[1]]]), TypeError, ("topk_idxs: has a list, needs a torch.Tensor",)),
    "topk-dtype": (
        lambda c: {"topk_idxs": c["topk_idxs"].long()},
        ValueError,
        ("topk_idxs: has dtype torch.int64, needs torch.int32",),
    ),
    "topk-rank": (
        lambda c: {"topk_idxs": c["topk_idxs"][0]},
        ValueError,
        ("topk_idxs: has shape (2, 3), needs 3 dimensions",),
    ),
    "topk-stride": (
        lambda c: {"topk_idxs": torch.zeros(2, 3, 2, dtype=torch.int32).transpose(1, 2)},
        ValueError,
        ("topk_idxs: has strides (6, 1, 2), needs contiguous rows", "it is written in place"),
    ),
    "topk-overlap": (
        lambda c: {"topk_idxs": c["topk_idxs"][:1].expand(2, 2, 3)},
        ValueError,
        ("topk_idxs: has strides (0, 3, 1), needs rows that do not overlap",),
    ),
    "topk-partial-overlap": (
        lambda c: {"topk_idxs": c["topk_idxs"].as_strided((2, 2, 3), (3, 3, 1))},
        ValueError,
        ("topk_idxs: has strides (3, 3, 1), needs rows that do not overlap",),
    ),
    "tables-dtype": (
        lambda c: {"block_tables": c["block_tables"].long()},
        ValueError,
        ("block_tables: has dtype torch.int64, needs torch.int32",),
    ),
    "tables-rows": (
        lambda c: {"block_tables": c["block_tables"][:1]},
        ValueError,
        ("block_tables: has 1 rows, needs 2, one a sequence of topk_idxs",),
    ),
    "tables-rank": (
        lambda c: {"block_tables": c["block_tables"][0]},
        ValueError,
        ("block_tables: has shape (3,), needs 2 dimensions",),
    ),
    "tables-stride": (
        lambda c: {"block_tables": c["block_tables"].repeat(1, 2)[:, ::2]},
        ValueError,
        ("block_tables: has strides (6, 2), needs contiguous rows",),
    ),
    "tables-device": (
        lambda c: {"block_tables": c["block_tables"].to("meta")},
        ValueError,
        ("block_tables: has device meta, needs cpu, where topk_idxs is",),
    ),
    "lens-shape": (
        lambda c: {"context_lens": c["context_lens"][:, :1]},
        ValueError,
        ("context_lens: has shape (2, 1), needs (2, 2), one length a query",),
    ),
    "lens-dtype": (
        lambda c: {"context_lens": c["context_lens"].float()},
        ValueError,
        ("context_lens: has dtype torch.float32, needs torch.int32",),
    ),
    "lens-device": (
        lambda c: {"context_lens": c["context_lens"].to("meta")},
        ValueError,
        ("context_lens: has device meta, needs cpu",),
    ),
    "block-size-zero": (swap("block_size", 0), ValueError, ("block_size: has 0, needs 1 <= block_size <= 2147483647",)),
    "block-size-huge": (swap("block_size", 2**31), ValueError, ("block_size: has 2147483648, needs",)),
    "block-size-float": (swap("block_size", 4.0), TypeError, ("block_size: has 4.0, needs an int",)),
}


@pytest.mark.parametrize("what", CONVERT)
def test_convert_kv_index(what: str) -> None:
    change, error, fragments = CONVERT[what]
    refuse(good(Op.CONVERT_INDEX), change, error, *fragments)


#: what is wrong with `out`, for every operation that fills an int32 table
OUTPUTS: dict[str, Entry] = {
    "shape": (lambda c: {"out": c["out"][:, 1:]}, ValueError, ("out: has shape (2, ", "needs (2, ")),
    "rows": (lambda c: {"out": c["out"][:1]}, ValueError, ("out: has shape (1, ", "needs (2, ")),
    "rank": (lambda c: {"out": c["out"][0]}, ValueError, ("out: has shape (", "needs 2 dimensions")),
    "dtype": (lambda c: {"out": c["out"].long()}, ValueError, ("out: has dtype torch.int64, needs torch.int32",)),
    "stride": (
        lambda c: {"out": c["out"].t().contiguous().t()},
        ValueError,
        ("out: has strides (1, 2), needs contiguous rows (last stride 1); pass rows of a row-major buffer",),
    ),
    "overlap": (
        lambda c: {"out": c["out"][:1].expand(2, -1)},
        ValueError,
        ("out: has strides (0, 1), needs rows that do not overlap",),
    ),
    "device": (lambda c: {"out": c["out"].to("meta")}, ValueError, ("out: has device meta, needs cpu",)),
    "type": (swap("out", 1), TypeError, ("out: has a int, needs a torch.Tensor",)),
}


@pytest.mark.parametrize("op", [Op.INDEX_CAT, Op.EXPAND_SWA_INDEX, Op.DECODE_SWA_INDEX])
@pytest.mark.parametrize("what", OUTPUTS)
def test_out(op: Op, what: str) -> None:
    change, error, fragments = OUTPUTS[what]
    refuse(good(op), change, error, *fragments)


def spoil(name: str, change: str) -> Change:
    changes = {
        "dtype": lambda t: t.long(),
        "rank": lambda t: t[0],
        "stride": lambda t: t.t().contiguous().t(),
        "device": lambda t: t.to("meta"),
    }
    return lambda c: {name: changes[change](c[name])}


INPUTS = [
    (Op.INDEX_CAT, "left"),
    (Op.INDEX_CAT, "right"),
    (Op.EXPAND_SWA_INDEX, "pivots"),
    (Op.DECODE_SWA_INDEX, "kv_swa_index_offset_len"),
    (Op.EXPAND_LOAD_PLAN, "spans"),
    (Op.EXPAND_LOAD_PLAN, "block_tables"),
]


@pytest.mark.parametrize(("op", "name"), INPUTS)
def test_inputs(op: Op, name: str) -> None:
    refuse(good(op), spoil(name, "dtype"), ValueError, f"{name}: has dtype torch.int64, needs torch.int32")
    refuse(good(op), spoil(name, "rank"), ValueError, f"{name}: has shape", "needs 2 dimensions")
    rows = 3 if name == "spans" else 2
    refuse(good(op), spoil(name, "stride"), ValueError, f"{name}: has strides (1, {rows})", "contiguous")
    text = "right: has device cpu, needs meta, where left is" if name == "left" else f"{name}: has device meta, needs cpu"
    text = "block_tables: has device cpu, needs meta, where spans is" if name == "spans" else text
    text = text if op in (Op.INDEX_CAT, Op.EXPAND_LOAD_PLAN) else "out: has device cpu, needs meta"
    refuse(good(op), spoil(name, "device"), ValueError, text)


VALUES: list[tuple[Op, Change, type[Exception], str]] = [
    (Op.INDEX_CAT, lambda c: {"right": c["right"][:1]}, ValueError, "right: has 1 rows, needs 2, as many as left"),
    (Op.INDEX_CAT, swap("total_k_swa_cached", -1), ValueError, "total_k_swa_cached: has -1, needs 0 <="),
    (Op.INDEX_CAT, swap("total_k_swa_cur", -1), ValueError, "total_k_swa_cur: has -1, needs 0 <="),
    (Op.INDEX_CAT, swap("total_k_swa_cur", 2**31 - 1), ValueError, "total_k_swa_cached + total_k_swa_cur: has 2147483655"),
    (Op.INDEX_CAT, swap("total_k_swa_cur", 1.0), TypeError, "total_k_swa_cur: has 1.0, needs an int"),
    (Op.EXPAND_SWA_INDEX, lambda c: {"pivots": c["pivots"][:, :3]}, ValueError, "pivots: has shape (2, 3), needs 4 columns"),
    (Op.EXPAND_SWA_INDEX, swap("width", -1), ValueError, "width: has -1, needs 0 <= width"),
    (Op.EXPAND_SWA_INDEX, swap("width", "6"), TypeError, "width: has '6', needs an int"),
    (Op.DECODE_SWA_INDEX, swap("window_size", -1), ValueError, "window_size: has -1, needs 0 <= window_size"),
    (Op.DECODE_SWA_INDEX, swap("swa_block_size", 0), ValueError, "swa_block_size: has 0, needs 1 <= swa_block_size"),
    (Op.EXPAND_LOAD_PLAN, lambda c: {"spans": c["spans"][:, :4]}, ValueError, "spans: has shape (3, 4), needs 5 columns"),
    (Op.EXPAND_LOAD_PLAN, swap("block_size", 0), ValueError, "block_size: has 0, needs 1 <= block_size"),
    (Op.EXPAND_LOAD_PLAN, swap("num_segments", -1), ValueError, "num_segments: has -1, needs 0 <= num_segments"),
    (Op.EXPAND_LOAD_PLAN, swap("num_segments", True), TypeError, "num_segments: has True, needs an int"),
    (Op.EXPAND_LOAD_PLAN, swap("num_segments", 4), ValueError, "out: has shape (5, 4), needs (4, 4)"),
    (
        Op.EXPAND_LOAD_PLAN,
        lambda c: {"out": torch.zeros((5, 5), dtype=torch.int32)[:, :4]},
        ValueError,
        "out: has strides (5, 1), needs a contiguous tensor; pass a slice of a contiguous buffer",
    ),
    (
        Op.DECODE_SWA_INDEX,
        lambda c: {"kv_swa_index_offset_len": torch.zeros(2, 3, dtype=torch.int32)},
        ValueError,
        "kv_swa_index_offset_len: has shape (2, 3), needs 2 columns",
    ),
]


@pytest.mark.parametrize(("op", "change", "error", "text"), VALUES)
def test_values(op: Op, change: Change, error: type[Exception], text: str) -> None:
    refuse(good(op), change, error, text)
