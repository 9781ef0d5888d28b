"""The e2m1 encoder over every bf16 under every scale: what its fp16 shortcut rests on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvhal.formats import BF16_INF, FP4_INDEX_KV_FORMAT, V41_FP4_FORMAT, KVCacheFormat
from kvhal.numerics import decode_e4m3, decode_ue8m0, encode_e2m1
from kvhal.platform import detect

triton = pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = 4096


def amax_of_every_scale(layout: KVCacheFormat) -> list[int]:
    """bf16 bits of one amax for each scale byte that a finite group can get."""
    from kvhal.formats import KVCacheFormat as Format
    from kvhal.numerics import quantize

    one = Format("e2m1", 8, 8, 0, True, layout.sf_format, "", token_interleaved=True)
    bits = np.arange(BF16_INF, dtype=np.int32)
    rows = torch.zeros((BF16_INF, 8), dtype=torch.int16)
    rows[:, 0] = torch.from_numpy(bits.astype(np.int16))
    scales = quantize(rows.view(torch.bfloat16), one)[1][:, 0].numpy()
    return [int(bits[scales == scale][0]) for scale in np.unique(scales)]


@pytest.mark.parametrize("layout", [V41_FP4_FORMAT, FP4_INDEX_KV_FORMAT], ids=["e4m3", "ue8m0"])
def test_every_bf16_under_every_scale(layout: KVCacheFormat) -> None:
    from kvhal.backends.portable_triton.record import record_of
    from tests.triton.kernels import encode_e2m1_pairs

    record = record_of(layout, 64, detect(DEVICE))
    bits = torch.arange(BF16_INF, dtype=torch.int32).to(torch.int16)
    bits = torch.cat((bits, bits | -0x8000)).to(DEVICE)
    every = amax_of_every_scale(layout)
    # the interpreter takes a while: every mantissa in a few binades, subnormal scales, the smallest and the largest
    chosen = every if DEVICE == "cuda" else every[:10] + every[60:70:3] + every[-2:]
    amax = torch.tensor(chosen, dtype=torch.int32, device=DEVICE)
    scales = torch.zeros_like(amax)
    words = torch.zeros((len(amax), len(bits) // 8), dtype=torch.int32, device=DEVICE)
    grid = (triton.cdiv(len(bits), SIZE), len(amax))
    encode_e2m1_pairs[grid](bits, amax, scales, words, len(bits), record, SIZE, enable_fp_fusion=False)

    sf = scales.cpu().to(torch.uint8)
    assert len(every) >= 126 and len(sf.unique()) == len(amax)
    multiplier = 1 / decode_e4m3(sf) if layout.sf_format == "e4m3" else 1 / decode_ue8m0(sf)
    values = (bits.cpu().to(torch.int32) << 16).view(torch.float32)
    codes = words.cpu().view(torch.uint8)
    for index in range(len(amax)):
        need = encode_e2m1(values * multiplier[index])
        assert torch.equal(codes[index], need[0::2] | need[1::2] << 4), f"scale {int(sf[index]):#04x}"
