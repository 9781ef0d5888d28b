"""The records a model's K and V are kept in: a few by name, any other as a JSON object of KVCacheFormat's fields."""

from __future__ import annotations

from collections.abc import Callable

from kvhal.formats import KVCacheFormat, QuantizedDtype, ScaleFormat, format_from_text
from kvhal.llm.errors import LLMError

RecordMaker = Callable[[int], KVCacheFormat]


def _quantized(dtype: QuantizedDtype, group: int, scale: ScaleFormat, note: str) -> RecordMaker:
    return lambda elements: KVCacheFormat(dtype, elements, group, 0, True, scale, note, token_interleaved=True)


#: name -> the record of that many elements
KV_FORMATS: dict[str, RecordMaker] = {
    "bf16": lambda elements: KVCacheFormat(None, 0, 0, elements, False, None, "K and V, bf16"),
    "fp8": _quantized("e4m3", 32, "ue8m0", "K and V, FP8"),
    "fp4": _quantized("e2m1", 16, "e4m3", "K and V, FP4 with e4m3 scales"),
    "mxfp4": _quantized("e2m1", 32, "ue8m0", "K and V, MXFP4"),
}


def parse_kv_format(text: str, elements: int) -> KVCacheFormat:
    """The record called `text` for `elements` elements a token.

    Args:
        text: a key of KV_FORMATS, or a JSON object of KVCacheFormat's fields.
        elements: K and V elements of one token of one layer.

    Raises:
        LLMError: unknown, contradictory, of another width, or a record that loads do not dequantise.
    """
    if text in KV_FORMATS:
        return KV_FORMATS[text](elements)
    if not text.lstrip().startswith("{"):
        known = ", ".join(KV_FORMATS)
        raise LLMError(f"kv format: has {text!r}, needs one of {known}, or a JSON object of KVCacheFormat's fields")
    try:
        layout = format_from_text(text)
    except ValueError as error:
        raise LLMError(f"kv format: {error}") from None
    if layout.elements != elements:
        raise LLMError(f"kv format: {text} has {layout.elements} elements, this model's K and V need {elements}")
    if layout.is_index:
        raise LLMError(f"kv format: {text} is an index record (do_cast false), needs one that a load dequantises")
    return layout
