"""Index conversions: what attention kernels take instead of data."""

from __future__ import annotations

from typing import cast

import torch
from torch.compiler import is_compiling

from kvhal.binding import bound
from kvhal.config import current
from kvhal.interface import Op
from kvhal.ops import strict
from kvhal.ops.checks import (
    check_contiguous,
    check_int,
    check_rows,
    check_same_device,
    check_tensor,
    check_writable_rows,
    reject,
)
from kvhal.ops.repeated import call_key, remember, repeated

INT32 = (torch.int32,)


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
        ValueError: a dtype, shape, stride or device does not fit; nothing was written.
        InvalidMetadata: strict mode, an entry or block id is out of range.
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.
    """
    if is_compiling():
        from kvhal import library

        return library.convert_kv_index(topk_idxs, block_tables, context_lens, block_size)
    scope = current()
    plain = type(block_size) is int
    key = call_key(Op.CONVERT_INDEX, (block_size,), topk_idxs, block_tables, context_lens) if plain else None
    launch = repeated(scope, key)
    if launch is not None:
        launch(topk_idxs, block_tables, context_lens, block_size)
        return topk_idxs
    check_tensor("topk_idxs", topk_idxs, INT32, rank=3)
    check_tensor("block_tables", block_tables, INT32, rank=2)
    check_tensor("context_lens", context_lens, INT32, rank=2)
    block_size = check_int("block_size", block_size, 1)
    device = topk_idxs.device
    check_same_device(device, "topk_idxs", block_tables=block_tables, context_lens=context_lens)
    batch, queries, _ = topk_idxs.shape
    if block_tables.shape[0] != batch:
        reject("block_tables", f"{block_tables.shape[0]} rows", f"{batch}, one a sequence of topk_idxs")
    if tuple(context_lens.shape) != (batch, queries):
        reject("context_lens", f"shape {tuple(context_lens.shape)}", f"{(batch, queries)}, one length a query of topk_idxs")
    check_rows("block_tables", block_tables)
    _check_topk_strides(topk_idxs)
    if topk_idxs.numel() == 0:
        return topk_idxs
    if scope.policy.strict:
        strict.check_topk(topk_idxs, block_tables, context_lens, block_size)
    launch = bound(scope, Op.CONVERT_INDEX, None, None, None, device)
    launch(topk_idxs, block_tables, context_lens, block_size)
    remember(scope, key, launch)
    return topk_idxs


def _check_topk_strides(topk: torch.Tensor) -> None:
    """Written in place: rows are contiguous and do not overlap."""
    if topk.stride(2) != 1 and topk.shape[2] > 1:
        reject("topk_idxs", f"strides {topk.stride()}", "contiguous rows (last stride 1)", "it is written in place")
    used = sorted((topk.stride(axis), topk.shape[axis]) for axis in (0, 1) if topk.shape[axis] > 1)
    reach = topk.shape[2]
    for stride, count in used:
        if stride < reach:
            reject("topk_idxs", f"strides {topk.stride()}", "rows that do not overlap", "it is written in place")
        reach = stride * (count - 1) + reach


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
        ValueError: a dtype, shape, stride or device does not fit; nothing was written.
        InvalidMetadata: strict mode, an entry of `right` is below -1 or too large to be shifted.
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.
    """
    if is_compiling():
        from kvhal import library

        return library.kv_index_cat(left, right, total_k_swa_cached, total_k_swa_cur, out)
    scope = current()
    plain = type(total_k_swa_cached) is type(total_k_swa_cur) is int
    key = call_key(Op.INDEX_CAT, (total_k_swa_cached, total_k_swa_cur), left, right, out) if plain else None
    launch = repeated(scope, key)
    if launch is not None:
        launch(left, right, total_k_swa_cached + total_k_swa_cur, out)
        return cast(torch.Tensor, out)
    check_tensor("left", left, INT32, rank=2)
    check_tensor("right", right, INT32, rank=2)
    cached, cur = check_int("total_k_swa_cached", total_k_swa_cached, 0), check_int("total_k_swa_cur", total_k_swa_cur, 0)
    base = check_int("total_k_swa_cached + total_k_swa_cur", cached + cur, 0)
    if left.shape[0] != right.shape[0]:
        reject("right", f"{right.shape[0]} rows", f"{left.shape[0]}, as many as left")
    check_rows("left", left)
    check_rows("right", right)
    out = _output(out, (left.shape[0], left.shape[1] + right.shape[1]), left.device)
    check_same_device(left.device, "left", right=right, out=out)
    if out.numel() == 0:
        return out
    if scope.policy.strict:
        strict.check_index_cat(right, base)
    launch = bound(scope, Op.INDEX_CAT, None, None, None, left.device)
    launch(left, right, base, out)
    remember(scope, key, launch)
    return out


def expand_swa_index(pivots: torch.Tensor, width: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Expands two ranges a row into a dense index table.

    Args:
        pivots: int32 ``[n, 4]``, rows (offset1, len1, offset2, len2); a negative length counts as 0.
        width: columns of the table.
        out: int32 ``[n, width]``, None allocates.

    Returns:
        int32 ``[n, width]``: offset1, offset1 + 1, ... (len1 entries), then offset2, ... (len2 entries), the rest -1.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit; nothing was written.
        InvalidMetadata: strict mode, a length is negative, a range starts below 0 or the row is too short.
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.
    """
    if is_compiling():
        from kvhal import library

        return library.expand_swa_index(pivots, width, out)
    scope = current()
    key = call_key(Op.EXPAND_SWA_INDEX, (width,), pivots, out) if type(width) is int else None
    launch = repeated(scope, key)
    if launch is not None:
        launch(pivots, out)
        return cast(torch.Tensor, out)
    check_tensor("pivots", pivots, INT32, rank=2)
    check_rows("pivots", pivots, columns=4)
    check_contiguous("pivots", pivots)
    width = check_int("width", width, 0)
    out = _output(out, (pivots.shape[0], width), pivots.device)
    check_same_device(pivots.device, "pivots", out=out)
    if out.numel() == 0:
        return out
    if scope.policy.strict:
        strict.check_pivots(pivots, width)
    launch = bound(scope, Op.EXPAND_SWA_INDEX, None, None, None, pivots.device)
    launch(pivots, out)
    remember(scope, key, launch)
    return out


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
        ValueError: a dtype, shape, stride or device does not fit; nothing was written.
        InvalidMetadata: strict mode, a start is below -1 or a length does not fit the window or the ring.
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.
    """
    if is_compiling():
        from kvhal import library

        return library.get_kv_swa_index_decode(kv_swa_index_offset_len, window_size, swa_block_size, out)
    scope = current()
    plain = type(window_size) is type(swa_block_size) is int
    key = call_key(Op.DECODE_SWA_INDEX, (window_size, swa_block_size), kv_swa_index_offset_len, out) if plain else None
    launch = repeated(scope, key)
    if launch is not None:
        launch(kv_swa_index_offset_len, swa_block_size, out)
        return cast(torch.Tensor, out)
    windows = check_tensor("kv_swa_index_offset_len", kv_swa_index_offset_len, INT32, rank=2)
    check_rows("kv_swa_index_offset_len", windows, columns=2)
    check_contiguous("kv_swa_index_offset_len", windows)
    window_size = check_int("window_size", window_size, 0)
    swa_block_size = check_int("swa_block_size", swa_block_size, 1)
    out = _output(out, (windows.shape[0], window_size), windows.device)
    check_same_device(windows.device, "kv_swa_index_offset_len", out=out)
    if out.numel() == 0:
        return out
    if scope.policy.strict:
        strict.check_windows(windows, window_size, swa_block_size)
    launch = bound(scope, Op.DECODE_SWA_INDEX, None, None, None, windows.device)
    launch(windows, swa_block_size, out)
    remember(scope, key, launch)
    return out


def _output(out: torch.Tensor | None, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    if out is None:
        return torch.empty(shape, dtype=torch.int32, device=device)
    check_tensor("out", out, INT32, rank=2)
    if tuple(out.shape) != shape:
        reject("out", f"shape {tuple(out.shape)}", str(shape))
    check_rows("out", out, written=True)
    check_writable_rows("out", out)
    return out
