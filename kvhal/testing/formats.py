"""Record formats that the conformance suite tries beside the built-in ones: those users may define, and odd ones."""

from __future__ import annotations

from kvhal.formats import BUILTIN_FORMATS, KVCacheFormat

#: formats that a user may well define
USER_FORMATS: dict[str, KVCacheFormat] = {
    "MAIN_384": KVCacheFormat("e4m3", 384, 32, 0, True, "ue8m0", "384 elements", token_interleaved=True),
    "MAIN_FP4_256": KVCacheFormat("e2m1", 256, 16, 0, True, "e4m3", "256 elements", token_interleaved=True),
    "MAIN_FP32_64": KVCacheFormat("e4m3", 64, 64, 0, True, "fp32", "one fp32 scale", token_interleaved=True),
}

#: formats made to find assumptions: partial groups, rows on odd addresses, scales that fill no int32, raw interleaved records
ODD_FORMATS: dict[str, KVCacheFormat] = {
    "ODD_INDEX_100": KVCacheFormat("e4m3", 100, 32, 0, False, "ue8m0", "partial last group"),
    "ODD_INDEX_36": KVCacheFormat("e4m3", 36, 16, 0, False, "ue8m0", "three scale bytes"),
    "ODD_MAIN_FP4_50": KVCacheFormat("e2m1", 50, 16, 0, True, "e4m3", "29-byte record", token_interleaved=True),
    "ODD_INDEX_FP32_30": KVCacheFormat("e4m3", 30, 15, 0, False, "fp32", "fp32 scales off 4-byte addresses"),
    "RAW_INTERLEAVED_64": KVCacheFormat("e2m1", 64, 32, 0, False, "ue8m0", "raw, scales behind data", token_interleaved=True),
    "ODD_MAIN_FP4_40": KVCacheFormat("e2m1", 40, 16, 0, True, "e4m3", "a group of one octet last", token_interleaved=True),
    "BF16_48": KVCacheFormat(None, 0, 0, 48, False, None, "a short bf16 record"),
}

#: every format of the suite by name, the built-in ones first
CONFORMANCE_FORMATS: dict[str, KVCacheFormat] = {**BUILTIN_FORMATS, **USER_FORMATS, **ODD_FORMATS}
NAMES: dict[KVCacheFormat, str] = {layout: name for name, layout in CONFORMANCE_FORMATS.items()}
