"""The codecs as CUDA device functions on registers, specialised by a record format when a kernel is built.

Every thread works on octets: 8 consecutive elements, 16 bytes of bf16. `Octets` says how a record's octets lie on a warp's
lanes; `source` gives the functions that a kernel's prelude needs. They are exact (docs/numerics.md): integers on bit
patterns, and single fp32 operations; `build.PASS_CONFIGS` keeps nvcc from contracting those.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from kvhal.backends.cuda_tilelang.codec_cuda import DECODE, FLOATS, GROUPS, MEMORY, ROWS
from kvhal.backends.cuda_tilelang.quantize_cuda import ENCODE, FACTORS, QUANTIZE, REDUCE, SCALES
from kvhal.formats import (
    ALIGNMENT,
    BF16_INF,
    BF16_MAGNITUDE,
    BF16_MANTISSA_BITS,
    BF16_SHIFT,
    E2M1_MAX,
    E4M3_MAX,
    E4M3_NAN,
    E4M3_SF_AMAX_FLOOR,
    E4M3_SF_RECIPROCAL,
    FP32_SF_AMAX_FLOOR,
    SF_ITEM_BYTES,
    UE8M0_NAN,
    UE8M0_RULES,
    KVCacheFormat,
)
from kvhal.layout import CacheGeometry

OCTET = 8  #: elements a thread holds side by side
OCTET_WORDS = OCTET // 2  #: 32-bit registers of an octet of bf16
WARP = 32


@dataclass(frozen=True)
class Octets:
    """How the octets of a record lie on lanes: of a warp, or of two where a kernel says so.

    Attributes:
        count: octets of a record.
        lanes: lanes that share one token, a power of two; more than a warp's only in kernels that say so.
        rounds: octets of one token that a lane holds; octet ``round * lanes + lane``.
        group: octets that share a scale factor.
        data_bytes: bytes of an octet's quantised data.
    """

    count: int
    lanes: int
    rounds: int
    group: int
    data_bytes: int

    @classmethod
    def of(cls, layout: KVCacheFormat, rounds: int = 2) -> Octets:
        """`rounds` octets a lane, a power of two, but where a record has fewer, or more than so many of a warp's lanes."""
        count = layout.elements // OCTET
        lanes = min(WARP, 1 << (-(-count // rounds) - 1).bit_length())
        group = layout.elements_per_sf // OCTET if layout.quantized_dtype else 1
        return cls(count, lanes, -(-count // lanes), group, layout.data_bytes // count)

    @property
    def data_words(self) -> int:
        """32-bit registers of an octet's quantised data."""
        return self.data_bytes // 4

    @property
    def padded(self) -> bool:
        """Some lanes have no octet in the last round."""
        return self.count != self.lanes * self.rounds

    @property
    def tokens_a_warp(self) -> int:
        """Tokens that one round of a warp covers."""
        return WARP // self.lanes


def source(geometry: CacheGeometry, row_alignment: int, octets: Octets | None = None) -> str:
    """The prelude of a kernel: constants of the format, then the functions that it can call, in namespace ``kv``.

    Args:
        geometry: where the records lie; the host has checked that a cache's base and block stride are aligned.
        row_alignment: bytes that divide every bf16 row's address and stride.
        octets: how they lie, where it is not as `Octets.of` says.
    """
    layout, octets = geometry.layout, octets or Octets.of(geometry.layout)
    functions = [GROUPS, MEMORY, FLOATS]
    if layout.quantized_dtype is not None:
        functions += [
            REDUCE,
            FACTORS[layout.quantized_dtype],
            SCALES[str(layout.sf_format)],
            DECODE[str(layout.quantized_dtype)],
            ENCODE[layout.quantized_dtype],
        ]
        functions += [ROWS, QUANTIZE]
    return "namespace kv {\n" + _constants(geometry, octets, row_alignment) + "".join(functions) + "}  // namespace kv\n"


def _bf16(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little") >> BF16_SHIFT


def _constants(geometry: CacheGeometry, octets: Octets, row_alignment: int) -> str:
    layout = geometry.layout
    sf_bytes = SF_ITEM_BYTES.get(str(layout.sf_format), 1)
    floor, shift, mantissa = UE8M0_RULES.get(str(layout.quantized_dtype), (0, 0, 0))
    integers = {
        "OCTETS": octets.count,
        "ROUNDS": octets.rounds,
        "LANES": octets.lanes,
        "GROUP": octets.group,
        "DATA_BYTES": octets.data_bytes,
        "CACHE_ALIGN": min(geometry.token_alignment, octets.data_bytes),
        "ROW_ALIGN": row_alignment,
        "SF_BYTES": sf_bytes,
        "SF_ALIGN": math.gcd(ALIGNMENT, geometry.sf_offset, geometry.sf_token_stride, sf_bytes),
        "MAGNITUDE": BF16_MAGNITUDE,
        "INF": BF16_INF,
        "COVERED": _bf16(E2M1_MAX * E4M3_MAX),  # by the largest e4m3 scale
        # the largest magnitudes between which one of the two least e4m3 scales may leave a magnitude of 7, which rounds to 8
        "UNCOVERED_FROM": _bf16(7 * 2.0**-9),
        "UNCOVERED_TO": _bf16(2.5 * E2M1_MAX * 2.0**-9),
        "MANTISSA_BITS": BF16_MANTISSA_BITS,
        "UE8M0_FLOOR": floor,
        "UE8M0_SHIFT": shift,
        "UE8M0_CARRY": (1 << BF16_MANTISSA_BITS) - 1 - mantissa,  # added to an amax, it carries where M > mantissa
        "SF_NAN": UE8M0_NAN if layout.sf_format == "ue8m0" else E4M3_NAN,
        "QUANTIZED": int(layout.quantized_dtype is not None),
        "POWER_OF_TWO": int(layout.sf_format == "ue8m0"),
        "HOLDS_NAN": int(layout.quantized_dtype == "e4m3"),
    }
    floats = {
        "E4M3_LARGEST": E4M3_MAX,
        "E4M3_SF_FLOOR": E4M3_SF_AMAX_FLOOR,
        "E4M3_SF_RECIPROCAL": E4M3_SF_RECIPROCAL,
        "FP32_SF_FLOOR": FP32_SF_AMAX_FLOOR,
    }
    lines = ["typedef unsigned int u32;", "typedef unsigned short u16;", "typedef unsigned char u8;"]
    lines += [f"constexpr int {name} = {value};" for name, value in integers.items()]
    lines += [f"constexpr float {name} = {value.hex()}f;" for name, value in floats.items()]
    return "\n".join(lines) + "\n"
