"""The operations. Shapes and dtypes have been checked; values of index tensors have not."""

from __future__ import annotations

import numpy as np
import torch

from kvhal.interface import Launcher, Request


def bind_store(request: Request) -> Launcher:
    """Binds `store_kv_cache`."""
    return _store


def bind_load(request: Request) -> Launcher:
    """Binds `load_paged_kv_cache`."""
    return _load


def bind_load_slots(request: Request) -> Launcher:
    """Binds `load_kv_slots`."""
    return _load_slots


def bind_index_cat(request: Request) -> Launcher:
    """Binds `kv_index_cat`."""
    return _index_cat


def _bits(rows: torch.Tensor) -> np.ndarray:
    """bf16 as int16, which numpy has; the same memory."""
    return rows.view(torch.int16).numpy()


def _store(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    records, at = _bits(cache[:, :, 0]), slots.numpy()
    block_size = records.shape[1]
    inside = (at >= 0) & (at < records.shape[0] * block_size)
    records[at[inside] // block_size, at[inside] % block_size] = _bits(kv)[inside]


def _load(cache: torch.Tensor, segments: torch.Tensor, total_k: int, out: torch.Tensor, out_sf: torch.Tensor | None) -> None:
    records, rows = _bits(cache[:, :, 0]), _bits(out)
    for block, begin, end, offset in segments.tolist():
        # tokens of the block whose rows are inside the output
        first = max(begin, 0, begin - offset)
        last = min(end, records.shape[1], begin - offset + total_k)
        if first < last:
            to = slice(offset + first - begin, offset + last - begin)
            rows[to] = records[block, first:last] if 0 <= block < records.shape[0] else 0


def _load_slots(cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    records, rows, at = _bits(cache[:, :, 0]), _bits(out), slots.numpy()
    block_size = records.shape[1]
    inside = (at >= 0) & (at < records.shape[0] * block_size)
    rows[~inside] = 0
    rows[inside] = records[at[inside] // block_size, at[inside] % block_size]


def _index_cat(left: torch.Tensor, right: torch.Tensor, base: int, out: torch.Tensor) -> None:
    table, width = out.numpy(), left.shape[1]
    table[:, :width] = left.numpy()
    table[:, width:] = np.where(right.numpy() < 0, -1, right.numpy() + np.int32(base))
