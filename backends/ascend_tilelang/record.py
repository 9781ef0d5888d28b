"""What the kernels know about a record at compile time, and the views of a cache that they take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvhal.formats import SF_ITEM_BYTES, KVCacheFormat
from kvhal.layout import cache_geometry, geometry_of

WORD = 4  #: bytes of the widest unit in which a record is addressed; the compiler pairs units up itself


@dataclass(frozen=True)
class Record:
    """Constants of a quantised record.

    Attributes:
        dtype, sf_format: as in KVCacheFormat; "bf16" and "" when unquantised.
        elements: elements of a record.
        group, groups: elements that share a scale factor, and scale factors a record.
        unit: bytes in which data is addressed, 4 where every group starts on a multiple of 4, else 1.
        data_units, sf_bytes: length of the data in units, of the scales in bytes.
        data_stride, sf_stride: from one token to the next, data in units, scales in bytes.
    """

    dtype: str
    sf_format: str
    elements: int
    group: int
    groups: int
    unit: int
    data_units: int
    sf_bytes: int
    data_stride: int
    sf_stride: int

    @property
    def ragged(self) -> bool:
        """The last group is shorter."""
        return self.elements % self.group != 0

    @property
    def unit_type(self) -> str:
        """Element type of the data view."""
        return {1: "uint8", 2: "int16", WORD: "int32"}[self.unit]

    @property
    def transformable(self) -> bool:
        """The record can take a Hadamard transform."""
        return self.elements & (self.elements - 1) == 0

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 4 if self.dtype == "e2m1" else 8

    @property
    def per_unit(self) -> int:
        """Elements of one unit of data."""
        return self.unit * 8 // self.bits

    @property
    def group_units(self) -> int:
        """Units of data of one full group."""
        return self.group // self.per_unit

    @property
    def paired(self) -> bool:
        """Every group's data starts on, and is, a multiple of 8 bytes."""
        return self.unit == WORD and not self.ragged and self.group_units % 2 == 0 and self.data_stride % 2 == 0

    @property
    def sf_item(self) -> int:
        """Bytes of one scale factor."""
        return SF_ITEM_BYTES[self.sf_format]


@lru_cache(maxsize=256)
def record_of(layout: KVCacheFormat) -> Record:
    """The constants of a quantised layout; the same object for the same layout."""
    geometry = cache_geometry(layout, 1)
    group = min(layout.elements_per_sf, layout.elements)
    bits = 4 if layout.quantized_dtype == "e2m1" else 8
    steps = (layout.data_bytes, geometry.data_token_stride, *([group * bits // 8] if layout.num_scales > 1 else []))
    unit = WORD if math.gcd(*steps) % WORD == 0 else 1
    return Record(
        dtype=str(layout.quantized_dtype),
        sf_format=str(layout.sf_format),
        elements=layout.elements,
        group=group,
        groups=layout.num_scales,
        unit=unit,
        data_units=layout.data_bytes // unit,
        sf_bytes=layout.sf_bytes,
        data_stride=geometry.data_token_stride // unit,
        sf_stride=geometry.sf_token_stride,
    )


def fused_record_of(layout: KVCacheFormat) -> Record:
    """The constants for a fused store, which also takes unquantised records: halves, in groups of up to 32 for the lanes."""
    if layout.quantized_dtype is not None:
        return record_of(layout)
    group = math.gcd(layout.elements, 32)
    return Record(
        dtype="bf16",
        sf_format="",
        elements=layout.elements,
        group=group,
        groups=layout.elements // group,
        unit=2,
        data_units=layout.elements,
        sf_bytes=0,
        data_stride=layout.elements,
        sf_stride=2 * layout.elements,
    )


def record_views(cache: torch.Tensor, layout: KVCacheFormat, unit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Data `[num_blocks, block_size, units]` (int32 or uint8) and scales `[num_blocks, block_size, sf_bytes]` (uint8).

    Each view addresses the bytes of its part and nothing else.
    """
    geometry = geometry_of(cache, layout)
    blocks, tokens, base = cache.shape[0], cache.shape[1], cache.storage_offset()
    step, data_step = geometry.block_stride, geometry.data_token_stride
    sf = cache.as_strided((blocks, tokens, layout.sf_bytes), (step, geometry.sf_token_stride, 1), base + geometry.sf_offset)
    if unit == 1:
        return cache.as_strided((blocks, tokens, layout.data_bytes), (step, data_step, 1)), sf
    used = (tokens - 1) * data_step + layout.data_bytes
    words = cache.as_strided((blocks, used), (step, 1)).view(torch.int32)
    shape = (blocks, tokens, layout.data_bytes // WORD)
    return words.as_strided(shape, (step // WORD, data_step // WORD, 1)), sf


def slot_words(slots: torch.Tensor) -> torch.Tensor:
    """int32 or int64 slots as int32 words: one or two (low first) a slot, so that one kernel takes both."""
    return slots if slots.dtype == torch.int32 else slots.view(torch.int32)


def row_words(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, bool]:
    """bf16 rows as the kernels take them, and whether they are wide.

    Wide: int32 `[n, elements / 2]`, where every group of `group` elements starts on a multiple of 8 bytes, so that
    accesses may be 8 bytes wide. Otherwise int16 `[n, elements]`.
    """
    # The offset counts beside the address: torch refuses to view a tensor whose storage is itself unaligned.
    steps = (rows.data_ptr(), rows.storage_offset() * 2, rows.shape[1] * 2, group * 2, rows.stride(0) * 2)
    if math.gcd(*steps) % 8 == 0:
        return rows.view(torch.int32), True
    return rows.view(torch.int16), False


def unit_rows(*rows: torch.Tensor) -> tuple[str, list[torch.Tensor]]:
    """Tensors of any dtypes with contiguous rows as plain units for copying, and the unit's type.

    int32 where every row of every tensor is a whole number of aligned words, else uint8.
    """
    sizes = [t.data_ptr() for t in rows]
    for t in rows:
        sizes += [int(n) * t.element_size() for n in (t.storage_offset(), t.shape[-1], *t.stride()[:-1])]
    unit = "int32" if math.gcd(*sizes) % WORD == 0 else "uint8"
    return unit, [t.view(torch.int32 if unit == "int32" else torch.uint8) for t in rows]


def raw_load_views(
    cache: torch.Tensor, layout: KVCacheFormat, out: torch.Tensor, out_sf: torch.Tensor | None
) -> tuple[str, list[torch.Tensor]]:
    """Data, scales, output rows and output scales of a raw load as units; scales are zero wide when there are none."""
    if out_sf is None:
        unit, (data, rows) = unit_rows(cache[:, :, 0], out)
        return unit, [data, data[:, :, :0], rows, rows[:, :0]]
    data, sf = record_views(cache, layout, 1)
    unit, (data, sf, rows, sf_rows) = unit_rows(data, sf, out, out_sf.unsqueeze(1) if out_sf.dim() == 1 else out_sf)
    return unit, [data, sf, rows, sf_rows]
