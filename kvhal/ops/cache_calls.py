"""`kvhal.ops.cache` where a call is not like the one before: an equal one is found, or it is validated and bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from kvhal.binding import bound
from kvhal.config import Scope
from kvhal.formats import KVCacheFormat, ScaleFormat
from kvhal.interface import Op
from kvhal.layout import DATA_DTYPES, geometry_of, sf_output
from kvhal.ops import strict
from kvhal.ops.checks import (
    SLOT_DTYPES,
    check_apart,
    check_contiguous,
    check_int,
    check_rows,
    check_same_device,
    check_tensor,
    check_writable_rows,
    record_rows,
    reject,
)
from kvhal.ops.repeated import LOAD, LOAD_SLOTS, STORE, Call, allocator, call_key, find, is_traced, keep_near, remember

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


def store(
    scope: Scope, kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, layout: KVCacheFormat | None
) -> None:
    if is_traced(kv_cache):
        from kvhal import library

        return library.store_kv_cache(kv, kv_cache, slot_mapping, layout)
    tensors = (kv, kv_cache, slot_mapping)
    key = call_key(Op.STORE, (layout,), *tensors)
    call = find(scope, key, kv_cache)
    if call is not None:
        call.launch(*tensors)
    else:
        check_tensor("kv_cache", kv_cache, (torch.uint8, torch.bfloat16))
        geometry = geometry_of(kv_cache, layout)
        check_tensor("slot_mapping", slot_mapping, SLOT_DTYPES, rank=1)
        rows = record_rows("kv", check_tensor("kv", kv, BF16), geometry.layout.elements, slot_mapping.shape[0])
        device = kv_cache.device
        check_same_device(device, "kv_cache", kv=kv, slot_mapping=slot_mapping)
        check_contiguous("slot_mapping", slot_mapping)
        check_apart("kv_cache", kv_cache, kv=rows, slot_mapping=slot_mapping)
        if rows.shape[0] == 0:
            return None
        if scope.policy.strict:
            strict.check_store_slots(slot_mapping, kv_cache.shape[0] * geometry.block_size)
        if kv_cache.shape[0] == 0:
            return None
        launch = bound(scope, Op.STORE, geometry, geometry.layout, geometry.block_size, device)
        launch(rows, kv_cache, slot_mapping)
        call = remember(scope, key if rows is kv else None, lambda: Call(launch, tensors, (layout,)))
    keep_near(scope, STORE, kv_cache.data_ptr(), call, tensors, (kv,), *tensors)
    return None


def load(
    scope: Scope,
    kv_cache: torch.Tensor,
    load_segments: torch.Tensor,
    total_k: int,
    out: torch.Tensor | KVCacheTensors | None,
    layout: KVCacheFormat | None,
    sf_format: ScaleFormat | None,
) -> KVCacheTensors:
    if is_traced(kv_cache):
        from kvhal import library

        return library.load_paged_kv_cache(kv_cache, load_segments, total_k, out, layout, sf_format)
    given: tuple[Any, ...] = () if out is None else tuple(out) if type(out) is KVCacheTensors else (out,)
    tensors, scalars = (kv_cache, load_segments, *given), (layout, sf_format, total_k, type(out))
    key = call_key(Op.LOAD, scalars, *tensors) if type(total_k) is int else None
    call = find(scope, key, kv_cache)
    if call is not None:
        kv, sf = call.new() if call.fresh else (*given, None)[:2]
        result = KVCacheTensors(kv, sf)
        call.launch(kv_cache, load_segments, total_k, kv, sf)
    else:
        check_tensor("kv_cache", kv_cache, (torch.uint8, torch.bfloat16))
        geometry = geometry_of(kv_cache, layout, sf_format)
        device = kv_cache.device
        check_rows("load_segments", check_tensor("load_segments", load_segments, (torch.int32,), rank=2), columns=4)
        check_contiguous("load_segments", load_segments)
        total_k = check_int("total_k", total_k, 0)
        result = load_output(out, geometry.layout, total_k, device)
        kv, sf = load_rows(result, geometry.layout, total_k)
        check_same_device(device, "kv_cache", load_segments=load_segments, out=kv, **{"out.sf": sf})
        if load_segments.shape[0] == 0 or total_k == 0:
            return result
        written = kv[:total_k], None if sf is None else sf[:total_k]
        for name, rows in zip(("out", "out.sf"), written, strict=True):
            check_apart(name, rows, kv_cache=kv_cache, load_segments=load_segments)
        check_apart("out", written[0], **{"out.sf": written[1]})
        if scope.policy.strict:
            strict.check_segments(load_segments, kv_cache.shape[0], geometry.block_size, total_k)
        launch = bound(scope, Op.LOAD, geometry, geometry.layout, geometry.block_size, device)
        launch(kv_cache, load_segments, total_k, kv, sf)
        new = _pair_allocator(result) if out is None else None
        as_given = out is None or kv is given[0]
        call = remember(scope, key if as_given else None, lambda: Call(launch, tensors, scalars, new, told=sf is None))
    keep_near(scope, LOAD, kv_cache.data_ptr(), call, tensors, (kv, sf), kv_cache, load_segments, total_k, kv, sf)
    return result


def _pair_allocator(like: KVCacheTensors) -> Callable[[], tuple[torch.Tensor, torch.Tensor | None]]:
    kv, sf = allocator(like.kv), None if like.sf is None else allocator(like.sf)
    return lambda: (kv(), None if sf is None else sf())


def load_slots(
    scope: Scope, kv_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor | None, layout: KVCacheFormat | None
) -> torch.Tensor:
    if is_traced(kv_cache):
        from kvhal import library

        return library.load_kv_slots(kv_cache, slots, out, layout)
    tensors = (kv_cache, slots) if out is None else (kv_cache, slots, out)
    key = call_key(Op.LOAD_SLOTS, (layout,), *tensors)
    call = find(scope, key, kv_cache)
    if call is not None:
        out = cast(torch.Tensor, call.new() if out is None else out)
        flat, rows = flattened(call, slots, out)
        call.launch(kv_cache, flat, rows)
    else:
        check_tensor("kv_cache", kv_cache, (torch.uint8, torch.bfloat16))
        geometry = geometry_of(kv_cache, layout)
        device, elements = kv_cache.device, geometry.layout.elements
        check_tensor("slots", slots, SLOT_DTYPES)
        check_contiguous("slots", slots)
        shape, given = (*slots.shape, elements), out is not None
        if out is None:
            out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        elif tuple(check_tensor("out", out, BF16).shape) != shape:
            reject("out", f"shape {tuple(out.shape)}", f"{shape}, one record a slot")
        check_same_device(device, "kv_cache", slots=slots, out=out)
        if slots.numel() == 0:
            return out
        rows, flat = _slot_rows(out, elements), slots.view(-1)
        check_apart("out", rows, kv_cache=kv_cache, slots=slots)
        if scope.policy.strict:
            strict.check_load_slots(slots, kv_cache.shape[0] * geometry.block_size)
        launch = bound(scope, Op.LOAD_SLOTS, geometry, geometry.layout, geometry.block_size, device)
        launch(kv_cache, flat, rows)
        new = None if given else allocator(out)
        width = 0 if slots.dim() == 1 else elements
        call = remember(scope, key, lambda: Call(launch, tensors, (layout,), new, width))
    keep_near(scope, LOAD_SLOTS, kv_cache.data_ptr(), call, tensors, (rows,), kv_cache, flat, rows)
    return out


def flattened(call: Call, slots: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A call's slots in one dimension, and its output in two."""
    return (slots.view(-1), out.view(-1, call.width)) if call.width else (slots, out)


def new_load_output(layout: KVCacheFormat, total_k: int, device: torch.device) -> KVCacheTensors:
    """Uninitialised tensors of the shapes that a load of `layout` returns."""
    if not layout.is_index:
        return KVCacheTensors(torch.empty((total_k, layout.elements), dtype=torch.bfloat16, device=device), None)
    dtype, trailing = sf_output(layout)
    data = torch.empty((total_k, layout.data_bytes), dtype=DATA_DTYPES[layout.quantized_dtype], device=device)
    return KVCacheTensors(data, torch.empty((total_k, *trailing), dtype=dtype, device=device))


def load_output(
    out: torch.Tensor | KVCacheTensors | None, layout: KVCacheFormat, total_k: int, device: torch.device
) -> KVCacheTensors:
    """`out` with as many tensors as a load of `layout` writes, or new ones when None."""
    if out is None:
        return new_load_output(layout, total_k, device)
    if isinstance(out, torch.Tensor):
        out = KVCacheTensors(out, None)
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"out: has a {type(out).__name__}, needs a torch.Tensor, a KVCacheTensors or None")
    if layout.is_index != (out[1] is not None):
        have = "no scales" if out[1] is None else "scales"
        need = "a KVCacheTensors with scales" if layout.is_index else "a bf16 tensor, or a KVCacheTensors with sf=None"
        reject("out", have, f"{need} for layout {layout}")
    return KVCacheTensors(*out)


def load_rows(result: KVCacheTensors, layout: KVCacheFormat, total_k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
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
