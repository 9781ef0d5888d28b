"""Makes the tensors of one case, each in a guarded buffer; two makers of one seed make identical bytes on any device."""

from __future__ import annotations

import zlib
from functools import partial

import numpy as np
import torch

from kvhal.formats import KVCacheFormat
from kvhal.layout import cache_geometry, cache_view
from kvhal.testing.buffers import Buffer, allocate, extent, locate_in_cache, locate_in_rows, view


class Maker:
    """The tensors of one case on one device.

    Args:
        identity: names the case; it seeds every random choice.
        device: where the tensors live.

    Attributes:
        rng: the case's random numbers, equal for equal identities.
        buffers: every allocation made so far, by name.
    """

    def __init__(self, identity: str, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.seed = zlib.crc32(identity.encode())
        self.rng = np.random.default_rng(self.seed)
        self.buffers: dict[str, Buffer] = {}

    def _add(self, buffer: Buffer) -> Buffer:
        if buffer.name in self.buffers:
            raise ValueError(f"name: {buffer.name} is taken in this case, needs another one")
        self.buffers[buffer.name] = buffer
        return buffer

    def _salt(self) -> int:
        return (self.seed + len(self.buffers) * 7919) & 0xFFFF

    def cache(
        self,
        layout: KVCacheFormat,
        num_blocks: int,
        block_size: int,
        *,
        written: bool = False,
        skip_blocks: int = 0,
        stretch: int = 1,
    ) -> torch.Tensor:
        """A paged cache full of poison, which is valid content: every byte of a record means something.

        Args:
            layout: its format.
            num_blocks, block_size: its shape.
            written: the operation may write it.
            skip_blocks: blocks of the same allocation that lie before the cache.
            stretch: block strides from one block to the next (as when layers share an allocation).
        """
        stride = cache_geometry(layout, block_size).block_stride * stretch
        geometry = cache_geometry(layout, block_size, stride)
        first = skip_blocks * stride
        where = partial(locate_in_cache, geometry, num_blocks, first=first)
        size = first + num_blocks * stride
        buffer = self._add(allocate("kv_cache", size, self.device, salt=self._salt(), written=written, locate=where))
        return cache_view(buffer.body().view(skip_blocks + num_blocks, stride)[skip_blocks:], block_size, layout)

    def place(
        self,
        name: str,
        values: np.ndarray | torch.Tensor,
        *,
        row_stride: int | None = None,
        strides: tuple[int, ...] | None = None,
        skip: int = 0,
        dtype: torch.dtype | None = None,
        written: bool = False,
    ) -> torch.Tensor:
        """An input with these values.

        Args:
            name: argument name.
            values: its content; numpy uint16 with ``dtype=torch.bfloat16`` gives bf16 bits.
            row_stride: elements from one index of the first axis to the next; contiguous when None.
            strides: all strides, instead.
            skip: elements of the allocation before the first one (an odd count misaligns it).
            dtype: reinterprets the values' bits.
            written: the operation works in place.
        """
        host = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
        host = host if dtype is None else host.view(dtype)
        shape = tuple(host.shape)
        tensor = self._strided(name, shape, host.dtype, strides or _strides(shape, row_stride), skip, written=written)
        if 0 in tensor.stride()[:1]:  # an expanded tensor: all rows are the first one
            tensor[:1].copy_(host[:1])
        else:
            tensor.copy_(host)
        return tensor

    def output(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        row_stride: int | None = None,
        strides: tuple[int, ...] | None = None,
        skip: int = 0,
    ) -> torch.Tensor:
        """An output full of poison, so that what the operation leaves alone is seen; strides as in `place`."""
        return self._strided(name, shape, dtype, strides or _strides(shape, row_stride), skip, written=True)

    def _strided(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...], skip: int, *, written: bool
    ) -> torch.Tensor:
        item = dtype.itemsize
        size = (skip + extent(shape, strides)) * item
        where = partial(locate_in_rows, shape, strides, item, first=skip * item)
        buffer = self._add(allocate(name, size, self.device, salt=self._salt(), written=written, locate=where))
        return view(buffer, dtype, shape, strides, skip)


def _strides(shape: tuple[int, ...], row_stride: int | None) -> tuple[int, ...]:
    """Contiguous strides, with the first one replaced where given."""
    steps = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        steps[axis] = steps[axis + 1] * max(shape[axis + 1], 1)
    if row_stride is not None and steps:
        steps[0] = row_stride
    return tuple(steps)
