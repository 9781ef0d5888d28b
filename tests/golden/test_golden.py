"""`kvhal.numerics` against tables of an independent implementation; see README.md; never regenerate them."""

import pathlib

import numpy as np
import pytest
import torch

from kvhal.formats import BF16_FORMAT, BUILTIN_FORMATS, SUPPORTED_KV_CACHE_FORMATS, KVCacheFormat
from kvhal.numerics import amax_bits, dequantize, encode_e2m1, encode_e4m3, quantize, ue8m0_exponent, widen

FOLDER = pathlib.Path(__file__).parent


def table(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return {key: arrays[key] for key in arrays}


def is_nan(bits: np.ndarray) -> np.ndarray:
    return (bits & 0x7FFF) > 0x7F80


def bf16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def bits_of(rows: torch.Tensor) -> np.ndarray:
    return rows.view(torch.int16).numpy().view(np.uint16)


def test_every_quantised_built_in_format_has_a_table() -> None:
    quantised = {name for name, layout in BUILTIN_FORMATS.items() if layout != BF16_FORMAT}
    assert {path.stem for path in FOLDER.glob("*.npz")} == quantised | {"scalars"}
    assert len(quantised) == len(SUPPORTED_KV_CACHE_FORMATS)


@pytest.mark.parametrize("layout", SUPPORTED_KV_CACHE_FORMATS, ids=str)
def test_quantize_writes_the_table_bytes(layout: KVCacheFormat) -> None:
    expected = table(str(layout))
    data, sf = quantize(bf16(expected["x"]), layout)
    np.testing.assert_array_equal(data.numpy(), expected["data"])
    np.testing.assert_array_equal(sf.numpy(), expected["sf"])


@pytest.mark.parametrize("layout", SUPPORTED_KV_CACHE_FORMATS, ids=str)
def test_dequantize_gives_the_table_rows(layout: KVCacheFormat) -> None:
    expected = table(str(layout))
    back = bits_of(dequantize(torch.from_numpy(expected["data"]), torch.from_numpy(expected["sf"]), layout))
    nan = is_nan(expected["back"])
    np.testing.assert_array_equal(is_nan(back), nan)
    np.testing.assert_array_equal(back[~nan], expected["back"][~nan])
    assert nan.any(), "a table without NaN checks less than it says"
    assert (back[nan] == 0x7FFF).all(), "rounding to bf16 has one NaN"


@pytest.mark.parametrize("dtype", ["e4m3", "e2m1"])
def test_ue8m0_of_every_finite_amax(dtype: str) -> None:
    scalars = table("scalars")
    assert scalars["amax_bits"].size == 0x7F80
    exponent = ue8m0_exponent(torch.from_numpy(scalars["amax_bits"].astype(np.int32)), dtype)  # type: ignore[arg-type]
    np.testing.assert_array_equal(exponent.numpy(), scalars[f"ue8m0_{dtype}"])


@pytest.mark.parametrize("dtype", ["e4m3", "e2m1"])
def test_code_of_every_bf16(dtype: str) -> None:
    scalars = table("scalars")
    bits = scalars["bf16_bits"]
    assert np.unique(bits).size == 1 << 16
    code = {"e4m3": encode_e4m3, "e2m1": encode_e2m1}[dtype](widen(bf16(bits))).numpy()
    meaningful = ~is_nan(bits) if dtype == "e2m1" else np.ones(bits.shape, bool)
    np.testing.assert_array_equal(code[meaningful], scalars[dtype][meaningful])


def test_amax_of_every_single_bf16() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    magnitude = (bits & 0x7FFF).astype(np.int32)
    expected = np.where(is_nan(bits), 0, np.minimum(magnitude, 0x7F7F))
    np.testing.assert_array_equal(amax_bits(torch.from_numpy(bits.view(np.int16)).unsqueeze(1)).numpy(), expected)
