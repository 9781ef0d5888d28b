"""fused_norm_rope_hadamard_cast_store_kvcache in plain torch: the fp32 stages, one rounding, then exactly the store."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvhal.backends.reference_torch.codec import dequantize, layout_of, quantize, round_bf16, row_chunks, widen
from kvhal.backends.reference_torch.scatter import scatter_records
from kvhal.interface import HadamardArgs, Launcher, NormArgs, Request, RopeArgs
from kvhal.stages import hadamard, rms_norm, rope


def bind_fused_store(request: Request) -> Launcher:
    """Launcher of FUSED_STORE; the contract is in `kvhal.interface`."""
    layout = layout_of(request)

    @torch.no_grad()
    def launch(
        kv: Tensor,
        norm: NormArgs | None,
        rotary: RopeArgs | None,
        transform: HadamardArgs | None,
        cache: Tensor | None,
        slots: Tensor | None,
        back: Tensor | None,
    ) -> None:
        rows = torch.empty(kv.shape, dtype=torch.bfloat16, device=kv.device)
        for chunk in row_chunks(kv.shape[0], layout.elements, kv.device):
            rows[chunk] = _stages(kv[chunk], chunk, norm, rotary, transform)
        data, sf = quantize(rows, layout)
        if cache is not None and slots is not None:
            scatter_records(cache, layout, slots, data, sf)
        if back is not None:
            back.copy_(dequantize(data, sf, layout))

    return launch


def _stages(
    kv: Tensor,
    chunk: slice,
    norm: NormArgs | None,
    rotary: RopeArgs | None,
    transform: HadamardArgs | None,
) -> Tensor:
    """bf16 of one chunk of rows after the stages that are switched on."""
    x = widen(kv)
    if norm is not None:
        x = rms_norm(x, norm.weight, norm.eps)
    if rotary is not None:
        x = rope(x, replace(rotary, positions=rotary.positions[chunk]))
    if transform is not None:
        x = hadamard(x)
    return round_bf16(x)
