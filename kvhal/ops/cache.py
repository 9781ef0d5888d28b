"""Reading and writing paged caches: store, load by plan, load by slot."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, compiler
from torch.compiler import is_dynamo_compiling

from kvhal.config import current
from kvhal.formats import KVCacheFormat, ScaleFormat
from kvhal.ops.cache_calls import KVCacheTensors, flattened, load, load_slots, new_load_output, store
from kvhal.ops.repeated import LOAD, LOAD_SLOTS, STORE, UNALIGNED, UNTAKEN

_pair = partial(tuple.__new__, KVCacheTensors)  #: as the class itself, in half the time


def store_kv_cache(
    kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, *, layout: KVCacheFormat | None = None
) -> None:
    """Quantises one record a token and scatters it into a paged cache.

    Args:
        kv: bf16 ``[n, ...]``; the trailing dimensions flatten to one record; any row stride.
        kv_cache: ``[num_blocks, block_size, 1, bytes_per_token]`` from `alloc_kv_cache`, which says how it may be sliced.
        slot_mapping: int32 or int64 ``[n]``, ``block * block_size + offset``. A slot < 0 (padding is -1) or beyond the cache is
            skipped. Duplicates: one of the writers wins; on a GPU, byte by byte (strict mode refuses them).
        layout: the cache's format; None infers a built-in one.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit, or memory is shared (see `kvhal.ops`); nothing was written.
        InvalidMetadata: strict mode, a slot is out of range (other than -1) or a duplicate.
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.

    Bytes that no slot addresses, block padding included, keep their values.
    """
    if is_dynamo_compiling():
        from kvhal import library

        return library.store_kv_cache(kv, kv_cache, slot_mapping, layout)
    scope = current()
    try:
        call = scope.near[STORE].get(kv_cache.data_ptr())
    except UNTAKEN:
        call = None
    if call is not None and call.scalars[0] is layout:
        if call.checks:
            plain = not compiler._is_compiling_flag and type(kv) is type(kv_cache) is type(slot_mapping) is Tensor
            try:  # written out wherever a launcher is tried: a function for it took 0.08 us of 0.67
                if plain and call.prepared(kv, kv_cache, slot_mapping) is None:
                    return None
            except UNTAKEN:
                pass
        elif call.same(kv, kv_cache, slot_mapping) and not kv.data_ptr() & UNALIGNED:
            call.prepared(kv, kv_cache, slot_mapping)
            return None
    return store(scope, kv, kv_cache, slot_mapping, layout)


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
        kv_cache: ``[num_blocks, block_size, 1, bytes_per_token]``, as of `store_kv_cache`.
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
        ValueError: a dtype, shape, stride or device does not fit, or memory is shared (see `kvhal.ops`); nothing was written.
        InvalidMetadata: strict mode, a segment reaches outside the cache, its block or the output.
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.

    Rows outside a segment's block or outside ``[0, total_k)`` are dropped.
    """
    if is_dynamo_compiling():
        from kvhal import library

        return library.load_paged_kv_cache(kv_cache, load_segments, total_k, out, layout, sf_format)
    scope = current()
    try:
        call = scope.near[LOAD].get(kv_cache.data_ptr())
    except UNTAKEN:
        call = None
    if call is not None:
        known, scale, rows, kind = call.scalars
        alike = known is layout and scale is sf_format and kind is type(out) and type(total_k) is int
        if alike and call.checks and kind is not KVCacheTensors and (out is not None or rows == total_k):
            kv = call.new()[0] if out is None else out
            plain = not compiler._is_compiling_flag and type(kv_cache) is type(load_segments) is Tensor
            try:
                if plain and call.prepared(kv_cache, load_segments, total_k, kv, None) is None:
                    return _pair((kv, None))
            except UNTAKEN:
                pass
        elif alike and rows == total_k:
            given = (out,) if type(out) is Tensor else out or ()
            if call.same(kv_cache, load_segments, *given):
                kv, sf = (out, None) if type(out) is Tensor else out or call.new()
                if not kv.data_ptr() & UNALIGNED:
                    call.prepared(kv_cache, load_segments, total_k, kv, sf)
                    return _pair((kv, sf))
    return load(scope, kv_cache, load_segments, total_k, out, layout, sf_format)


def load_kv_slots(
    kv_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor | None = None, *, layout: KVCacheFormat | None = None
) -> torch.Tensor:
    """One dequantised bf16 record a slot: what a decode attention reads.

    Args:
        kv_cache: ``[num_blocks, block_size, 1, bytes_per_token]``, as of `store_kv_cache`; index layouts are dequantised too.
        slots: int32 or int64, any shape, contiguous; a slot out of range gives zeros.
        out: bf16 ``[*slots.shape, elements]``, None allocates.
        layout: the cache's format; None infers a built-in one.

    Returns:
        bf16 ``[*slots.shape, elements]``.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit, or memory is shared (see `kvhal.ops`); nothing was written.
        InvalidMetadata: strict mode, a slot is out of range (other than -1).
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.
    """
    if is_dynamo_compiling():
        from kvhal import library

        return library.load_kv_slots(kv_cache, slots, out, layout)
    scope = current()
    try:
        call = scope.near[LOAD_SLOTS].get(kv_cache.data_ptr())
    except UNTAKEN:
        call = None
    if call is not None and call.scalars[0] is layout:
        if out is None:
            if call.fresh and call.same(kv_cache, slots):
                made = cast(Tensor, call.new())
                call.prepared(kv_cache, *flattened(call, slots, made))
                return made
        elif call.checks and not call.width:
            plain = not compiler._is_compiling_flag and type(kv_cache) is type(slots) is type(out) is Tensor
            try:
                if plain and call.prepared(kv_cache, slots, out) is None:
                    return out
            except UNTAKEN:
                pass
        elif not call.fresh and call.same(kv_cache, slots, out) and not out.data_ptr() & UNALIGNED:
            call.prepared(kv_cache, *flattened(call, slots, out))
            return out
    return load_slots(scope, kv_cache, slots, out, layout)


__all__ = ["KVCacheTensors", "load_kv_slots", "load_paged_kv_cache", "new_load_output", "store_kv_cache"]
