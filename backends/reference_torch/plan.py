"""Load plans in plain torch: each segment finds its span; 64-bit arithmetic, results cut to their low 32 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from kvhal.interface import Launcher, Request


def bind_expand_load_plan(request: Request) -> Launcher:
    """Launcher of EXPAND_LOAD_PLAN; the contract is in `kvhal.interface`."""

    @torch.inference_mode()  # `out` may be an inference tensor
    def launch(spans: Tensor, block_tables: Tensor, block_size: int, out: Tensor) -> None:
        if spans.shape[0] == 0:
            _fill(out, -1, 0, 0, 0)
            return
        segment = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
        span = torch.searchsorted(spans[:, 0].contiguous(), segment, right=True) - 1
        first_segment, first_row, table_row, begin, end = spans[span.clamp(min=0)].to(torch.int64).unbind(1)
        column = torch.div(begin, block_size, rounding_mode="floor") + segment - first_segment
        start = column * block_size
        src_begin, src_end = (begin - start).clamp(min=0), (end - start).clamp(max=block_size)
        covers = (span >= 0) & (begin >= 0) & (src_begin < src_end)
        block = torch.where(covers, _entries(block_tables, table_row, column), -1)
        rest = (src_begin, src_end, first_row + (start - begin).clamp(min=0))
        _fill(out, block, *(torch.where(covers, values, 0) for values in rest))

    return launch


def _entries(tables: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Entry (row, column) of the tables, -1 where there is none; int64."""
    rows, width = tables.shape
    if rows == 0 or width == 0:
        return torch.full_like(row, -1)
    inside = (row >= 0) & (row < rows) & (column >= 0) & (column < width)
    return torch.where(inside, tables[row.clamp(0, rows - 1), column.clamp(0, width - 1)].to(torch.int64), -1)


def _fill(out: Tensor, *columns: Tensor | int) -> None:
    for column, values in enumerate(columns):
        if isinstance(values, int):
            out[:, column].fill_(values)
        else:
            out[:, column].copy_(values)
