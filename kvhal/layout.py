"""Where the bytes of a record lie: allocation, views, inference of a format, every offset and stride."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from kvhal.formats import (
    ALIGNMENT,
    BF16_FORMAT,
    FORMAT_NAMES,
    SUPPORTED_KV_CACHE_FORMATS,
    KVCacheFormat,
    ScaleFormat,
)

SF_DTYPES: dict[str, torch.dtype] = {"ue8m0": torch.uint8, "e4m3": torch.float8_e4m3fn, "fp32": torch.float32}
DATA_DTYPES: dict[str | None, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.int8, None: torch.bfloat16}


@dataclass(frozen=True, eq=False)
class CacheGeometry:
    """Byte offsets and strides of one paged cache.

    A byte of token ``t`` of block ``b`` lies at ``b * block_stride + t * data_token_stride`` (data) or at
    ``b * block_stride + sf_offset + t * sf_token_stride`` (scales). Compared by identity: `cache_geometry` returns the
    same object for the same facts, so that it is a cheap key.

    Attributes:
        layout: the record's format.
        block_size: tokens a block.
        block_stride: bytes from one block to the next, a multiple of 32.
        data_token_stride, sf_token_stride: bytes from one token to the next inside a block.
        sf_offset: byte of the block at which the first scale row starts.
        token_alignment: bytes that divide every data row's address, given a 32-byte aligned cache.
    """

    layout: KVCacheFormat
    block_size: int
    block_stride: int
    data_token_stride: int
    sf_offset: int
    sf_token_stride: int
    token_alignment: int


@lru_cache(maxsize=4096)
def cache_geometry(layout: KVCacheFormat, block_size: int, block_stride: int | None = None) -> CacheGeometry:
    """The geometry of a cache of `block_size` tokens a block; `block_stride` in bytes, the smallest one when None."""
    stride = min_block_stride(layout, block_size) if block_stride is None else block_stride
    if layout.token_interleaved:
        token_stride, sf_offset, sf_token_stride = layout.bytes_per_token, layout.data_bytes, layout.bytes_per_token
    else:
        token_stride, sf_offset, sf_token_stride = layout.data_bytes, block_size * layout.data_bytes, layout.sf_bytes
    alignment = math.gcd(ALIGNMENT, token_stride)
    return CacheGeometry(layout, block_size, stride, token_stride, sf_offset, sf_token_stride, alignment)


def min_block_stride(layout: KVCacheFormat, block_size: int) -> int:
    """Bytes a block takes: its records, rounded up to lcm(32, record) when interleaved, else to 32."""
    unit = math.lcm(ALIGNMENT, layout.bytes_per_token) if layout.token_interleaved else ALIGNMENT
    return math.ceil(block_size * layout.bytes_per_token / unit) * unit


def alloc_kv_cache(num_blocks: int, block_size: int, layout: KVCacheFormat, device: torch.device | str) -> torch.Tensor:
    """An uninitialised paged cache.

    Whole blocks of it, such as ``cache[2:7]`` or ``cache[::2]``, are a cache too; tokens, such as ``cache[:, :32]``, only where
    the record is unquantised or `token_interleaved`. Elsewhere a block's scales lie behind all of its data, and a slice with
    fewer tokens names other bytes, which its strides do not always tell.

    Args:
        num_blocks: blocks in the cache, >= 0.
        block_size: tokens a block, >= 1; any size.
        layout: the record's format.
        device: where the storage lives.

    Returns:
        uint8 ``[num_blocks, block_size, 1, bytes_per_token]`` with strides
        ``(block_stride, bytes_per_token, bytes_per_token, 1)``; for an unquantised format the bf16 view
        ``[num_blocks, block_size, 1, bf16_elements]`` of the same bytes. Block padding lies behind each block's records.

    Raises:
        ValueError: num_blocks < 0 or block_size < 1.
    """
    if num_blocks < 0:
        raise ValueError(f"num_blocks has {num_blocks}, needs >= 0")
    if block_size < 1:
        raise ValueError(f"block_size has {block_size}, needs >= 1")
    stride = min_block_stride(layout, block_size)
    storage = torch.empty((num_blocks, stride), dtype=torch.uint8, device=device)
    return cache_view(storage, block_size, layout)


def cache_view(storage: torch.Tensor, block_size: int, layout: KVCacheFormat) -> torch.Tensor:
    """The paged view of uint8 storage ``[num_blocks, block_stride]``, as `alloc_kv_cache` returns it."""
    record = layout.bytes_per_token
    num_blocks, stride = storage.shape[0], storage.stride(0)
    offset = storage.storage_offset()
    if layout.quantized_dtype is None:
        storage, record, stride, offset = storage.view(torch.bfloat16), record // 2, stride // 2, offset // 2
    return storage.as_strided((num_blocks, block_size, 1, record), (stride, record, record, 1), offset)


def split_kv_cache(cache: torch.Tensor, layout: KVCacheFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Strided views of a cache's data and scales; nothing is copied.

    Args:
        cache: ``[num_blocks, block_size, 1, bytes_per_token]`` as returned by `alloc_kv_cache`, or a slice that is a cache
            (see there).
        layout: its format.

    Returns:
        ``(data, sf)``: data float8_e4m3fn ``[num_blocks, block_size, elements]``, or int8 ``[..., elements / 2]`` holding two
        e2m1 codes a byte (even element in the low nibble; kernels that address e2m1 elements need twice these strides), or
        bf16; sf uint8 (ue8m0), float8_e4m3fn or float32 ``[num_blocks, block_size, num_scales]``, None when unquantised.

    Raises:
        ValueError: the cache is not of this layout, or fp32 scales of this record do not lie on 4-byte addresses.
    """
    layout = resolve_kv_cache_layout(cache, layout)
    num_blocks, block_size = cache.shape[0], cache.shape[1]
    if layout.quantized_dtype is None:
        return cache[:, :, 0], None
    geometry = cache_geometry(layout, block_size, cache.stride(0))
    base = cache.storage_offset()
    data = cache.as_strided((num_blocks, block_size, layout.data_bytes), (geometry.block_stride, geometry.data_token_stride, 1))
    data = data.view(DATA_DTYPES[layout.quantized_dtype])
    if layout.sf_format == "fp32":
        return data, _fp32_scales(cache, geometry)
    sf = cache.as_strided(
        (num_blocks, block_size, layout.sf_bytes),
        (geometry.block_stride, geometry.sf_token_stride, 1),
        base + geometry.sf_offset,
    )
    return data, sf.view(SF_DTYPES[str(layout.sf_format)])


def _fp32_scales(cache: torch.Tensor, geometry: CacheGeometry) -> torch.Tensor:
    offset = cache.storage_offset() + geometry.sf_offset
    steps = (geometry.block_stride, geometry.sf_token_stride, offset)
    if any(step % 4 for step in steps):
        raise ValueError(
            f"layout {geometry.layout}: fp32 scales lie at byte {geometry.sf_offset} with token stride "
            f"{geometry.sf_token_stride}, needs multiples of 4 for a float32 view; read the record's bytes instead"
        )
    flat = torch.empty(0, dtype=torch.float32, device=cache.device).set_(cache.untyped_storage())  # type: ignore[call-overload]
    shape = (cache.shape[0], cache.shape[1], geometry.layout.num_scales)
    return flat.as_strided(shape, (steps[0] // 4, steps[1] // 4, 1), offset // 4)


def sf_data_as_int32(sf: torch.Tensor) -> torch.Tensor:
    """Views groups of four ue8m0 bytes as one int32: uint8 ``[..., 4 * k]`` to int32 ``[..., k]``.

    Raises:
        ValueError: dtype is not uint8, the last dimension is no multiple of 4, or the bytes are not 4-byte aligned.
    """
    if sf.dtype != torch.uint8:
        raise ValueError(f"sf: has dtype {sf.dtype}, needs torch.uint8 (ue8m0 scale bytes)")
    misaligned = sf.storage_offset() % 4 or any(step % 4 for step in sf.stride()[:-1]) or sf.stride(-1) != 1
    if sf.shape[-1] % 4 or misaligned:
        raise ValueError(f"sf: has shape {tuple(sf.shape)} and strides {sf.stride()}, needs whole, 4-byte aligned groups of 4")
    return sf.view(torch.int32)


def sf_output(layout: KVCacheFormat) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and trailing shape of the scales that a load of an index layout returns, one row a token.

    ue8m0 bytes come packed four to an int32 where they fill whole int32s, as indexer kernels take them.
    """
    dtype, count = SF_DTYPES[str(layout.sf_format)], layout.num_scales
    if layout.sf_format == "ue8m0" and count % 4 == 0:
        dtype, count = torch.int32, count // 4
    squeeze = count == 1 and dtype in (torch.int32, torch.float32)
    return dtype, () if squeeze else (count,)


def resolve_kv_cache_layout(
    cache: torch.Tensor, layout: KVCacheFormat | None = None, sf_format: ScaleFormat | None = None
) -> KVCacheFormat:
    """Checks a cache against `layout`, or infers the built-in format from dtype and the last two dimensions.

    Args:
        cache: ``[num_blocks, block_size, 1, bytes_per_token]`` uint8, or bf16 for unquantised records.
        layout: the format; None to infer one of the built-in formats.
        sf_format: narrows an ambiguous inference (132-byte records), and must agree with `layout` when both are given.

    Raises:
        ValueError: rank, dtype, record width, strides or alignment do not fit; no format fits; or several do (named).
    """
    return geometry_of(cache, layout, sf_format).layout


def geometry_of(
    cache: torch.Tensor, layout: KVCacheFormat | None = None, sf_format: ScaleFormat | None = None
) -> CacheGeometry:
    """`resolve_kv_cache_layout`, returning the whole geometry; one dictionary look-up for facts seen before."""
    check_format(layout, sf_format)
    geometry = _geometry(cache.dtype, cache.shape, cache.stride(), layout, sf_format)
    if cache.data_ptr() % ALIGNMENT:
        raise ValueError(
            f"kv_cache: starts at an address that is {cache.data_ptr() % ALIGNMENT} past a multiple of {ALIGNMENT} bytes, "
            "needs 0; allocate it with alloc_kv_cache, or slice whole blocks"
        )
    return geometry


def check_format(layout: object, sf_format: object = None) -> None:
    """A format and a scale format that are left out, or of their own classes.

    Raises:
        ValueError: one is something else.
    """
    if not (layout is None or isinstance(layout, KVCacheFormat)):
        raise ValueError(f"layout: has {layout!r}, needs a KVCacheFormat or None")
    if not (sf_format is None or isinstance(sf_format, str)):
        raise ValueError(f"sf_format: has {sf_format!r}, needs one of {', '.join(SF_DTYPES)} or None")


@lru_cache(maxsize=4096)
def _geometry(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    layout: KVCacheFormat | None,
    sf_format: ScaleFormat | None,
) -> CacheGeometry:
    if len(shape) != 4 or shape[2] != 1:
        raise ValueError(f"kv_cache: has shape {tuple(shape)}, needs [num_blocks, block_size, 1, record]")
    if shape[1] < 1:
        raise ValueError(f"kv_cache: has block_size {shape[1]}, needs >= 1")
    layout = layout_of(dtype, shape[3], layout, sf_format)
    item = 2 if layout.quantized_dtype is None else 1
    needed = layout.bytes_per_token // item
    block_stride = strides[0] * item if shape[0] > 1 else max(strides[0] * item, min_block_stride(layout, shape[1]))
    if strides[3] != 1 or (shape[1] > 1 and strides[1] != needed):
        raise ValueError(f"kv_cache: has strides {tuple(strides)}, needs (block stride, {needed}, {needed}, 1)")
    if block_stride % ALIGNMENT or block_stride < shape[1] * layout.bytes_per_token:
        raise ValueError(
            f"kv_cache: has a block stride of {block_stride} bytes, needs a multiple of {ALIGNMENT} that holds "
            f"{shape[1] * layout.bytes_per_token} bytes of records; allocate it with alloc_kv_cache"
        )
    return cache_geometry(layout, shape[1], block_stride)


def layout_of(
    dtype: torch.dtype, width: int, layout: KVCacheFormat | None, sf_format: ScaleFormat | None = None
) -> KVCacheFormat:
    """The format of records of a dtype and width: `resolve_kv_cache_layout` without a tensor to check."""
    check_format(layout, sf_format)
    layout = _infer_layout(dtype, width, sf_format) if layout is None else layout
    if sf_format is not None and sf_format != layout.sf_format:
        raise ValueError(f"sf_format: has {sf_format!r}, but layout {layout} has {layout.sf_format!r}; leave one of them out")
    unquantized = layout.quantized_dtype is None
    dtype_needed, width_needed = (
        (torch.bfloat16, layout.bf16_elements) if unquantized else (torch.uint8, layout.bytes_per_token)
    )
    if dtype != dtype_needed or width != width_needed:
        raise ValueError(
            f"kv_cache: has dtype {dtype} and last dimension {width}, needs {dtype_needed} and {width_needed} "
            f"for layout {layout}"
        )
    return layout


def _infer_layout(dtype: torch.dtype, width: int, sf_format: ScaleFormat | None) -> KVCacheFormat:
    """The one built-in format of a dtype and record width."""
    candidates = [
        layout
        for layout in (*SUPPORTED_KV_CACHE_FORMATS, BF16_FORMAT)
        if (dtype, width)
        == ((torch.bfloat16, layout.bf16_elements) if layout.quantized_dtype is None else (torch.uint8, layout.bytes_per_token))
        and sf_format in (None, layout.sf_format)
    ]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = " or ".join(f"{FORMAT_NAMES[layout]} (sf_format={layout.sf_format!r})" for layout in candidates)
        raise ValueError(f"kv_cache: a record of {width} bytes is ambiguous, it can be {names}; pass layout= or sf_format=")
    known = ", ".join(f"{name} ({layout.bytes_per_token} bytes)" for layout, name in FORMAT_NAMES.items())
    raise ValueError(
        f"kv_cache: has dtype {dtype} and last dimension {width}"
        + (f" with sf_format {sf_format!r}" if sf_format else "")
        + f", no built-in format fits; known: {known}; pass layout= for another one"
    )
