"""Strict mode: metadata values are checked before a launch (host synchronisation) and the first bad index is named."""

from __future__ import annotations

from typing import NoReturn

import torch

from kvhal.errors import InvalidMetadata


def _fail(name: str, index: tuple[int, ...], have: object, need: str) -> NoReturn:
    where = ", ".join(map(str, index))
    raise InvalidMetadata(f"{name}[{where}]: has {have}, needs {need} (strict mode; nothing was written)")


def _first(bad: torch.Tensor) -> tuple[int, ...] | None:
    """Index of the first True in row-major order, None when there is none."""
    found = torch.nonzero(bad)
    return tuple(found[0].tolist()) if found.shape[0] else None


def _check(name: str, values: torch.Tensor, bad: torch.Tensor, need: str) -> None:
    index = _first(bad)
    if index is not None:
        _fail(name, index, values[index].tolist(), need)


def check_load_slots(slots: torch.Tensor, capacity: int, name: str = "slots") -> None:
    """Slots are -1 or in [0, capacity)."""
    _check(name, slots, (slots < -1) | (slots >= capacity), f"-1 or 0 <= slot < {capacity}")


def check_store_slots(slots: torch.Tensor, capacity: int) -> None:
    """As `check_load_slots`, and no slot but -1 occurs twice."""
    check_load_slots(slots, capacity, "slot_mapping")
    order = torch.argsort(slots, stable=True)
    ordered = slots[order]
    repeated = torch.zeros_like(slots, dtype=torch.bool)
    repeated[order[1:]] = (ordered[1:] == ordered[:-1]) & (ordered[1:] != -1)
    _check("slot_mapping", slots, repeated, "each slot at most once")


def check_segments(segments: torch.Tensor, num_blocks: int, block_size: int, total_k: int) -> None:
    """Blocks are -1 or in the cache, ranges lie in their block, rows lie in the output."""
    block, begin, end, offset = segments.long().unbind(1)
    need = f"[src_block, src_begin, src_end, dst_offset] with -1 <= src_block < {num_blocks}, "
    need += f"0 <= src_begin <= src_end <= {block_size}, dst_offset >= 0 and dst_offset + src_end - src_begin <= {total_k}"
    bad = (block < -1) | (block >= num_blocks) | (begin < 0) | (begin > end) | (end > block_size)
    bad |= (offset < 0) | (offset + end - begin > total_k)
    _check("load_segments", segments, bad, need)


def check_topk(topk: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor, block_size: int) -> None:
    """Every entry below its context length names a token whose block id is valid."""
    columns = torch.arange(topk.shape[2], device=topk.device)
    used = columns < lens[..., None]
    bad = used & ((topk < 0) | (topk // block_size >= tables.shape[1]))
    _check("topk_idxs", topk, bad, f"0 <= index < {tables.shape[1] * block_size}, the tokens of its block table")
    if tables.shape[1] == 0:
        return
    blocks = torch.gather(tables.long(), 1, torch.where(used, topk // block_size, 0).flatten(1).long()).view(topk.shape)
    index = _first(used & ((blocks < 0) | ((blocks + 1) * block_size > 2**31)))
    if index is not None:
        column = int(topk[index]) // block_size
        _fail("block_tables", (index[0], column), int(tables[index[0], column]), "a block id >= 0 whose slots fit int32")


def check_index_cat(right: torch.Tensor, base: int) -> None:
    """Shifted entries fit int32; -1 is the only negative one."""
    bad = (right < -1) | (right.long() + base >= 2**31)
    _check("right", right, bad, f"-1 or 0 <= index < {2**31 - base}")


def check_pivots(pivots: torch.Tensor, width: int) -> None:
    """Lengths are not negative and fit the row; non-empty ranges start at 0 or later."""
    offset1, len1, offset2, len2 = pivots.long().unbind(1)
    bad = (len1 < 0) | (len2 < 0) | (len1 + len2 > width) | ((len1 > 0) & (offset1 < 0)) | ((len2 > 0) & (offset2 < 0))
    bad |= (offset1 + len1 > 2**31) | (offset2 + len2 > 2**31)
    _check("pivots", pivots, bad, f"(offset1, len1, offset2, len2), none negative, len1 + len2 <= {width}")


def check_windows(windows: torch.Tensor, window_size: int, swa_block_size: int) -> None:
    """Starts are -1 or slots whose ring block fits int32; lengths lie in [0, min(window_size, swa_block_size)]."""
    start, length = windows.long().unbind(1)
    limit = min(window_size, swa_block_size)
    bad = (start < -1) | (length < 0) | (length > limit) | ((start // swa_block_size + 1) * swa_block_size > 2**31)
    _check("kv_swa_index_offset_len", windows, bad, f"(start_slot >= -1, 0 <= valid_length <= {limit})")


def check_positions(positions: torch.Tensor, max_position: int) -> None:
    """Positions lie in the cos/sin cache."""
    _check("positions", positions, (positions < 0) | (positions >= max_position), f"0 <= position < {max_position}")


def check_spans(spans: torch.Tensor, tables: torch.Tensor, block_size: int, num_segments: int) -> None:
    """Spans follow each other, fill the plan, and lie in their tables, whose ids there are blocks."""
    if not spans.shape[0]:
        _fail("spans", (0,), "no span", f"spans of {num_segments} segments")
    first, row, table_row, begin, end = spans.long().unbind(1)
    rows, width = tables.shape
    past = torch.where(end > begin, -(-end // block_size), begin // block_size)
    behind = first + past - begin // block_size
    follow = torch.cat((first[1:], first.new_tensor([num_segments])))
    paged = table_row >= 0
    bad = (begin < 0) | (begin > end) | (row < 0) | (row + end - begin >= 2**31) | (behind != follow)
    bad |= (table_row >= rows) | (paged & (end > begin) & (past > width))
    bad[:1] |= first[:1] != 0
    need = "(first_segment, first_row, table_row, begin, end): first_segment from 0 on where the span before ends, the last"
    need += f" span ends at {num_segments}; 0 <= begin <= end, in the {width} blocks of a table_row < {rows} or -1 for zeros"
    _check("spans", spans, bad, need)
    if not tables.numel():
        return
    column = torch.arange(width, device=tables.device)
    used = paged & (end > begin)
    within = used[:, None] & (column >= (begin // block_size)[:, None]) & (column < past[:, None])
    index = _first(within & (tables[table_row.clamp(min=0)] < 0))
    if index is not None:
        place = (int(table_row[index[0]]), index[1])
        _fail("block_tables", place, int(tables[place]), "a block id >= 0: a span reaches it")
