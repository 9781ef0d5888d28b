"""Guarded allocations: every tensor of a test lies between guards, and all of it is filled with address-dependent poison.

A byte that a kernel writes where it should not, or reads where it should not and then stores, differs from what the reference
left at the same place, because no two neighbouring addresses hold related values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvhal.layout import CacheGeometry

GUARD_BYTES = 2048
BASE_ALIGNMENT = 64  #: of a guarded body, on every device; allocators promise at least this on the devices we know
MULTIPLIER = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: consecutive addresses land far apart


def poison(count: int, salt: int) -> np.ndarray:
    """`count` bytes (uint8) that depend on their address and on `salt`, the same on every machine."""
    address = np.arange(count, dtype=np.uint64) + np.uint64((salt * 0x10001) & 0xFFFFFFFF)
    mixed = address * np.uint64(MULTIPLIER)
    mixed ^= mixed >> np.uint64(29)
    return ((mixed * np.uint64(0xBF58476D1CE4E5B9)) >> np.uint64(53)).astype(np.uint8)


@dataclass
class Buffer:
    """One guarded allocation ``[guard | body | guard]``.

    Attributes:
        name: what the test calls it ("kv_cache", "out", ...).
        storage: uint8, all bytes, guards included; its address is a multiple of 64.
        begin, end: the body's bytes inside the storage.
        locate: body byte -> its coordinates as text.
        written: the operation may write this buffer; every other one must keep all its bytes.
    """

    name: str
    storage: torch.Tensor
    begin: int
    end: int
    locate: Callable[[int], str]
    written: bool = False

    def body(self) -> torch.Tensor:
        """uint8, the bytes between the guards."""
        return self.storage[self.begin : self.end]

    def bytes(self) -> np.ndarray:
        """A copy of all bytes, guards included, on the host; waits for the device."""
        return np.array(self.storage.cpu().numpy())

    def where(self, position: int) -> str:
        """Coordinates of a byte of the storage."""
        if position < self.begin:
            return f"{self.name}: guard, {self.begin - position} bytes before the first"
        if position >= self.end:
            return f"{self.name}: guard, {position - self.end} bytes after the last"
        return f"{self.name}: {self.locate(position - self.begin)}"


def allocate(
    name: str,
    num_bytes: int,
    device: torch.device | str = "cpu",
    *,
    salt: int = 0,
    written: bool = False,
    locate: Callable[[int], str] | None = None,
    guard: int = GUARD_BYTES,
) -> Buffer:
    """A guarded, poisoned allocation.

    Args:
        name: for reports.
        num_bytes: size of the body.
        device: where it lives.
        salt: different values give unrelated poison.
        written: the operation under test may write it.
        locate: body byte -> coordinates as text; "byte N" when None.
        guard: bytes of each guard, a multiple of 64.
    """
    if guard % BASE_ALIGNMENT:
        raise ValueError(f"guard: has {guard}, needs a multiple of {BASE_ALIGNMENT}")
    total = guard + num_bytes + guard
    raw = torch.empty(total + BASE_ALIGNMENT, dtype=torch.uint8, device=device)
    shift = -raw.data_ptr() % BASE_ALIGNMENT
    storage = raw[shift : shift + total]
    storage.copy_(torch.from_numpy(poison(total, salt)))
    return Buffer(name, storage, guard, guard + num_bytes, locate or (lambda at: f"byte {at}"), written)


def view(buffer: Buffer, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], skip: int = 0) -> torch.Tensor:
    """A strided tensor inside a buffer's body; strides and `skip` count elements of `dtype`."""
    item = dtype.itemsize
    body = buffer.body()
    whole = body[: body.numel() // item * item].view(dtype)
    return whole.as_strided(shape, strides, whole.storage_offset() + skip)


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to behind the last one of a strided tensor."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def locate_in_cache(geometry: CacheGeometry, num_blocks: int, at: int, first: int = 0) -> str:
    """Coordinates of a byte of a paged cache: block, token, field and byte of the field, or padding."""
    at -= first
    block, inside = divmod(at, geometry.block_stride)
    if at < 0 or block >= num_blocks:
        return f"outside of the cache's blocks, at byte {at}"
    layout = geometry.layout
    token, byte = divmod(inside, geometry.data_token_stride)
    if token < geometry.block_size and byte < layout.data_bytes:
        return f"block {block} token {token} data byte {byte}"
    if layout.sf_bytes:
        token, byte = divmod(inside - geometry.sf_offset, geometry.sf_token_stride)
        if 0 <= token < geometry.block_size and byte < layout.sf_bytes:
            return f"block {block} token {token} scale byte {byte}"
    return f"block {block} padding at byte {inside} of the block"


def locate_in_rows(shape: tuple[int, ...], strides: tuple[int, ...], item: int, at: int, first: int = 0) -> str:
    """Coordinates of a byte of a strided tensor (byte offsets from `first`), or "between the rows"."""
    element, byte = divmod(at - first, item)
    rest = element
    order = sorted(range(len(shape)), key=lambda axis: -strides[axis])
    place = dict.fromkeys(range(len(shape)), 0)
    for axis in order:
        if strides[axis] and shape[axis] > 1:
            place[axis], rest = divmod(rest, strides[axis])
    index = [place[axis] for axis in range(len(shape))]
    if at < first or rest or any(i >= size for i, size in zip(index, shape, strict=True)):
        return f"byte {at} of the buffer, outside of the tensor's elements"
    return f"element {index} byte {byte}"
