"""Records in and out of a paged cache, by slot: the only place of this backend that addresses cache bytes.

Both directions index the cache's whole storage as one flat tensor of words with 64-bit offsets. The plain form,
``cache[block, offset] = values``, is wrong on Ascend for caches over 2 GB: the device's IndexPutV2 adds up the offsets
of several indexed dimensions in 32 bits. Every device takes the flat path, so that what is tested is what ships.

Nothing here depends on a metadata value on the host: skipped tokens are redirected, not filtered, so a call can be
captured into a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvhal.backends.reference_torch.codec import row_chunks
from kvhal.formats import KVCacheFormat
from kvhal.layout import CacheGeometry, geometry_of

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Part:
    """The data or the scales of every record: byte ``j`` of a slot's row lies at base + block * block_stride +
    offset * token_stride + j. All four numbers, in words of `flat`, are multiples of its word."""

    flat: Tensor
    base: int
    block_stride: int
    token_stride: int
    width: int
    block_size: int

    def offsets(self, slots: Tensor) -> Tensor:
        """Word offsets int64 ``[n, width]`` of the rows of valid int64 slots ``[n]``."""
        block = torch.div(slots, self.block_size, rounding_mode="floor")
        start = block * self.block_stride + (slots - block * self.block_size) * self.token_stride + self.base
        return start.unsqueeze(1) + torch.arange(self.width, device=slots.device)

    def read(self, slots: Tensor) -> Tensor:
        """uint8 ``[n, bytes]`` rows of valid int64 slots ``[n]``."""
        return self.flat[self.offsets(slots)].view(torch.uint8)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Writes uint8 ``[n, bytes]`` to valid int64 slots ``[n]``."""
        self.flat.index_put_((self.offsets(slots),), rows.contiguous().view(self.flat.dtype))


def _part(cache: Tensor, geometry: CacheGeometry, offset: int, token_stride: int, width: int) -> _Part:
    base = cache.storage_offset() * cache.element_size() + offset
    word = math.gcd(max(_WORDS), base, geometry.block_stride, token_stride, width)
    words = cache.untyped_storage().nbytes() // word
    raw = cache.view(torch.uint8).as_strided((words * word,), (1,), 0)
    steps = (base // word, geometry.block_stride // word, token_stride // word, width // word)
    return _Part(raw.view(_WORDS[word]), *steps, geometry.block_size)


def _parts(cache: Tensor, layout: KVCacheFormat) -> tuple[_Part, ...]:
    """The data of every record, and its scales where it has any."""
    geometry = geometry_of(cache, layout)
    data = _part(cache, geometry, 0, geometry.data_token_stride, layout.data_bytes)
    if layout.sf_bytes == 0:
        return (data,)
    return data, _part(cache, geometry, geometry.sf_offset, geometry.sf_token_stride, layout.sf_bytes)


def gather_records(cache: Tensor, layout: KVCacheFormat, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The bytes of one record a slot.

    Args:
        cache: as `alloc_kv_cache` returns it.
        layout: its format.
        slots: int32 or int64 ``[n]``, any values.

    Returns:
        ``(data, sf, valid)``: uint8 ``[n, data_bytes]``, uint8 ``[n, sf_bytes]``, bool ``[n]``. Rows of invalid slots
        are unspecified.
    """
    n, capacity = slots.shape[0], cache.shape[0] * cache.shape[1]
    slots = slots.to(torch.int64)
    valid = (slots >= 0) & (slots < capacity)
    if capacity == 0:
        widths = (layout.data_bytes, layout.sf_bytes)
        rows = [torch.zeros((n, width), dtype=torch.uint8, device=cache.device) for width in widths]
    else:
        slots = slots.clamp(0, capacity - 1)
        rows = [part.read(slots) for part in _parts(cache, layout)]
        rows.append(rows[0].new_empty((n, 0)))
    return rows[0], rows[1], valid


def scatter_records(cache: Tensor, layout: KVCacheFormat, slots: Tensor, data: Tensor, sf: Tensor) -> None:
    """Writes one record a token; tokens with a slot outside the cache write nothing.

    Of several tokens with one slot, the last one's whole record is written.

    Args:
        cache: as `alloc_kv_cache` returns it.
        layout: its format.
        slots: int32 or int64 ``[n]``, any values.
        data: uint8 ``[n, data_bytes]``.
        sf: uint8 ``[n, sf_bytes]``.
    """
    capacity = cache.shape[0] * cache.shape[1]
    if capacity == 0 or slots.shape[0] == 0:
        return
    target, writer, any_valid = _writers(slots.to(torch.int64), capacity)
    for part, rows in zip(_parts(cache, layout), (data, sf), strict=False):
        kept = part.read(target[:1])
        for chunk in row_chunks(slots.shape[0], layout.bytes_per_token, cache.device):
            part.write(target[chunk], torch.where(any_valid, rows[writer[chunk]], kept))


def _writers(slots: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each token writes, and whose record: every write to one slot carries the same bytes, so that no order of
    the writes can mix two records.

    A skipped token repeats the write to the largest valid slot. Where no slot is valid, all targets are slot 0 and
    `any_valid` is False: the caller writes back what slot 0 holds.

    Returns:
        ``(target, writer, any_valid)``: valid slots int64 ``[n]``, tokens int64 ``[n]``, bool ``[1]``.
    """
    valid = (slots >= 0) & (slots < capacity)
    keys = torch.where(valid, slots, -1)
    ordered, order = torch.sort(keys, stable=True)
    last = torch.searchsorted(ordered, keys, right=True) - 1
    last = torch.where(valid, last, slots.shape[0] - 1)
    return ordered[last].clamp(min=0), order[last], ordered[-1:] >= 0
