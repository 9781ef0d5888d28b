"""The records of K and V: by name, as JSON, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvhal.formats import KVCacheFormat, format_to_text
from kvhal.llm import KV_FORMATS, LLMError, parse_kv_format


def test_the_named_ones() -> None:
    layouts = {name: parse_kv_format(name, 384) for name in KV_FORMATS}
    assert {name: layout.bytes_per_token for name, layout in layouts.items()} == {
        "bf16": 768,
        "fp8": 396,
        "fp4": 216,
        "mxfp4": 204,
    }
    assert all(layout.elements == 384 and not layout.is_index for layout in layouts.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp5", "has 'fp5', needs one of bf16, fp8, fp4, mxfp4"),
        ("V41_FORMAT", "has 'V41_FORMAT', needs"),
        ('{"quantized_dtype": "e4m3"}', "missing"),
        ("{", "format has '{'"),
        ("JSON 512", "has 512 elements, this model's K and V need 384"),
        ("JSON raw", "is an index record"),
    ],
)
def test_formats_that_do_not_fit(text: str, message: str) -> None:
    shared = {"quantized_dtype": "e4m3", "elements_per_sf": 32, "bf16_elements": 0, "sf_format": "ue8m0", "note": ""}
    layouts = {
        "JSON 512": KVCacheFormat(quantized_elements=512, do_cast=True, token_interleaved=True, **shared),  # type: ignore[arg-type]
        "JSON raw": KVCacheFormat(quantized_elements=384, do_cast=False, **shared),  # type: ignore[arg-type]
    }
    with pytest.raises(LLMError, match=message):
        parse_kv_format(format_to_text(layouts[text]) if text in layouts else text, 384)


def test_a_format_as_json_is_welcome() -> None:
    layout = KVCacheFormat("e4m3", 384, 128, 0, True, "fp32", "one scale for 128", token_interleaved=True)
    assert parse_kv_format(format_to_text(layout), 384) == layout


def test_the_documents_have_the_measured_tables() -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "perplexity-table"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run scripts/perplexity-table"
