"""`kvhal.numerics` and `kvhal.stages` against oracles that share no code with them (tests/oracle)."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvhal.formats import SUPPORTED_KV_CACHE_FORMATS, KVCacheFormat, QuantizedDtype, ScaleFormat
from kvhal.interface import RopeArgs
from kvhal.numerics import decode_e2m1, decode_e4m3, dequantize, encode_e2m1, encode_e4m3, quantize, round_bf16
from kvhal.stages import hadamard, rms_norm, rope
from tests.oracle import codec as oracle
from tests.oracle import stages as slow

Array = np.ndarray[Any, Any]


def main(dtype: QuantizedDtype, elements: int, group: int, sf: ScaleFormat) -> KVCacheFormat:
    return KVCacheFormat(dtype, elements, group, 0, True, sf, "", token_interleaved=True)


def raw(dtype: QuantizedDtype, elements: int, group: int, sf: ScaleFormat, interleaved: bool = False) -> KVCacheFormat:
    return KVCacheFormat(dtype, elements, group, 0, False, sf, "", token_interleaved=interleaved)


USER_FORMATS = (
    main("e4m3", 384, 32, "ue8m0"),
    main("e2m1", 256, 16, "e4m3"),
    main("e4m3", 64, 64, "fp32"),
    raw("e4m3", 384, 32, "ue8m0"),
    raw("e2m1", 256, 16, "e4m3"),
    raw("e4m3", 64, 64, "fp32", interleaved=True),
    # a short last group, odd groups whose elements share bytes, one group that is longer than the record
    main("e4m3", 50, 16, "ue8m0"),
    main("e4m3", 33, 8, "fp32"),
    main("e2m1", 40, 7, "ue8m0"),
    main("e2m1", 22, 5, "e4m3"),
    raw("e2m1", 6, 1, "ue8m0"),
    raw("e4m3", 3, 128, "fp32"),
)
FORMATS = (*SUPPORTED_KV_CACHE_FORMATS, *USER_FORMATS)

SPECIAL_BITS = (
    # zero to the smallest e2m1 scales
    *(0x0000, 0x0001, 0x007F, 0x0080, 0x00FF, 0x0100, 0x0140, 0x0141, 0x0180, 0x01C0),
    *(0x38D1, 0x38D2, 0x3C3F, 0x3C40, 0x3C41),  # 1e-4 and 6 * 2^-9, the floors
    # e2m1 codes and ties
    *(0x3E80, 0x3F00, 0x3F40, 0x3F80, 0x3FA0, 0x3FE0, 0x4020, 0x4060, 0x40A0, 0x40C0, 0x40C1, 0x4140),
    # e4m3 steps and ties, 448 and beyond
    *(0x3A80, 0x3B00, 0x3B40, 0x3C80, 0x3F88, 0x3F98, 0x43E0, 0x43E1, 0x43E8, 0x43F0),
    *(0x7F00, 0x7F60, 0x7F61, 0x7F7E, 0x7F7F),
)
NON_FINITE_BITS = (0x7F80, 0x7F81, 0x7FC0, 0x7FFF)


def gauss(rng: np.random.Generator, n: int, scale: float) -> Array:
    """Magnitude bits of normal values, truncated to bf16."""
    values = np.abs(rng.standard_normal(n) * scale).astype(np.float32)
    bits: Array = (values.view(np.uint32) >> 16).astype(np.uint16)
    return bits


def fill(kind: str, rng: np.random.Generator, n: int) -> Array:
    """Magnitude bits of one stretch of a row."""
    if kind == "gauss":
        return gauss(rng, n, 2.0 ** rng.integers(-14, 14))
    if kind == "any":
        return rng.integers(0, 0x8000, n).astype(np.uint16)
    if kind == "special":
        return rng.choice(np.array(SPECIAL_BITS, np.uint16), n)
    if kind == "subnormal":
        return rng.integers(0, 0x100, n).astype(np.uint16)
    if kind == "powers":
        return (rng.integers(0, 255, n) << 7).astype(np.uint16)
    if kind == "near 448 * 2^k":  # 1.75 * 2^e and its neighbours, where the scale's exponent steps; 1.5 * 2^e for e2m1
        exponent = int(rng.integers(1, 255))
        return (np.maximum(exponent - rng.integers(0, 5, n), 0) << 7 | rng.choice([95, 96, 97, 63, 64, 65], n)).astype(
            np.uint16
        )
    bits = gauss(rng, n, 2.0**-10)
    if kind == "outlier":
        bits[rng.integers(n)] = int(rng.integers(0x4000, 0x7F80))
    elif kind == "non-finite":
        bits[rng.integers(n)] = int(rng.choice(NON_FINITE_BITS))
    return bits


KINDS = ("gauss", "any", "special", "subnormal", "powers", "near 448 * 2^k", "outlier", "non-finite", "small")


@st.composite
def bf16_rows(draw: st.DrawFn, elements: int, group: int) -> Array:
    """Rows in which every scale group has a pattern of its own."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8))
        sizes = [min(group, elements - begin) for begin in range(0, elements, group)]
        parts = [fill(kinds[i % len(kinds)], rng, size) for i, size in enumerate(sizes)]
        rows.append(np.concatenate(parts) | (rng.integers(0, 2, elements) * 0x8000).astype(np.uint16))
    return np.array(rows, np.uint16)


def bits_of(rows: torch.Tensor) -> Array:
    return rows.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("layout", FORMATS, ids=str)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_quantize_and_dequantize_match_the_oracle(layout: KVCacheFormat, data: st.DataObject) -> None:
    bits = data.draw(bf16_rows(layout.elements, layout.elements_per_sf))
    got_data, got_sf = quantize(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), layout)
    want_data, want_sf = oracle.quantize(bits, layout)
    np.testing.assert_array_equal(got_sf.numpy(), want_sf)
    np.testing.assert_array_equal(got_data.numpy(), want_data)
    back = bits_of(dequantize(got_data, got_sf, layout))
    np.testing.assert_array_equal(back, oracle.dequantize(want_data, want_sf, layout))


@pytest.mark.parametrize("layout", FORMATS, ids=str)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_dequantize_defines_every_byte(layout: KVCacheFormat, seed: int) -> None:
    """A load may meet bytes that no store wrote."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (4, layout.data_bytes)).astype(np.uint8)
    sf = rng.integers(0, 256, (4, layout.sf_bytes)).astype(np.uint8)
    if layout.sf_format == "ue8m0":
        sf[0] = rng.choice(np.array([0, 1, 2, 254, 255], np.uint8), layout.sf_bytes)
    back = bits_of(dequantize(torch.from_numpy(data), torch.from_numpy(sf), layout))
    np.testing.assert_array_equal(back, oracle.dequantize(data, sf, layout))


fp32_bits = st.integers(0, 2**32 - 1) | st.builds(
    lambda sign, exponent, mantissa, low: sign << 31 | exponent << 23 | mantissa << 19 | low,
    st.integers(0, 1),
    st.integers(115, 136),  # around every code of both formats
    st.integers(0, 15),
    st.sampled_from([0, 1, (1 << 19) - 1]),  # ties and their neighbours
)


@settings(max_examples=300, deadline=None)
@given(st.lists(fp32_bits, min_size=1, max_size=64))
@example([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x80000000, 0x00000001, 0x3A800000, 0x3A800001])
def test_encoders_and_rounding_of_any_fp32(patterns: list[int]) -> None:
    values = np.array(patterns, np.uint32).view(np.float32)
    tensor = torch.from_numpy(values)
    np.testing.assert_array_equal(encode_e4m3(tensor).numpy(), oracle.cast(values, "e4m3"))
    np.testing.assert_array_equal(bits_of(round_bf16(tensor)), oracle.round_bf16(values))
    number = ~np.isnan(values)
    np.testing.assert_array_equal(encode_e2m1(tensor).numpy()[number], oracle.cast(values[number], "e2m1"))


def test_codes_survive_a_round_trip() -> None:
    codes = torch.arange(256).to(torch.uint8)
    expected = torch.where((codes & 0x7F) == 0x7F, 0x7F, codes)  # the sign of NaN is dropped
    assert torch.equal(encode_e4m3(decode_e4m3(codes)), expected)
    assert torch.equal(encode_e2m1(decode_e2m1(codes[:16])), codes[:16])


def fp32_rows(rng: np.random.Generator, rows: int, elements: int) -> Array:
    """Rows of very different sizes, with a zero row and rows that overflow or hold a NaN."""
    x = (rng.standard_normal((rows, elements)) * 2.0 ** rng.integers(-20, 20, (rows, elements))).astype(np.float32)
    x[0] = 0
    x[1] *= np.float32(2.0**60)
    x[2, rng.integers(elements)] = np.float32(rng.choice([np.nan, np.inf, -np.inf]))
    x[3] *= np.float32(2.0**-130)
    return x


def assert_same_fp32(got: torch.Tensor, want: Array) -> None:
    """Bit for bit, NaN as NaN: which NaN an operation makes is the machine's choice, and rounding to bf16 drops it."""
    numbers = got.numpy()
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(numbers), nan)
    np.testing.assert_array_equal(numbers.view(np.uint32)[~nan], want.view(np.uint32)[~nan])


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), elements=st.sampled_from([1, 3, 64, 96, 100, 128]), bf16_weight=st.booleans())
def test_rms_norm(seed: int, elements: int, bf16_weight: bool) -> None:
    rng = np.random.default_rng(seed)
    x, eps = fp32_rows(rng, 5, elements), float(rng.choice([1e-6, 1e-5, 0.0]))
    weight = rng.standard_normal(elements).astype(np.float32)
    tensor = torch.from_numpy(weight)
    if bf16_weight:
        tensor = tensor.to(torch.bfloat16)
        weight = tensor.float().numpy()
    with np.errstate(all="ignore"):
        want = np.array([slow.rms_norm(list(row), list(weight), eps) for row in x], np.float32)
    assert_same_fp32(rms_norm(torch.from_numpy(x), tensor, eps), want)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rope_dim=st.sampled_from([2, 6, 64]),
    neox=st.booleans(),
    offset=st.sampled_from([None, 0, 3]),
    positions=st.lists(st.sampled_from([0, 1, 6, 7, -1, 2**31 - 1, -(2**31), 2**62]), min_size=5, max_size=5),
    max_position=st.sampled_from([0, 7]),
)
def test_rope(
    seed: int,
    rope_dim: int,
    neox: bool,
    offset: int | None,
    positions: list[int],
    max_position: int,
) -> None:
    rng = np.random.default_rng(seed)
    x = fp32_rows(rng, 5, 70)
    cache = rng.standard_normal((max_position, rope_dim)).astype(np.float32)
    start = 70 - rope_dim if offset is None else offset
    with np.errstate(all="ignore"):
        rows = [slow.rope(list(row), p, cache, rope_dim, neox, start) for row, p in zip(x, positions, strict=True)]
    got = rope(torch.from_numpy(x), RopeArgs(torch.tensor(positions), torch.from_numpy(cache), rope_dim, neox, offset))
    assert_same_fp32(got, np.array(rows, np.float32))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), elements=st.sampled_from([1, 2, 64, 128, 512]))
def test_hadamard(seed: int, elements: int) -> None:
    x = fp32_rows(np.random.default_rng(seed), 4, elements)
    with np.errstate(all="ignore"):
        want = np.array([slow.hadamard(list(row)) for row in x], np.float32)
    assert_same_fp32(hadamard(torch.from_numpy(x)), want)


def test_hadamard_needs_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="96 elements"):
        hadamard(torch.zeros(1, 96))


def test_unspecified_codecs_and_wrong_shapes_are_errors() -> None:
    layout = main("e4m3", 64, 32, "e4m3")
    with pytest.raises(ValueError, match="e4m3 data with e4m3 scales"):
        quantize(torch.zeros(1, 64, dtype=torch.bfloat16), layout)
    layout = main("e4m3", 64, 32, "ue8m0")
    with pytest.raises(ValueError, match="x: has"):
        quantize(torch.zeros(1, 64), layout)
    with pytest.raises(ValueError, match="sf: has"):
        dequantize(torch.zeros(1, 64, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8), layout)
