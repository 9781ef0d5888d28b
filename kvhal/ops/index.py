"""Index conversions: what attention kernels take instead of data."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from kvhal.config import current
from kvhal.ops.index_calls import cat, convert, decode, expand
from kvhal.ops.repeated import CONVERT_INDEX, DECODE_SWA_INDEX, EXPAND_SWA_INDEX, INDEX_CAT


def convert_kv_index(
    topk_idxs: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Turns the token indices that an indexer picked into slots, in place.

    Args:
        topk_idxs: int32 ``[b, q, k]``, token indices of their sequence; overwritten; any outer strides.
        block_tables: int32 ``[b, width]``, block ids of each sequence; any row stride.
        context_lens: int32 ``[b, q]``; entries k_i >= context_lens[b, q] become -1.
        block_size: tokens a block.

    Returns:
        `topk_idxs`, entry x now ``block_tables[b, x // block_size] * block_size + x % block_size``; -1 where x or its block id
        is out of range.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit, or memory is shared (see `kvhal.ops`); nothing was written.
        InvalidMetadata: strict mode, an entry or block id is out of range.
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.
    """
    if is_dynamo_compiling():
        from kvhal import library

        return library.convert_kv_index(topk_idxs, block_tables, context_lens, block_size)
    scope = current()
    if type(block_size) is int:
        call = scope.near[CONVERT_INDEX].get(block_size)
        if call is not None and call.same(topk_idxs, block_tables, context_lens):
            call.prepared(topk_idxs, block_tables, context_lens, block_size)
            return topk_idxs
    return convert(scope, topk_idxs, block_tables, context_lens, block_size)


def kv_index_cat(
    left: torch.Tensor,
    right: torch.Tensor,
    total_k_swa_cached: int,
    total_k_swa_cur: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Joins the sliding-window index table with the compressed one, shifted behind the window rows of the buffer.

    Args:
        left: int32 ``[rows, w_left]``, copied as it is; any row stride.
        right: int32 ``[rows, w_right]``; entries >= 0 are shifted by total_k_swa_cached + total_k_swa_cur, negative ones
            become -1.
        total_k_swa_cached, total_k_swa_cur: rows of the buffer before the compressed part.
        out: int32 ``[rows, w_left + w_right]``, None allocates.

    Returns:
        int32 ``[rows, w_left + w_right]``.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit, or memory is shared (see `kvhal.ops`); nothing was written.
        InvalidMetadata: strict mode, an entry of `right` is below -1 or too large to be shifted.
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.
    """
    if is_dynamo_compiling():
        from kvhal import library

        return library.kv_index_cat(left, right, total_k_swa_cached, total_k_swa_cur, out)
    scope = current()
    if type(total_k_swa_cached) is int and type(total_k_swa_cur) is int:
        call = scope.near[INDEX_CAT].get(total_k_swa_cached)
        tensors = (left, right) if out is None else (left, right, out)
        if call is not None and call.scalars == (total_k_swa_cur, out is None) and call.same(*tensors):
            result: torch.Tensor = call.new() if out is None else out
            call.prepared(left, right, total_k_swa_cached + total_k_swa_cur, result)
            return result
    return cat(scope, left, right, total_k_swa_cached, total_k_swa_cur, out)


def expand_swa_index(pivots: torch.Tensor, width: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Expands two ranges a row into a dense index table.

    Args:
        pivots: int32 ``[n, 4]``, rows (offset1, len1, offset2, len2); a negative length counts as 0.
        width: columns of the table.
        out: int32 ``[n, width]``, None allocates.

    Returns:
        int32 ``[n, width]``: offset1, offset1 + 1, ... (len1 entries), then offset2, ... (len2 entries), the rest -1.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit, or memory is shared (see `kvhal.ops`); nothing was written.
        InvalidMetadata: strict mode, a length is negative, a range starts below 0 or the row is too short.
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.
    """
    if is_dynamo_compiling():
        from kvhal import library

        return library.expand_swa_index(pivots, width, out)
    scope = current()
    if type(width) is int:
        call = scope.near[EXPAND_SWA_INDEX].get(width)
        tensors = (pivots,) if out is None else (pivots, out)
        if call is not None and call.fresh is (out is None) and call.same(*tensors):
            result: torch.Tensor = call.new() if out is None else out
            call.prepared(pivots, result)
            return result
    return expand(scope, pivots, width, out)


def get_kv_swa_index_decode(
    kv_swa_index_offset_len: torch.Tensor, window_size: int, swa_block_size: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Expands each query's window in its ring block into slots.

    Args:
        kv_swa_index_offset_len: int32 ``[n, 2]``, rows (start_slot, valid_length).
        window_size: columns of the result.
        swa_block_size: tokens of a ring block; slots wrap inside the block that holds start_slot.
        out: int32 ``[n, window_size]``, None allocates.

    Returns:
        int32 ``[n, window_size]``: valid_length slots, the rest -1; a negative start_slot gives a row of -1.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit, or memory is shared (see `kvhal.ops`); nothing was written.
        InvalidMetadata: strict mode, a start is below -1 or a length does not fit the window or the ring.
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.
    """
    if is_dynamo_compiling():
        from kvhal import library

        return library.get_kv_swa_index_decode(kv_swa_index_offset_len, window_size, swa_block_size, out)
    scope = current()
    if type(window_size) is int and type(swa_block_size) is int:
        call = scope.near[DECODE_SWA_INDEX].get(window_size)
        tensors = (kv_swa_index_offset_len,) if out is None else (kv_swa_index_offset_len, out)
        if call is not None and call.scalars == (swa_block_size, out is None) and call.same(*tensors):
            result: torch.Tensor = call.new() if out is None else out
            call.prepared(kv_swa_index_offset_len, swa_block_size, result)
            return result
    return decode(scope, kv_swa_index_offset_len, window_size, swa_block_size, out)
