"""Plans on a device: host tensors go there without waiting, block tables that live there are expanded there."""

from __future__ import annotations

import numpy as np
import torch

from kvhal.errors import CaptureError
from kvhal.ops.plan import expand_load_plan
from kvhal.plan import inputs
from kvhal.plan.inputs import Ints, IntTable
from kvhal.platform import is_capturing

PAGE_LOCKED = ("cuda", "npu")  #: devices that fetch from page-locked memory while the host goes on


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`; from the host to an accelerator without waiting, through page-locked memory.

    Raises:
        CaptureError: a graph is being captured; each replay would fetch from host memory that is something else by then.
    """
    if tensor.device.type != "cpu" or device.type not in PAGE_LOCKED:
        return tensor.to(device)
    if is_capturing(device):
        raise CaptureError("a plan goes to the device while a graph is being captured; make plans before the capture")
    return tensor.pin_memory().to(device, non_blocking=True)


def expand_compressed(
    tokens: Ints, block_tables: IntTable, size: int, ratio: int, device: torch.device
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """The parts of a CompressedLoadPlan, of `tokens` [b] compressed tokens in blocks of `size`; see its builder."""
    table = inputs.device_table("block_tables", block_tables, len(tokens), device)
    inputs.check_table_width("block_tables", table.shape[1], np.zeros_like(tokens), tokens, size, ratio)
    rows = np.maximum(tokens, 1)
    segments, total = -(-rows // size), int(rows.sum())
    inputs.check_total(total)
    cu = np.concatenate(([0], np.cumsum(rows)))
    sequences = np.where(tokens > 0, np.arange(len(tokens)), -1)
    spans = np.stack([inputs.starts_of(segments), cu[:-1], sequences, np.zeros_like(tokens), rows], axis=1)
    sent = send(torch.from_numpy(np.concatenate([spans.ravel(), cu]).astype(np.int32)), table.device)
    expanded = expand_load_plan(sent[: spans.size].view(spans.shape), table, size, int(segments.sum()))
    return expanded, total, sent[spans.size :]
