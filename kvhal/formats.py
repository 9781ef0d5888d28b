"""What one token's record holds: the descriptors, the built-in formats, and every numeric constant.

The numbers are the exact specification of the project (docs/numerics.md); codecs and kernels receive them from here.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from typing import Literal

QuantizedDtype = Literal["e4m3", "e2m1"]
ScaleFormat = Literal["ue8m0", "e4m3", "fp32"]

# bf16 bit patterns
BF16_MAGNITUDE = 0x7FFF  #: everything but the sign
BF16_MAX_FINITE = 0x7F7F  #: what +-Inf is quantised as; a larger magnitude is Inf (0x7F80) or NaN (above)
BF16_INF = 0x7F80
BF16_NAN = 0x7FFF  #: the one NaN that a rounding to bf16 writes (NVIDIA's cvt.rn.bf16.f32 gives it for free)

# fp32 bit patterns
FP32_MANTISSA_BITS = 23
FP32_BIAS = 127
FP32_MAGNITUDE = 0x7FFFFFFF
FP32_INF = 0x7F800000  #: a larger magnitude is NaN
BF16_SHIFT = 16  #: a bf16 is the upper half of an fp32
BF16_MANTISSA_BITS = 7

# e4m3fn and e2m1fn
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E2M1_MAX = 6.0
UE8M0_NAN = 0xFF
MINIFLOAT_BITS: dict[str, tuple[int, int]] = {"e4m3": (8, 3), "e2m1": (4, 1)}  #: all bits, and those of the mantissa
MINIFLOAT_BIAS: dict[str, int] = {"e4m3": 7, "e2m1": 1}
MINIFLOAT_MAX_CODE: dict[str, int] = {"e4m3": 0x7E, "e2m1": 0x7}  #: the largest finite value

# ue8m0 scale byte of a bf16 amax with exponent E and mantissa M: max(floor, E - shift + (M > mantissa)).
# It equals ceil(log2(max(amax, 1e-4 or 6*2^-126) / qmax)) + 127, since qmax = 1.75*2^8 (M = 96) or 1.5*2^2 (M = 64).
UE8M0_RULES: dict[str, tuple[int, int, int]] = {"e4m3": (105, 8, 96), "e2m1": (1, 2, 64)}

# e4m3 scale of an e2m1 group: e4m3(min(max(amax, floor) * fp32(1/6), 448))
E4M3_SF_AMAX_FLOOR = 6.0 * 2.0**-9
E4M3_SF_RECIPROCAL = 0.16666667163372040  #: fp32(1/6)
# fp32 scale of an e4m3 group: max(amax, floor) / 448
FP32_SF_AMAX_FLOOR = 9.999999747378752e-05  #: fp32(1e-4)

#: (quantised dtype, scale format) pairs that the numeric specification defines
SPECIFIED_CODECS = frozenset({("e4m3", "ue8m0"), ("e4m3", "fp32"), ("e2m1", "ue8m0"), ("e2m1", "e4m3")})
SF_ITEM_BYTES: dict[str, int] = {"ue8m0": 1, "e4m3": 1, "fp32": 4}
ALIGNMENT = 32  #: bytes; every block starts on a multiple of it


@dataclass(frozen=True)
class KVCacheFormat:
    """One token's record: what is stored, how it is quantised, how its bytes are ordered.

    Args:
        quantized_dtype: "e4m3" (one byte an element), "e2m1" (two elements a byte, even one in the low nibble), or None.
        quantized_elements: logical elements of the record that are quantised; 0 when unquantised.
        elements_per_sf: consecutive elements that share one scale factor; the last group may be shorter.
        bf16_elements: elements kept as bf16; only without quantisation.
        do_cast: a load dequantises to bf16 (main and SWA caches); False leaves data and scales raw (indexer keys).
        sf_format: "ue8m0" (one power-of-two byte), "e4m3" (one byte), "fp32" (four bytes), or None.
        note: free text shown by tools; not part of a format's identity in the cache, but of its equality.
        token_interleaved: a token's scales follow its data; otherwise a block holds all data rows, then all scale rows.

    Raises:
        ValueError: the fields contradict each other; the message names the field and what would be valid.
    """

    quantized_dtype: QuantizedDtype | None
    quantized_elements: int
    elements_per_sf: int
    bf16_elements: int
    do_cast: bool
    sf_format: ScaleFormat | None
    note: str
    token_interleaved: bool = False

    def __post_init__(self) -> None:
        for name in ("quantized_elements", "elements_per_sf", "bf16_elements"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} has {value!r}, needs a non-negative int")
        for name in ("do_cast", "token_interleaved"):  # a text such as "false" is true
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} has {getattr(self, name)!r}, needs True or False")
        if type(self.note) is not str:
            raise ValueError(f"note has {self.note!r}, needs a str")
        if self.quantized_dtype is None:
            self._check_unquantized()
        else:
            self._check_quantized()

    def _check_unquantized(self) -> None:
        if self.quantized_elements or self.elements_per_sf or self.sf_format is not None:
            raise ValueError(
                "an unquantised format has no quantised elements and no scale fields: quantized_elements has "
                f"{self.quantized_elements}, elements_per_sf has {self.elements_per_sf}, sf_format has {self.sf_format!r}; "
                "needs 0, 0 and None"
            )
        if self.bf16_elements == 0:
            raise ValueError("bf16_elements has 0, needs a positive count: the record would be empty")
        if self.do_cast:
            raise ValueError("do_cast has True, needs False: an unquantised record has nothing to dequantise")

    def _check_quantized(self) -> None:
        if self.quantized_dtype not in ("e4m3", "e2m1"):
            raise ValueError(f"quantized_dtype has {self.quantized_dtype!r}, needs 'e4m3', 'e2m1' or None")
        if self.bf16_elements:
            raise ValueError(
                f"bf16_elements has {self.bf16_elements}, needs 0 beside quantised data: mixed records are not supported"
            )
        if self.quantized_elements == 0 or self.elements_per_sf == 0:
            raise ValueError(
                f"quantized_elements has {self.quantized_elements} and elements_per_sf has {self.elements_per_sf}; "
                "a quantised format needs both positive"
            )
        if self.sf_format not in tuple(SF_ITEM_BYTES):  # not of a dict: a list has no hash
            raise ValueError(f"sf_format has {self.sf_format!r}, needs one of {sorted(SF_ITEM_BYTES)}")
        if self.quantized_dtype == "e2m1" and self.quantized_elements % 2:
            raise ValueError(f"quantized_elements has {self.quantized_elements}, e2m1 needs an even count: two share a byte")
        if self.do_cast and not self.token_interleaved:
            raise ValueError("do_cast has True, needs token_interleaved=True: a main record is one contiguous range")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Formats are keys on the path of every call; a generated hash would build a tuple of eight fields each time."""
        return hash(astuple(self))

    def __reduce__(self) -> tuple[type[KVCacheFormat], tuple[object, ...]]:
        return KVCacheFormat, astuple(self)  # without the hash, which differs between processes

    @property
    def quantized_bytes(self) -> int:
        """Bytes of quantised data a token."""
        return self.quantized_elements // 2 if self.quantized_dtype == "e2m1" else self.quantized_elements

    @property
    def num_scales(self) -> int:
        """Scale factors a token; a last, shorter group has its own."""
        return math.ceil(self.quantized_elements / self.elements_per_sf) if self.quantized_dtype else 0

    @property
    def sf_bytes(self) -> int:
        """Bytes of scale factors a token."""
        return self.num_scales * SF_ITEM_BYTES[self.sf_format] if self.sf_format else 0

    @property
    def data_bytes(self) -> int:
        """Bytes of data a token, quantised or bf16, without scales."""
        return self.quantized_bytes + 2 * self.bf16_elements

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a whole record: data, then scales."""
        return self.data_bytes + self.sf_bytes

    @property
    def elements(self) -> int:
        """Logical elements of a record."""
        return self.quantized_elements + self.bf16_elements

    @property
    def is_index(self) -> bool:
        """Loads return raw data and scales (indexer keys) instead of bf16."""
        return self.quantized_dtype is not None and not self.do_cast

    def __str__(self) -> str:
        return FORMAT_NAMES.get(self) or self.describe()

    def describe(self) -> str:
        """A short text such as ``e4m3[512]/32:ue8m0``."""
        if self.quantized_dtype is None:
            return f"bf16[{self.bf16_elements}]"
        flags = ("" if self.do_cast else ",raw") + (",interleaved" if self.token_interleaved and not self.do_cast else "")
        return f"{self.quantized_dtype}[{self.quantized_elements}]/{self.elements_per_sf}:{self.sf_format}{flags}"


V41_FORMAT = KVCacheFormat("e4m3", 512, 32, 0, True, "ue8m0", "main and SWA cache", token_interleaved=True)
V41_FP4_FORMAT = KVCacheFormat("e2m1", 512, 16, 0, True, "e4m3", "FP4 main cache", token_interleaved=True)
FP4_INDEX_KV_FORMAT = KVCacheFormat("e2m1", 128, 32, 0, False, "ue8m0", "indexer keys, FP4")
FP8_FLOAT32_SF_INDEX_KV_FORMAT = KVCacheFormat("e4m3", 128, 128, 0, False, "fp32", "indexer keys, one fp32 scale")
MXFP8_INDEX_KV_FORMAT = KVCacheFormat("e4m3", 128, 32, 0, False, "ue8m0", "indexer keys, MXFP8")
BF16_FORMAT = KVCacheFormat(None, 0, 0, 512, False, None, "plain bf16 record")

SUPPORTED_KV_CACHE_FORMATS: tuple[KVCacheFormat, ...] = (
    V41_FORMAT,
    V41_FP4_FORMAT,
    FP4_INDEX_KV_FORMAT,
    FP8_FLOAT32_SF_INDEX_KV_FORMAT,
    MXFP8_INDEX_KV_FORMAT,
)

BUILTIN_FORMATS: dict[str, KVCacheFormat] = {
    "V41_FORMAT": V41_FORMAT,
    "V41_FP4_FORMAT": V41_FP4_FORMAT,
    "FP4_INDEX_KV_FORMAT": FP4_INDEX_KV_FORMAT,
    "FP8_FLOAT32_SF_INDEX_KV_FORMAT": FP8_FLOAT32_SF_INDEX_KV_FORMAT,
    "MXFP8_INDEX_KV_FORMAT": MXFP8_INDEX_KV_FORMAT,
    "BF16_FORMAT": BF16_FORMAT,
}
FORMAT_NAMES: dict[KVCacheFormat, str] = {layout: name for name, layout in BUILTIN_FORMATS.items()}


def format_to_text(layout: KVCacheFormat) -> str:
    """A built-in format's name, or a JSON object with every field; the text form used by torch.library operations."""
    return FORMAT_NAMES.get(layout) or json.dumps(asdict(layout), sort_keys=True)


def format_from_text(text: str) -> KVCacheFormat:
    """The format that `format_to_text` wrote.

    Raises:
        ValueError: neither a built-in name nor a JSON object of KVCacheFormat's fields.
    """
    if text in BUILTIN_FORMATS:
        return BUILTIN_FORMATS[text]
    try:
        return KVCacheFormat(**json.loads(text))
    except (json.JSONDecodeError, TypeError) as error:
        known = ", ".join(BUILTIN_FORMATS)
        raise ValueError(f"format has {text!r}, needs one of {known}, or a JSON object of its fields ({error})") from error
