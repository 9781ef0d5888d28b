"""Load plans where their block tables live: a few numbers a sequence become segments in one launch."""

from __future__ import annotations

from typing import cast

import torch
from torch.compiler import is_dynamo_compiling

from kvhal.binding import bound
from kvhal.config import Scope, current
from kvhal.interface import Op
from kvhal.ops import strict
from kvhal.ops.checks import check_apart, check_contiguous, check_int, check_rows, check_same_device, check_tensor, int32_output
from kvhal.ops.repeated import EXPAND_LOAD_PLAN, UNALIGNED, Call, allocator, call_key, find, is_traced, keep_near, remember

INT32 = (torch.int32,)


def expand_load_plan(
    spans: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    num_segments: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cuts ranges of tokens at the boundaries of their blocks, for `load_paged_kv_cache`; no plan is made on the host.

    Segment j belongs to the last span whose first_segment is at most j, and is the (j - first_segment)-th block of its
    range. `kvhal.plan` makes spans out of lengths.

    Args:
        spans: int32 ``[n, 5]``, rows (first_segment, first_row, table_row, begin, end) in ascending order of first_segment:
            tokens [begin, end) of the sequence in that row of `block_tables` go to output rows first_row, first_row + 1, ...
            A row that `block_tables` has not, such as -1, makes them zeros. Spans that are not in order give segments of
            any of them.
        block_tables: int32 ``[rows, width]``, block ids; any row stride. Ids are passed on as they are.
        block_size: tokens a block.
        num_segments: rows of the result.
        out: int32 ``[num_segments, 4]``, contiguous, None allocates.

    Returns:
        int32 ``[num_segments, 4]``, rows ``[src_block, src_begin, src_end, dst_offset]``. src_block is -1 past the width of
        the table. A segment before the first span, behind its span's range or of a range that begins below 0 is
        ``[-1, 0, 0, 0]``, which loads nothing.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit, or memory is shared (see `kvhal.ops`); nothing was written.
        InvalidMetadata: strict mode, spans that do not follow each other, or a range that reaches past its table or an id
            below 0.
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.
    """
    if is_dynamo_compiling():
        from kvhal import library

        return library.expand_load_plan(spans, block_tables, block_size, num_segments, out)
    scope = current()
    if type(block_size) is int and type(num_segments) is int:
        call = scope.near[EXPAND_LOAD_PLAN].get(num_segments)
        tensors = (spans, block_tables) if out is None else (spans, block_tables, out)
        if call is not None and call.scalars == (block_size, out is None) and call.same(*tensors):
            result: torch.Tensor = call.new() if out is None else out
            if not result.data_ptr() & UNALIGNED:
                call.prepared(spans, block_tables, block_size, result)
                return result
    return _expand(scope, spans, block_tables, block_size, num_segments, out)


def _expand(
    scope: Scope,
    spans: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    num_segments: int,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """A call that is not like the one before: an equal one is found, or it is validated and bound."""
    if is_traced(spans):
        from kvhal import library

        return library.expand_load_plan(spans, block_tables, block_size, num_segments, out)
    tensors, fresh = (spans, block_tables) if out is None else (spans, block_tables, out), out is None
    plain = type(block_size) is type(num_segments) is int
    key = call_key(Op.EXPAND_LOAD_PLAN, (block_size, num_segments), *tensors) if plain else None
    call = find(scope, key)
    if call is not None:
        out = cast(torch.Tensor, call.new() if out is None else out)
        call.launch(spans, block_tables, block_size, out)
    else:
        block_size = check_int("block_size", block_size, 1)
        num_segments = check_int("num_segments", num_segments, 0)
        _check_inputs(spans, block_tables)
        out = int32_output(out, (num_segments, 4), spans.device)
        check_contiguous("out", out, written=True)
        check_same_device(spans.device, "spans", block_tables=block_tables, out=out)
        check_apart("out", out, spans=spans, block_tables=block_tables)
        if num_segments == 0:
            return out
        if scope.policy.strict:
            strict.check_spans(spans, block_tables, block_size, num_segments)
        launch = bound(scope, Op.EXPAND_LOAD_PLAN, None, None, None, spans.device)
        launch(spans, block_tables, block_size, out)
        new = allocator(out) if fresh else None
        call = remember(scope, key, lambda: Call(launch, tensors, (block_size, fresh), new))
    keep_near(scope, EXPAND_LOAD_PLAN, num_segments, call, tensors, (out,), spans, block_tables, block_size, out)
    return out


def _check_inputs(spans: torch.Tensor, block_tables: torch.Tensor) -> None:
    check_tensor("spans", spans, INT32, rank=2)
    check_rows("spans", spans, columns=5)
    check_contiguous("spans", spans)
    check_tensor("block_tables", block_tables, INT32, rank=2)
    check_rows("block_tables", block_tables)
