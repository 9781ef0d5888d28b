"""Reading and writing paged caches: store, load by plan, load by slot."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch.compiler import is_compiling

from kvhal.binding import bound
from kvhal.config import current
from kvhal.formats import KVCacheFormat, ScaleFormat
from kvhal.interface import Op
from kvhal.layout import DATA_DTYPES, CacheGeometry, geometry_of, sf_output
from kvhal.ops import strict
from kvhal.ops.checks import (
    SLOT_DTYPES,
    check_contiguous,
    check_int,
    check_rows,
    check_same_device,
    check_tensor,
    check_writable_rows,
    record_rows,
    reject,
)
from kvhal.ops.repeated import call_key, remember, repeated

BF16 = (torch.bfloat16,)


class KVCacheTensors(NamedTuple):
    """What a load returns.

    Attributes:
        kv: bf16 ``[total_k, elements]`` of a main layout; the raw data (float8_e4m3fn ``[total_k, elements]``, or int8
            ``[total_k, elements / 2]`` holding two e2m1 codes a byte) of an index layout.
        sf: None for main layouts; the raw scales of an index layout: int32 ``[total_k]`` (four ue8m0 bytes), float32
            ``[total_k]``, or ``[total_k, k]`` where a record has more.
    """

    kv: torch.Tensor
    sf: torch.Tensor | None


def store_kv_cache(
    kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *, layout: KVCacheFormat | None = None
) -> None:
    """Quantises one record a token and scatters it into a paged cache.

    Args:
        kv: bf16 ``[n, ...]``; the trailing dimensions flatten to one record; any row stride.
        kv_cache: ``[num_blocks, block_size, 1, bytes_per_token]`` from `alloc_kv_cache`.
        slot_mapping: int32 or int64 ``[n]``, ``block * block_size + offset``. A slot < 0 (padding is -1) or beyond the cache is
            skipped. Duplicates: one of the writers wins; on a GPU, byte by byte (strict mode refuses them).
        layout: the cache's format; None infers a built-in one.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit; nothing was written.
        InvalidMetadata: strict mode, a slot is out of range (other than -1) or a duplicate.
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.

    Bytes that no slot addresses, block padding included, keep their values.
    """
    if is_compiling():
        from kvhal import library

        return library.store_kv_cache(kv, kv_cache, slot_mapping, layout)
    scope = current()
    key = call_key(Op.STORE, (layout,), kv_cache, kv, slot_mapping)
    launch = repeated(scope, key, kv_cache)
    if launch is not None:
        launch(kv, kv_cache, slot_mapping)
        return None
    check_tensor("kv_cache", kv_cache, (torch.uint8, torch.bfloat16))
    geometry = geometry_of(kv_cache, layout)
    check_tensor("slot_mapping", slot_mapping, SLOT_DTYPES, rank=1)
    rows = record_rows("kv", check_tensor("kv", kv, BF16), geometry.layout.elements, slot_mapping.shape[0])
    device = kv_cache.device
    if kv.device != device or slot_mapping.device != device:
        check_same_device(device, "kv_cache", kv=kv, slot_mapping=slot_mapping)
    check_contiguous("slot_mapping", slot_mapping)
    if rows.shape[0] == 0 or kv_cache.shape[0] == 0:
        return None
    if scope.policy.strict:
        strict.check_store_slots(slot_mapping, kv_cache.shape[0] * geometry.block_size)
    launch = bound(scope, Op.STORE, geometry, geometry.layout, geometry.block_size, device)
    launch(rows, kv_cache, slot_mapping)
    if rows is kv:
        remember(scope, key, launch)
    return None


def load_paged_kv_cache(
    kv_cache: torch.Tensor,
    load_segments: torch.Tensor,
    total_k: int,
    out: torch.Tensor | KVCacheTensors | None = None,
    *,
    layout: KVCacheFormat | None = None,
    sf_format: ScaleFormat | None = None,
) -> KVCacheTensors:
    """Gathers runs of records into contiguous rows, dequantised for main layouts, raw for index layouts.

    Args:
        kv_cache: ``[num_blocks, block_size, 1, bytes_per_token]``.
        load_segments: int32 ``[s, 4]``, rows ``[src_block, src_begin, src_end, dst_offset]``, half-open in tokens of the block.
            ``src_block == -1``, and any block id that is not in the cache, writes zeros (data and scales).
        total_k: rows of the result.
        out: where to write, at least total_k rows: bf16 ``[rows, elements]`` or ``[rows, 1, elements]``, a row slice of a
            larger buffer is welcome; for index layouts a KVCacheTensors. Rows that no segment covers keep their values. None
            allocates; uncovered rows are then uninitialised.
        layout: the cache's format; None infers a built-in one.
        sf_format: tells formats of one width apart (132-byte records).

    Returns:
        KVCacheTensors: `out` as it was passed, or the new tensors.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit; nothing was written.
        InvalidMetadata: strict mode, a segment reaches outside the cache, its block or the output.
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.

    Rows outside a segment's block or outside ``[0, total_k)`` are dropped.
    """
    if is_compiling():
        from kvhal import library

        return library.load_paged_kv_cache(kv_cache, load_segments, total_k, out, layout, sf_format)
    scope, plain = current(), type(total_k) is int
    key = call_key(Op.LOAD, (layout, sf_format, total_k), kv_cache, load_segments, out) if plain else None
    launch = repeated(scope, key, kv_cache)
    if launch is not None:
        launch(kv_cache, load_segments, total_k, out, None)
        return KVCacheTensors(cast(torch.Tensor, out), None)
    check_tensor("kv_cache", kv_cache, (torch.uint8, torch.bfloat16))
    geometry = geometry_of(kv_cache, layout, sf_format)
    device = kv_cache.device
    check_rows("load_segments", check_tensor("load_segments", load_segments, (torch.int32,), rank=2), columns=4)
    check_contiguous("load_segments", load_segments)
    total_k = check_int("total_k", total_k, 0)
    result = new_load_output(geometry.layout, total_k, device) if out is None else _as_pair(out, geometry.layout)
    kv, sf = _load_rows(result, geometry.layout, total_k)
    check_same_device(device, "kv_cache", load_segments=load_segments, out=kv, **{"out.sf": sf})
    if load_segments.shape[0] == 0 or total_k == 0:
        return result
    if scope.policy.strict:
        strict.check_segments(load_segments, kv_cache.shape[0], geometry.block_size, total_k)
    launch = bound(scope, Op.LOAD, geometry, geometry.layout, geometry.block_size, device)
    launch(kv_cache, load_segments, total_k, kv, sf)
    if kv is out:
        remember(scope, key, launch)
    return result


def load_kv_slots(
    kv_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor | None = None, *, layout: KVCacheFormat | None = None
) -> torch.Tensor:
    """One dequantised bf16 record a slot: what a decode attention reads.

    Args:
        kv_cache: ``[num_blocks, block_size, 1, bytes_per_token]``; index layouts are dequantised too.
        slots: int32 or int64, any shape, contiguous; a slot out of range gives zeros.
        out: bf16 ``[*slots.shape, elements]``, None allocates.
        layout: the cache's format; None infers a built-in one.

    Returns:
        bf16 ``[*slots.shape, elements]``.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit; nothing was written.
        InvalidMetadata: strict mode, a slot is out of range (other than -1).
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.
    """
    if is_compiling():
        from kvhal import library

        return library.load_kv_slots(kv_cache, slots, out, layout)
    scope = current()
    key = call_key(Op.LOAD_SLOTS, (layout,), kv_cache, slots, out)
    launch = repeated(scope, key, kv_cache)
    if launch is not None:
        launch(kv_cache, slots, out)
        return cast(torch.Tensor, out)
    check_tensor("kv_cache", kv_cache, (torch.uint8, torch.bfloat16))
    geometry = geometry_of(kv_cache, layout)
    device, elements = kv_cache.device, geometry.layout.elements
    check_tensor("slots", slots, SLOT_DTYPES)
    check_contiguous("slots", slots)
    shape = (*slots.shape, elements)
    if out is None:
        out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    elif tuple(check_tensor("out", out, BF16).shape) != shape:
        reject("out", f"shape {tuple(out.shape)}", f"{shape}, one record a slot")
    check_same_device(device, "kv_cache", slots=slots, out=out)
    if slots.numel() == 0:
        return out
    rows = _slot_rows(out, elements)
    if scope.policy.strict:
        strict.check_load_slots(slots, kv_cache.shape[0] * geometry.block_size)
    launch = bound(scope, Op.LOAD_SLOTS, geometry, geometry.layout, geometry.block_size, device)
    launch(kv_cache, slots.view(-1), rows)
    if slots.dim() == 1:
        remember(scope, key, launch)
    return out


def new_load_output(layout: KVCacheFormat, total_k: int, device: torch.device) -> KVCacheTensors:
    """Uninitialised tensors of the shapes that a load of `layout` returns."""
    if not layout.is_index:
        return KVCacheTensors(torch.empty((total_k, layout.elements), dtype=torch.bfloat16, device=device), None)
    dtype, trailing = sf_output(layout)
    data = torch.empty((total_k, layout.data_bytes), dtype=DATA_DTYPES[layout.quantized_dtype], device=device)
    return KVCacheTensors(data, torch.empty((total_k, *trailing), dtype=dtype, device=device))


def _as_pair(out: torch.Tensor | KVCacheTensors, layout: KVCacheFormat) -> KVCacheTensors:
    if isinstance(out, torch.Tensor):
        out = KVCacheTensors(out, None)
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"out: has a {type(out).__name__}, needs a torch.Tensor, a KVCacheTensors or None")
    if layout.is_index != (out[1] is not None):
        have = "no scales" if out[1] is None else "scales"
        need = "a KVCacheTensors with scales" if layout.is_index else "a bf16 tensor, or a KVCacheTensors with sf=None"
        reject("out", have, f"{need} for layout {layout}")
    return KVCacheTensors(*out)


def _load_rows(result: KVCacheTensors, layout: KVCacheFormat, total_k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The output as 2-d rows, checked to hold total_k of them."""
    dtype, width = (
        (DATA_DTYPES[layout.quantized_dtype], layout.data_bytes) if layout.is_index else (torch.bfloat16, layout.elements)
    )
    kv = record_rows("out", check_tensor("out", result.kv, (dtype,)), width, written=True)
    _check_capacity("out", kv, total_k)
    if result.sf is None:
        return kv, None
    sf_dtype, trailing = sf_output(layout)
    sf = check_tensor("out.sf", result.sf, (sf_dtype,), rank=1 + len(trailing))
    if tuple(sf.shape[1:]) != trailing:
        reject("out.sf", f"shape {tuple(sf.shape)}", f"[rows, {trailing[0] if trailing else ''}]")
    if sf.dim() == 1:
        check_contiguous("out.sf", sf, written=True)
    else:
        check_rows("out.sf", sf, written=True)
    _check_capacity("out.sf", sf, total_k)
    return kv, sf


def _check_capacity(name: str, rows: torch.Tensor, total_k: int) -> None:
    if rows.shape[0] < total_k:
        reject(name, f"{rows.shape[0]} rows", f"at least total_k = {total_k}")
    if rows.dim() == 2:
        check_writable_rows(name, rows)


def _slot_rows(out: torch.Tensor, elements: int) -> torch.Tensor:
    try:
        rows = out.view(-1, elements)
    except RuntimeError:
        rows = None
    if rows is None or (rows.stride(1) != 1 and elements > 1):
        reject("out", f"strides {out.stride()}", "rows of one stride", "pass a contiguous tensor, or None")
    check_writable_rows("out", rows)
    return rows


__all__ = ["CacheGeometry", "KVCacheTensors", "load_kv_slots", "load_paged_kv_cache", "new_load_output", "store_kv_cache"]
