"""The shortcuts of cuda_tilelang's codecs, imitated in numpy and torch and held to the specification for every input."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from kvhal.formats import E4M3_MAX, FP32_SF_AMAX_FLOOR, UE8M0_RULES
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


def _nearest(exact: Fraction) -> np.float32:
    """fp32, ties to even, of a number well inside its range."""
    near = np.float32(float(exact))
    around = sorted((np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(np.inf))), key=float)
    away = [abs(Fraction(float(value)) - exact) for value in around]
    best = [value for value, distance in zip(around, away, strict=True) if distance == min(away)]
    return best[0] if len(best) == 1 else next(value for value in best if value.view(np.uint32) % 2 == 0)


def test_fp32_scales_and_their_reciprocals_are_exact() -> None:
    """Every amax over 448 by a product and a correction; the reciprocal by one Newton step, wherever in the last place the
    hardware's estimate (PTX: an error of at most one) may lie."""
    inverse = Fraction(float(np.float32(1) / np.float32(E4M3_MAX)))
    for amax in np.unique(np.maximum((POSITIVE << 16).view(np.float32), np.float32(FP32_SF_AMAX_FLOOR))):
        exact = Fraction(float(amax))
        first = Fraction(float(_nearest(exact * inverse)))
        rest = Fraction(float(_nearest(exact - first * int(E4M3_MAX)))) if exact != first * int(E4M3_MAX) else Fraction(0)
        sf = _nearest(first + rest * inverse)
        assert sf == amax / np.float32(E4M3_MAX), amax
        need = np.float32(1) / sf
        for estimate in (np.nextafter(need, np.float32(0)), need, np.nextafter(need, np.float32(np.inf))):
            error = 1 - Fraction(float(sf)) * Fraction(float(estimate))
            error = Fraction(float(_nearest(error))) if error else error
            assert _nearest(Fraction(float(estimate)) * (1 + error)) == need, sf
