"""`kvhal.ops.index` where a call is not like the one before: an equal one is found, or it is validated and bound."""

from __future__ import annotations

from typing import cast

import torch

from kvhal.binding import bound
from kvhal.config import Scope
from kvhal.interface import Op
from kvhal.ops import strict
from kvhal.ops.checks import (
    check_apart,
    check_contiguous,
    check_int,
    check_rows,
    check_same_device,
    check_tensor,
    check_writable_rows,
    int32_output,
    reject,
)
from kvhal.ops.repeated import (
    CONVERT_INDEX,
    DECODE_SWA_INDEX,
    EXPAND_SWA_INDEX,
    INDEX_CAT,
    Call,
    allocator,
    call_key,
    find,
    is_traced,
    keep_near,
    remember,
)

INT32 = (torch.int32,)


def convert(
    scope: Scope, topk_idxs: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor, block_size: int
) -> torch.Tensor:
    if is_traced(topk_idxs):
        from kvhal import library

        return library.convert_kv_index(topk_idxs, block_tables, context_lens, block_size)
    tensors = (topk_idxs, block_tables, context_lens)
    key = call_key(Op.CONVERT_INDEX, (block_size,), *tensors) if type(block_size) is int else None
    call = find(scope, key)
    if call is not None:
        call.launch(*tensors, block_size)
    else:
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
        check_apart("topk_idxs", topk_idxs, block_tables=block_tables, context_lens=context_lens)
        if topk_idxs.numel() == 0:
            return topk_idxs
        if scope.policy.strict:
            strict.check_topk(topk_idxs, block_tables, context_lens, block_size)
        launch = bound(scope, Op.CONVERT_INDEX, None, None, None, device)
        launch(*tensors, block_size)
        call = remember(scope, key, lambda: Call(launch, tensors))
    keep_near(scope, CONVERT_INDEX, block_size, call, tensors, (), *tensors, block_size)
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


def cat(
    scope: Scope, left: torch.Tensor, right: torch.Tensor, swa_cached: int, swa_cur: int, out: torch.Tensor | None
) -> torch.Tensor:
    if is_traced(left):
        from kvhal import library

        return library.kv_index_cat(left, right, swa_cached, swa_cur, out)
    tensors, fresh = (left, right) if out is None else (left, right, out), out is None
    plain = type(swa_cached) is type(swa_cur) is int
    key = call_key(Op.INDEX_CAT, (swa_cached, swa_cur), *tensors) if plain else None
    call = find(scope, key)
    if call is not None:
        base = swa_cached + swa_cur
        out = cast(torch.Tensor, call.new() if out is None else out)
        call.launch(left, right, base, out)
    else:
        check_tensor("left", left, INT32, rank=2)
        check_tensor("right", right, INT32, rank=2)
        base = check_base(swa_cached, swa_cur)
        if left.shape[0] != right.shape[0]:
            reject("right", f"{right.shape[0]} rows", f"{left.shape[0]}, as many as left")
        check_rows("left", left)
        check_rows("right", right)
        out = _output(out, (left.shape[0], left.shape[1] + right.shape[1]), left.device)
        check_same_device(left.device, "left", right=right, out=out)
        check_apart("out", out, left=left, right=right)
        if out.numel() == 0:
            return out
        if scope.policy.strict:
            strict.check_index_cat(right, base)
        launch = bound(scope, Op.INDEX_CAT, None, None, None, left.device)
        launch(left, right, base, out)
        new = allocator(out) if fresh else None
        call = remember(scope, key, lambda: Call(launch, tensors, (swa_cur, fresh), new))
    keep_near(scope, INDEX_CAT, swa_cached, call, tensors, (), left, right, base, out)
    return out


def check_base(swa_cached: int, swa_cur: int) -> int:
    """What entries are shifted by."""
    cached, cur = check_int("total_k_swa_cached", swa_cached, 0), check_int("total_k_swa_cur", swa_cur, 0)
    return check_int("total_k_swa_cached + total_k_swa_cur", cached + cur, 0)


def expand(scope: Scope, pivots: torch.Tensor, width: int, out: torch.Tensor | None) -> torch.Tensor:
    if is_traced(pivots):
        from kvhal import library

        return library.expand_swa_index(pivots, width, out)
    tensors, fresh = (pivots,) if out is None else (pivots, out), out is None
    key = call_key(Op.EXPAND_SWA_INDEX, (width,), *tensors) if type(width) is int else None
    call = find(scope, key)
    if call is not None:
        out = cast(torch.Tensor, call.new() if out is None else out)
        call.launch(pivots, out)
    else:
        check_tensor("pivots", pivots, INT32, rank=2)
        check_rows("pivots", pivots, columns=4)
        check_contiguous("pivots", pivots)
        width = check_int("width", width, 0)
        out = _output(out, (pivots.shape[0], width), pivots.device)
        check_same_device(pivots.device, "pivots", out=out)
        check_apart("out", out, pivots=pivots)
        if out.numel() == 0:
            return out
        if scope.policy.strict:
            strict.check_pivots(pivots, width)
        launch = bound(scope, Op.EXPAND_SWA_INDEX, None, None, None, pivots.device)
        launch(pivots, out)
        new = allocator(out) if fresh else None
        call = remember(scope, key, lambda: Call(launch, tensors, (), new))
    keep_near(scope, EXPAND_SWA_INDEX, width, call, tensors, (), pivots, out)
    return out


def decode(
    scope: Scope, windows: torch.Tensor, window_size: int, swa_block_size: int, out: torch.Tensor | None
) -> torch.Tensor:
    if is_traced(windows):
        from kvhal import library

        return library.get_kv_swa_index_decode(windows, window_size, swa_block_size, out)
    tensors, fresh = (windows,) if out is None else (windows, out), out is None
    plain = type(window_size) is type(swa_block_size) is int
    key = call_key(Op.DECODE_SWA_INDEX, (window_size, swa_block_size), *tensors) if plain else None
    call = find(scope, key)
    if call is not None:
        out = cast(torch.Tensor, call.new() if out is None else out)
        call.launch(windows, swa_block_size, out)
    else:
        check_tensor("kv_swa_index_offset_len", windows, INT32, rank=2)
        check_rows("kv_swa_index_offset_len", windows, columns=2)
        check_contiguous("kv_swa_index_offset_len", windows)
        window_size = check_int("window_size", window_size, 0)
        swa_block_size = check_int("swa_block_size", swa_block_size, 1)
        out = _output(out, (windows.shape[0], window_size), windows.device)
        check_same_device(windows.device, "kv_swa_index_offset_len", out=out)
        check_apart("out", out, kv_swa_index_offset_len=windows)
        if out.numel() == 0:
            return out
        if scope.policy.strict:
            strict.check_windows(windows, window_size, swa_block_size)
        launch = bound(scope, Op.DECODE_SWA_INDEX, None, None, None, windows.device)
        launch(windows, swa_block_size, out)
        new = allocator(out) if fresh else None
        call = remember(scope, key, lambda: Call(launch, tensors, (swa_block_size, fresh), new))
    keep_near(scope, DECODE_SWA_INDEX, window_size, call, tensors, (), windows, swa_block_size, out)
    return out


def _output(out: torch.Tensor | None, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    out = int32_output(out, shape, device)
    check_rows("out", out, written=True)
    check_writable_rows("out", out)
    return out
