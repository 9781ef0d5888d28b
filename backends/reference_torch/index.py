"""The index operations in plain torch: 64-bit arithmetic, results cut to their low 32 bits.

What is written may be an inference tensor, which torch writes in inference mode only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvhal.interface import Launcher, Request

_INT32_MAX = torch.iinfo(torch.int32).max


def bind_convert_index(request: Request) -> Launcher:
    """Launcher of CONVERT_INDEX; the contract is in `kvhal.interface`."""

    @torch.inference_mode()
    def launch(topk: Tensor, block_tables: Tensor, context_lens: Tensor, block_size: int) -> None:
        batch, queries, count = topk.shape
        width = block_tables.shape[1]
        if width == 0:
            topk.fill_(-1)
            return
        index = topk.to(torch.int64)
        column = torch.div(index, block_size, rounding_mode="floor")
        picked = column.clamp(0, width - 1).reshape(batch, queries * count)
        block = torch.gather(block_tables, 1, picked).to(torch.int64).view(batch, queries, count)
        slot = block * block_size + (index - column * block_size)
        entry = torch.arange(count, device=topk.device)
        valid = (entry < context_lens.unsqueeze(2)) & (index >= 0) & (column < width)
        valid &= (block >= 0) & (slot <= _INT32_MAX)
        topk.copy_(torch.where(valid, slot, -1))

    return launch


def bind_index_cat(request: Request) -> Launcher:
    """Launcher of INDEX_CAT; the contract is in `kvhal.interface`."""

    @torch.inference_mode()
    def launch(left: Tensor, right: Tensor, base: int, out: Tensor) -> None:
        width = left.shape[1]
        out[:, :width].copy_(left)
        out[:, width:].copy_(torch.where(right >= 0, right.to(torch.int64) + base, -1))

    return launch


def bind_expand_swa_index(request: Request) -> Launcher:
    """Launcher of EXPAND_SWA_INDEX; the contract is in `kvhal.interface`."""

    @torch.inference_mode()
    def launch(pivots: Tensor, out: Tensor) -> None:
        offset1, len1, offset2, len2 = pivots.to(torch.int64).unsqueeze(2).unbind(1)
        column = torch.arange(out.shape[1], device=out.device)
        behind = column - len1.clamp(min=0)
        second = torch.where(behind < len2, offset2 + behind, -1)
        out.copy_(torch.where(behind < 0, offset1 + column, second))

    return launch


def bind_decode_swa_index(request: Request) -> Launcher:
    """Launcher of DECODE_SWA_INDEX; the contract is in `kvhal.interface`."""

    @torch.inference_mode()
    def launch(offset_len: Tensor, swa_block_size: int, out: Tensor) -> None:
        start, length = offset_len.to(torch.int64).unsqueeze(2).unbind(1)
        column = torch.arange(out.shape[1], device=out.device)
        first = start.remainder(swa_block_size)
        slot = start - first + (first + column).remainder(swa_block_size)
        out.copy_(torch.where((column < length) & (start >= 0), slot, -1))

    return launch
