"""Descriptors: the byte counts of the built-in formats, refused contradictions, the text form."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

import kvhal
from kvhal import BF16_FORMAT, SUPPORTED_KV_CACHE_FORMATS, V41_FORMAT, KVCacheFormat
from kvhal.formats import BUILTIN_FORMATS, UE8M0_RULES, format_from_text, format_to_text
from kvhal.testing import CONFORMANCE_FORMATS

#: name: (data type, elements, group, scale format, data bytes, scale bytes, interleaved, dequantised on load)
TABLE = {
    "V41_FORMAT": ("e4m3", 512, 32, "ue8m0", 512, 16, True, True),
    "V41_FP4_FORMAT": ("e2m1", 512, 16, "e4m3", 256, 32, True, True),
    "FP4_INDEX_KV_FORMAT": ("e2m1", 128, 32, "ue8m0", 64, 4, False, False),
    "FP8_FLOAT32_SF_INDEX_KV_FORMAT": ("e4m3", 128, 128, "fp32", 128, 4, False, False),
    "MXFP8_INDEX_KV_FORMAT": ("e4m3", 128, 32, "ue8m0", 128, 4, False, False),
}


@pytest.mark.parametrize("name", TABLE)
def test_built_in_formats(name: str) -> None:
    layout, (dtype, elements, group, scale, data, sf, interleaved, cast) = getattr(kvhal, name), TABLE[name]
    assert (layout.quantized_dtype, layout.elements, layout.elements_per_sf, layout.sf_format) == (
        dtype,
        elements,
        group,
        scale,
    )
    assert (layout.quantized_bytes, layout.sf_bytes, layout.bytes_per_token) == (data, sf, data + sf)
    assert (layout.token_interleaved, layout.do_cast, layout.is_index) == (interleaved, cast, not cast)
    assert layout.num_scales == elements // group
    assert str(layout) == name


def test_the_supported_formats_are_these_five() -> None:
    assert [str(layout) for layout in SUPPORTED_KV_CACHE_FORMATS] == list(TABLE)


def test_bf16_records() -> None:
    assert (BF16_FORMAT.elements, BF16_FORMAT.bytes_per_token, BF16_FORMAT.num_scales) == (512, 1024, 0)
    assert (BF16_FORMAT.sf_bytes, BF16_FORMAT.quantized_bytes, BF16_FORMAT.is_index) == (0, 0, False)


def test_a_partial_group_has_a_scale_of_its_own() -> None:
    layout = KVCacheFormat("e4m3", 100, 32, 0, False, "ue8m0", "")
    assert (layout.num_scales, layout.bytes_per_token) == (4, 104)
    assert KVCacheFormat("e4m3", 10, 100, 0, False, "fp32", "").num_scales == 1


GOOD: dict[str, Any] = {
    "quantized_dtype": "e4m3",
    "quantized_elements": 64,
    "elements_per_sf": 32,
    "bf16_elements": 0,
    "do_cast": True,
    "sf_format": "ue8m0",
    "note": "",
    "token_interleaved": True,
}
PLAIN: dict[str, Any] = {
    **GOOD, "quantized_dtype": None, "quantized_elements": 0, "elements_per_sf": 0, "bf16_elements": 64, "do_cast": False,
    "sf_format": None, "token_interleaved": False,
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"quantized_dtype": "e5m2"}, "quantized_dtype has 'e5m2', needs 'e4m3', 'e2m1' or None"),
    "mixed": ({"bf16_elements": 64}, "mixed records are not supported"),
    "no-elements": ({"quantized_elements": 0}, "a quantised format needs both positive"),
    "no-group": ({"elements_per_sf": 0}, "a quantised format needs both positive"),
    "negative": ({"quantized_elements": -64}, "quantized_elements has -64, needs a non-negative int"),
    "float": ({"elements_per_sf": 32.0}, "elements_per_sf has 32.0, needs a non-negative int"),
    "bool": ({"bf16_elements": False}, "bf16_elements has False, needs a non-negative int"),
    "cast-text": ({"do_cast": "false"}, "do_cast has 'false', needs True or False"),
    "cast-int": ({"do_cast": 1}, "do_cast has 1, needs True or False"),
    "interleaved-text": ({"token_interleaved": "no"}, "token_interleaved has 'no', needs True or False"),
    "note": ({"note": []}, "note has [], needs a str"),
    "no-note": ({"note": None}, "note has None, needs a str"),
    "dtype-list": ({"quantized_dtype": ["e4m3"]}, "quantized_dtype has ['e4m3'], needs 'e4m3', 'e2m1' or None"),
    "scale-list": ({"sf_format": ["fp32"]}, "sf_format has ['fp32'], needs one of"),
    "no-scale-list": ({"sf_format": []}, "sf_format has [], needs one of"),
    "plain-scale-list": ({**PLAIN, "sf_format": []}, "sf_format has []"),
    "scale": ({"sf_format": "fp16"}, "sf_format has 'fp16', needs one of"),
    "no-scale": ({"sf_format": None}, "sf_format has None, needs one of"),
    "odd-e2m1": ({"quantized_dtype": "e2m1", "quantized_elements": 63}, "quantized_elements has 63, e2m1 needs an even count"),
    "cast": ({"token_interleaved": False}, "do_cast has True, needs token_interleaved=True"),
    "plain-elements": (
        {**PLAIN, "quantized_elements": 64},
        "an unquantised format has no quantised elements and no scale fields",
    ),
    "plain-group": ({**PLAIN, "elements_per_sf": 32}, "elements_per_sf has 32"),
    "plain-scale": ({**PLAIN, "sf_format": "fp32"}, "sf_format has 'fp32'"),
    "plain-empty": ({**PLAIN, "bf16_elements": 0}, "the record would be empty"),
    "plain-cast": ({**PLAIN, "do_cast": True, "token_interleaved": True}, "an unquantised record has nothing to dequantise"),
}


def test_the_starting_points_are_valid() -> None:
    assert KVCacheFormat(**GOOD).bytes_per_token == 66
    assert KVCacheFormat(**PLAIN).bytes_per_token == 128


@pytest.mark.parametrize("what", REFUSED)
def test_contradictions_are_refused(what: str) -> None:
    changes, message = REFUSED[what]
    with pytest.raises(ValueError) as raised:
        KVCacheFormat(**{**GOOD, **changes})
    assert message in str(raised.value)


@pytest.mark.parametrize("name", CONFORMANCE_FORMATS)
def test_text_and_pickle_give_the_format_back(name: str) -> None:
    layout = CONFORMANCE_FORMATS[name]
    text = format_to_text(layout)
    assert format_from_text(text) == layout
    assert text == name or json.loads(text)["quantized_elements"] == layout.quantized_elements
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert hash(pickle.loads(pickle.dumps(layout))) == hash(layout)


@pytest.mark.parametrize("text", ["V42_FORMAT", "", "{}", '{"quantized_dtype": "e4m3"}', "[1]", '{"colour": 1}', "null"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"format has .*, needs one of V41_FORMAT"):
        format_from_text(text)


def test_formats_are_values() -> None:
    assert replace(V41_FORMAT) == V41_FORMAT and hash(replace(V41_FORMAT)) == hash(V41_FORMAT)
    assert replace(V41_FORMAT, note="other") != V41_FORMAT
    assert len({*BUILTIN_FORMATS.values(), replace(V41_FORMAT)}) == len(BUILTIN_FORMATS)
    with pytest.raises(FrozenInstanceError):
        V41_FORMAT.note = "changed"  # type: ignore[misc]


def test_the_integer_rule_of_ue8m0_is_the_logarithm() -> None:
    """Every finite bf16 magnitude against the definition, in exact rational arithmetic."""
    from fractions import Fraction

    limits = {"e4m3": (Fraction(448), Fraction(1, 10**4)), "e2m1": (Fraction(6), Fraction(6, 2**126))}
    for dtype, (largest, floor) in limits.items():
        least, shift, mantissa = UE8M0_RULES[dtype]
        for bits in range(0x7F80):
            exponent, fraction = bits >> 7, bits & 127
            value = (
                Fraction(fraction, 2**133) if exponent == 0 else Fraction(128 + fraction, 128) * Fraction(2) ** (exponent - 127)
            )
            byte = max(least, exponent - shift + (fraction > mantissa))
            ratio = max(value, floor) / largest
            assert Fraction(2) ** (byte - 127) >= ratio > Fraction(2) ** (byte - 128), (dtype, hex(bits))
