"""What a kernel has to know about a record: every number of a format and its geometry as one compile-time constant."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvhal.formats import ALIGNMENT, BF16_MANTISSA_BITS, SF_ITEM_BYTES, UE8M0_RULES, KVCacheFormat
from kvhal.layout import cache_geometry
from kvhal.platform import Platform

#: (platform kind, architecture) pairs on which tests/triton/test_gpu.py found the hardware casts identical to the
#: integer codec for every input; anything else runs the integers
PROVEN_NATIVE = frozenset({("cuda", "sm_90")})

#: elements of a record, padded, that one program can hold in registers without spilling everything
MAX_TILE_ELEMENTS = 16384
#: a packed e2m1 word holds this many codes, so a group's tile is never narrower
E2M1_WORD = 8


def power_of_two(count: int) -> int:
    """The smallest power of two >= count."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class Record:
    """Constants of a record for the kernels; a tile holds `groups` x `group` elements, padded to powers of two.

    Attributes:
        dtype, sf_format: as in KVCacheFormat; "bf16" when unquantised.
        elements, elements_per_sf, num_scales: of the format; one scale group, without a scale, when unquantised.
        groups, group: num_scales and elements_per_sf padded to powers of two.
        dense: the tile has no padding.
        data_bytes, sf_item: bytes of data a token, bytes of one scale factor.
        block_size, token_stride, sf_offset, sf_stride: where records lie in a block, in bytes (kvhal.layout).
        block_unit: bytes that a block stride is counted in.
        words: e2m1 data can be accessed as aligned int32 words; sf_aligned: single scales lie on aligned addresses;
            sf_words: a record's scales can be accessed as aligned int32 words.
        sf_floor, sf_shift, sf_carry: the ue8m0 rule of the data type; a mantissa above its limit plus sf_carry overflows.
        native: the architecture's own casts are proven identical to the integer codec.
        ptx: instructions may be written in PTX: an NVIDIA device, not the interpreter.
        narrow: e4m3 codes are written eight bytes a lane, so that a lane holds as many elements as of cos and sin.
        pairs: elements are quantised two a register (see packed).
        guarded: a program looks for numbers that are rare and need more steps, and leaves those out where there is none; in a
            program of one token the looking takes longer than the steps.
    """

    dtype: str
    sf_format: str
    elements: int
    elements_per_sf: int
    num_scales: int
    groups: int
    group: int
    dense: bool
    data_bytes: int
    sf_item: int
    block_size: int
    token_stride: int
    sf_offset: int
    sf_stride: int
    block_unit: int
    words: bool
    sf_aligned: bool
    sf_words: bool
    sf_floor: int
    sf_shift: int
    sf_carry: int
    native: bool
    ptx: bool
    narrow: bool = False
    pairs: bool = False
    guarded: bool = True

    @property
    def tile(self) -> int:
        """Elements of a tile row."""
        return self.groups * self.group

    @property
    def sf_bytes(self) -> int:
        """Bytes of scale factors a token."""
        return self.num_scales * self.sf_item

    @property
    def levels(self) -> int:
        """Halvings from a tile row to one element."""
        return self.tile.bit_length() - 1


def record_of(layout: KVCacheFormat, block_size: int, platform: Platform) -> Record:
    """The constants of `layout` in blocks of `block_size` tokens, for kernels on `platform`."""
    geometry = cache_geometry(layout, block_size)
    dtype = layout.quantized_dtype or "bf16"
    per_sf = min(layout.elements_per_sf, layout.elements) if layout.quantized_dtype else layout.elements
    count = layout.num_scales or 1
    groups, group = _padded(layout)
    floor, shift, mantissa = UE8M0_RULES.get(dtype, (0, 0, 0))
    whole_words = per_sf % E2M1_WORD == 0 and layout.elements % E2M1_WORD == 0
    sf_item = SF_ITEM_BYTES.get(str(layout.sf_format), 1)
    return Record(
        dtype=dtype,
        sf_format=layout.sf_format or "",
        elements=layout.elements,
        elements_per_sf=per_sf,
        num_scales=count,
        groups=groups,
        group=group,
        dense=groups * group == layout.elements and group == per_sf,
        data_bytes=layout.data_bytes,
        sf_item=sf_item,
        block_size=block_size,
        token_stride=geometry.data_token_stride,
        sf_offset=geometry.sf_offset,
        sf_stride=geometry.sf_token_stride,
        block_unit=ALIGNMENT,
        words=dtype == "e2m1" and whole_words and geometry.token_alignment % 4 == 0,
        sf_aligned=geometry.sf_offset % sf_item == 0 and geometry.sf_token_stride % sf_item == 0,
        sf_words=layout.sf_bytes % 4 == 0 and geometry.sf_offset % 4 == 0 and geometry.sf_token_stride % 4 == 0,
        sf_floor=floor,
        sf_shift=shift,
        sf_carry=(1 << BF16_MANTISSA_BITS) - 1 - mantissa,
        native=(platform.kind, platform.arch) in PROVEN_NATIVE and not platform.interpreted,
        ptx=platform.kind == "cuda" and not platform.interpreted,
    )


def by_pairs(record: Record) -> Record:
    """The record as kernels see it that quantise pairs, where lanes that hold octets can make and write whole words of it."""
    whole = record.dense and record.group % 8 == 0 and record.tile % 128 == 0
    if record.dtype == "e4m3":
        pairs = whole and record.token_stride % 4 == 0
    else:
        pairs = whole and record.words and record.groups > 1
    return replace(record, pairs=record.native and pairs)


def whole_octets(rows: torch.Tensor) -> bool:
    """Every row starts on 16 bytes: kernels that quantise pairs run out of registers where lanes read octets in pieces."""
    return rows.data_ptr() % 16 == 0 and rows.stride(0) % 8 == 0


def tile_elements(layout: KVCacheFormat) -> int:
    """Elements of a padded tile row, without building the constants (a manifest asks)."""
    groups, group = _padded(layout)
    return groups * group


def ragged(layout: KVCacheFormat) -> bool:
    """A tile row holds padding between groups, so that its columns are not the record's elements in order."""
    return layout.num_scales > 1 and _padded(layout)[1] != layout.elements_per_sf


def _padded(layout: KVCacheFormat) -> tuple[int, int]:
    if layout.quantized_dtype is None:
        return 1, power_of_two(layout.elements)
    group = power_of_two(min(layout.elements_per_sf, layout.elements))
    return power_of_two(layout.num_scales), max(group, E2M1_WORD) if layout.quantized_dtype == "e2m1" else group
