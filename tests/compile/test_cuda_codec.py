"""The shortcuts of cuda_tilelang's codecs, imitated in numpy and torch and held to the specification for every input."""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from kvhal.formats import E4M3_MAX, FP32_SF_AMAX_FLOOR, UE8M0_RULES, KVCacheFormat
from kvhal.layout import cache_geometry
from kvhal.numerics import decode_e2m1, decode_e4m3, decode_ue8m0, encode_e2m1, encode_e4m3, quantize, round_bf16

codec = pytest.importorskip("kvhal.backends.cuda_tilelang.codec")
quantize_cuda = pytest.importorskip("kvhal.backends.cuda_tilelang.quantize_cuda")
POSITIVE = np.arange(0x7F80, dtype=np.uint32)  # every finite bf16 magnitude
VALUES = (POSITIVE << 16).view(np.float32)
GROUPS = {sf: KVCacheFormat("e2m1", 16, 16, 0, True, sf, "one group", token_interleaved=True) for sf in ("e4m3", "ue8m0")}
SCALE_OF = {"e4m3": decode_e4m3, "ue8m0": decode_ue8m0}


def _factor(scale: np.float32) -> np.float32:
    """What the reciprocal of a scale is multiplied by, from the source's two constants."""
    lifted, plain = (np.float32(float.fromhex(text)) for text in re.findall(r"(0x1\.?\d*p-14)f", quantize_cuda.FACTORS["e2m1"]))
    assert plain == 2.0**-14 < lifted
    return lifted if scale.view(np.uint32) & 0x7FFFFF == 0x700000 else plain


def _multipliers(scale: np.float32) -> list[np.float32]:
    """What a kernel may multiply by: the correctly rounded reciprocal times a power of two, or, lifted, a number near it."""
    factor = _factor(scale)
    rounded = np.float32(1) / scale * factor
    near = [rounded]
    for end in (np.float32(0), np.float32(1)):
        near += [np.nextafter(rounded, end), np.nextafter(np.nextafter(rounded, end), end)]
    return [rounded] if factor == 2.0**-14 else near


def _codes(multiplier: np.float32, saturate: bool) -> np.ndarray:
    """Of every magnitude, as `e2m1_ptx.octet_codes` makes them."""
    with np.errstate(over="ignore", under="ignore"):
        half = (VALUES * multiplier).astype(np.float16).view(np.uint16).astype(np.uint32)
    half = np.minimum(half, 0x0E00) if saturate else half
    return (half + 0xFF + ((half >> 9) & 1)) >> 9


def _constant(name: str, sf: str) -> int:
    found = re.search(rf"\b{name} = (\d+);", codec.source(cache_geometry(GROUPS[sf], 1), 16))
    assert found, name
    return int(found.group(1))


def _fits(amax: np.ndarray, sf: str) -> np.ndarray:
    if sf == "ue8m0":
        return amax < _constant("INF", sf)
    uncovered = (amax >= _constant("UNCOVERED_FROM", sf)) & (amax <= _constant("UNCOVERED_TO", sf))
    return (amax <= _constant("COVERED", sf)) & ~uncovered


@pytest.mark.parametrize("sf", GROUPS)
@pytest.mark.parametrize("part", range(2))
def test_e2m1_encoder_is_exact(sf: str, part: int) -> None:
    """fp16 scaled by 2^-14, with the lift: every magnitude under every scale; without a clamp, those of groups that fit."""
    rows = torch.zeros((len(VALUES), 16), dtype=torch.bfloat16)
    rows[:, 3] = torch.from_numpy(VALUES).bfloat16()
    scales = quantize(rows, GROUPS[sf])[1].reshape(-1)
    fits = _fits(POSITIVE, sf)
    for byte in torch.unique(scales).tolist()[part::2]:
        scale = SCALE_OF[sf](torch.tensor([byte], dtype=torch.uint8)).numpy().astype(np.float32)[0]
        with np.errstate(over="ignore", under="ignore"):
            need = encode_e2m1(torch.from_numpy(VALUES * (np.float32(1) / scale))).numpy()
        here = (scales == byte).numpy() & fits
        most = POSITIVE[here].max() if here.any() else -1
        within = most >= POSITIVE
        for multiplier in _multipliers(scale):
            assert np.array_equal(_codes(multiplier, saturate=True), need), f"scale {scale}"
            assert np.array_equal(_codes(multiplier, saturate=False)[within], need[within]), f"scale {scale}, without a clamp"


def test_what_does_not_fit_is_little() -> None:
    """Only magnitudes that could overflow a code without the clamp, and some between them, take the long way."""
    amax = POSITIVE[~_fits(POSITIVE, "e4m3")]
    small = amax[amax < _constant("COVERED", "e4m3")]
    assert 0 < len(small) <= 145
    assert (VALUES[small] >= 7 * 2.0**-9).all() and (VALUES[small] <= 15 * 2.0**-9).all()
    assert VALUES[_constant("COVERED", "e4m3")] == 6 * E4M3_MAX
    assert _fits(POSITIVE, "ue8m0").all()


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
