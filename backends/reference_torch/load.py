"""load_paged_kv_cache and load_kv_slots in plain torch: find each output row's slot, gather, dequantise."""

from __future__ import annotations

import torch
from torch import Tensor

from kvhal.backends.reference_torch.codec import dequantize, layout_of, row_chunks
from kvhal.backends.reference_torch.scatter import gather_records
from kvhal.interface import Launcher, Request

#: marks in a row map, beside slots >= 0
_ZEROS = -1
_UNCOVERED = -2


def bind_load(request: Request) -> Launcher:
    """Launcher of LOAD; the contract is in `kvhal.interface`."""
    layout = layout_of(request)

    @torch.no_grad()
    def launch(cache: Tensor, segments: Tensor, total_k: int, out: Tensor, out_sf: Tensor | None) -> None:
        row_map = _row_map(segments, cache.shape[0], cache.shape[1], total_k)
        for rows in row_chunks(total_k, layout.elements, cache.device):
            slots = row_map[rows]
            data, sf, _ = gather_records(cache, layout, slots)
            if layout.is_index:
                _write_rows(out[rows], data, slots)
            else:
                _write_rows(out[rows], dequantize(data, sf, layout).view(torch.uint8), slots)
            if out_sf is not None:
                _write_rows(out_sf[rows], sf, slots)

    return launch


def bind_load_slots(request: Request) -> Launcher:
    """Launcher of LOAD_SLOTS; the contract is in `kvhal.interface`."""
    layout = layout_of(request)

    @torch.inference_mode()  # `out` itself is written, which may be an inference tensor
    def launch(cache: Tensor, slots: Tensor, out: Tensor) -> None:
        for rows in row_chunks(slots.shape[0], layout.elements, cache.device):
            data, sf, valid = gather_records(cache, layout, slots[rows])
            out[rows] = dequantize(data, sf, layout).masked_fill(~valid.unsqueeze(1), 0.0)

    return launch


def _row_map(segments: Tensor, num_blocks: int, block_size: int, total_k: int) -> Tensor:
    """What each output row holds: a slot, `_ZEROS` or `_UNCOVERED`; int64 ``[total_k]``.

    Row ``t`` of a block goes to ``dst_offset + t - src_begin`` when the segment covers it. One int64 says which record
    a row holds, so overlapping segments cannot mix two.
    """
    device = segments.device
    row_map = torch.full((total_k + 1,), _UNCOVERED, dtype=torch.int64, device=device)  # the last row: what is dropped
    token = torch.arange(block_size, dtype=torch.int64, device=device)
    for chunk in row_chunks(segments.shape[0], block_size, device):
        block, begin, end, offset = segments[chunk].to(torch.int64).unsqueeze(2).unbind(1)
        row = offset - begin + token
        kept = (token >= begin) & (token < end) & (row >= 0) & (row < total_k)
        slot = torch.where((block >= 0) & (block < num_blocks), block * block_size + token, _ZEROS)
        row_map.index_put_((torch.where(kept, row, total_k),), slot)
    return row_map[:total_k]


def _write_rows(out: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Byte rows ``[n, width]`` into `out` by the marks in slots ``[n]``: zeros, the row, or what `out` holds."""
    target = (out.unsqueeze(1) if out.dim() == 1 else out).view(torch.uint8)
    marks = slots.unsqueeze(1)
    target.copy_(torch.where(marks >= 0, rows, torch.where(marks == _ZEROS, 0, target)))
