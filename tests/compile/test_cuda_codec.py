"""The shortcuts of cuda_tilelang's codecs, imitated in numpy and torch and held to the specification for every input."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from kvhal.formats import UE8M0_RULES
from kvhal.numerics import decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3, round_bf16

codec_cuda = pytest.importorskip("kvhal.backends.cuda_tilelang.codec_cuda")
POSITIVE = np.arange(0x7F80, dtype=np.uint32)  # every finite bf16 magnitude


def _constant(name: str) -> int:
    found = re.search(rf"\b{name} = (0x[0-9A-Fa-f]+)u", codec_cuda.ENCODE["e2m1"])
    assert found, name
    return int(found.group(1), 16)


def _multipliers() -> list[np.float32]:
    e4m3 = decode_e4m3(torch.arange(1, 127, dtype=torch.uint8)).numpy()
    return [*(np.float32(1) / value for value in e4m3), *(np.float32(2.0 ** (127 - b)) for b in range(1, 255))]


@pytest.mark.parametrize("part", range(4))
def test_e2m1_encoder_is_exact(part: int) -> None:
    """fp16 scaled by 2^-14, with the nudge: every magnitude under every multiplier that a scale can give."""
    above, nudge = _constant("ABOVE_TIES"), _constant("NUDGE")
    value = (POSITIVE << 16).view(np.float32)
    for multiplier in _multipliers()[part::4]:
        bits = multiplier.view(np.uint32)
        if bits & 0x7FFFFF == above:
            bits = np.uint32(bits + nudge)
        with np.errstate(over="ignore", under="ignore"):
            half = (value * (bits.view(np.float32) * np.float32(2.0**-14))).astype(np.float16).view(np.uint16).astype(np.uint32)
            need = encode_e2m1(torch.from_numpy(value * multiplier)).numpy()
        magnitude = np.minimum(half, 0x0E00)
        code = (((magnitude + 0xFF + ((magnitude >> 9) & 1)) << 3) & 0x7000) >> 12
        assert np.array_equal(code, need), f"multiplier {multiplier}"


def test_the_nudge_is_needed() -> None:
    value = np.float32(75.0) * (np.float32(1) / np.float32(15.0))
    assert encode_e2m1(torch.tensor([float(value)])).item() == 7 - 1 + (value > 5)
    assert np.float16(value) == 5


def test_powers_of_two_may_multiply_in_bf16() -> None:
    """Rounding the product to bf16 first changes no e4m3 code, subnormal products included."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    value = bits.view(torch.bfloat16).float()
    lowest = UE8M0_RULES["e4m3"][0]
    for b in range(lowest, 248):
        product = value * 2.0 ** (127 - b)
        once = round_bf16(product).float()
        assert torch.equal(encode_e4m3(once), encode_e4m3(product)), b


def test_e2m1_products_are_exact_in_bf16() -> None:
    code = torch.arange(16, dtype=torch.uint8)
    for scales in (decode_e4m3(torch.arange(0, 127, dtype=torch.uint8)), 2.0 ** torch.arange(-126, 125)):
        product = decode_e2m1(code)[:, None] * scales
        assert torch.equal(product, round_bf16(product).float())
