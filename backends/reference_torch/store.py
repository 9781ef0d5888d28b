"""store_kv_cache in plain torch: quantise every row, then scatter the records."""

from __future__ import annotations

import torch
from torch import Tensor

from kvhal.backends.reference_torch.codec import layout_of, quantize
from kvhal.backends.reference_torch.scatter import scatter_records
from kvhal.interface import Launcher, Request


def bind_store(request: Request) -> Launcher:
    """Launcher of STORE; the contract is in `kvhal.interface`."""
    layout = layout_of(request)

    @torch.no_grad()
    def launch(kv: Tensor, cache: Tensor, slots: Tensor) -> None:
        scatter_records(cache, layout, slots, *quantize(kv, layout))

    return launch
