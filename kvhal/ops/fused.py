"""The fused store: RMSNorm, rotary embedding, Hadamard, cast and scatter in one pass over the rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import torch
from torch.compiler import is_compiling

from kvhal.binding import launcher
from kvhal.config import Scope, current
from kvhal.formats import KVCacheFormat
from kvhal.interface import CastArgs, HadamardArgs, KVCacheOutArgs, Launcher, NormArgs, Op, RopeArgs
from kvhal.layout import geometry_of
from kvhal.ops import strict
from kvhal.ops.checks import (
    SLOT_DTYPES,
    check_contiguous,
    check_int,
    check_rows,
    check_same_device,
    check_tensor,
    check_type,
    record_rows,
    reject,
)
from kvhal.ops.repeated import call_key, remember, repeated


def fused_norm_rope_hadamard_cast_store_kvcache(
    kv: torch.Tensor,
    *,
    norm_args: NormArgs | None = None,
    rope_args: RopeArgs | None = None,
    hadamard_args: HadamardArgs | None = None,
    cast_args: CastArgs,
    out_args: KVCacheOutArgs | None = None,
) -> torch.Tensor | None:
    """RMSNorm -> RoPE -> Hadamard in fp32, one rounding to bf16, then exactly `store_kv_cache` of that bf16.

    Args:
        kv: bf16 or fp32 ``[n, ...]``; the trailing dimensions flatten to one record; any row stride.
        norm_args, rope_args, hadamard_args: the stages; None leaves one out.
        cast_args: what the cast produces; must agree with the cache's layout.
        out_args: the cache and its slots (as in `store_kv_cache`); None stores nothing, which needs cast_back.

    Returns:
        With ``cast_args.cast_back`` the dequantised bf16 ``[n, elements]``, rows of skipped slots too; otherwise None.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit, or cast_args contradicts the cache; nothing was written.
        InvalidMetadata: strict mode, a slot or position is out of range, or a slot occurs twice.
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.

    The order of every fp32 operation is fixed (docs/numerics.md), so that all backends write the same bytes.
    """
    if is_compiling():
        from kvhal import library

        return library.fused_store(kv, norm_args, rope_args, hadamard_args, cast_args, out_args)
    scope = current()
    key = _key(kv, norm_args, rope_args, hadamard_args, cast_args, out_args)
    launch = repeated(scope, key, out_args.kv_cache if key and out_args else None)
    if launch is not None:
        back = torch.empty(kv.shape, dtype=torch.bfloat16, device=kv.device) if cast_args.cast_back else None
        cache, slots = (None, None) if out_args is None else (out_args.kv_cache, out_args.slot_mapping)
        launch(kv, norm_args, _with_offset(rope_args, kv.shape[1]), hadamard_args, cache, slots, back)
        return back
    check_tensor("kv", kv, (torch.bfloat16, torch.float32))
    _check_types(norm_args, rope_args, hadamard_args, cast_args, out_args)
    layout, block_size = _layout(kv, cast_args, out_args)
    rows = record_rows("kv", kv, layout.elements)
    device, tokens = kv.device, rows.shape[0]
    norm = None if norm_args is None else _check_norm(norm_args, layout.elements, device)
    rope = None if rope_args is None else _check_rope(rope_args, layout.elements, tokens, device)
    if hadamard_args is not None and layout.elements & (layout.elements - 1):
        reject("hadamard_args", f"records of {layout.elements} elements", "a power of two")
    cache, slots = (None, None) if out_args is None else _check_out(out_args, tokens, device)
    back = torch.empty((tokens, layout.elements), dtype=torch.bfloat16, device=device) if cast_args.cast_back else None
    if tokens == 0 or (back is None and cache is not None and cache.shape[0] == 0):
        return back
    if scope.policy.strict:
        _check_values(rope, cache, slots, block_size)
    stages = tuple(name for name, on in (("norm", norm), ("rope", rope), ("hadamard", hadamard_args)) if on is not None)
    launch = _bound(scope, layout, block_size, device, stages)
    launch(rows, norm, rope, hadamard_args, cache, slots, back)
    if rows is kv:
        remember(scope, key, launch)
    return back


def _key(kv: object, norm: object, rope: object, hadamard: object, casting: object, out: object) -> tuple[Any, ...] | None:
    """The key of a call whose arguments have their own classes and whose numbers are plain ints."""
    tensors, scalars = [kv], [hadamard, casting]
    if isinstance(norm, NormArgs):
        tensors.append(norm.weight)
        scalars.append(norm.eps)
    elif norm is not None:
        return None
    if isinstance(rope, RopeArgs):
        tensors += (rope.positions, rope.cos_sin_cache)
        scalars += (rope.rope_dim, rope.is_neox_style, rope.offset)
        if type(rope.rope_dim) is not int or not (rope.offset is None or type(rope.offset) is int):
            return None
    elif rope is not None:
        return None
    if isinstance(out, KVCacheOutArgs):
        tensors += (out.kv_cache, out.slot_mapping)
        scalars.append(out.layout)
    elif out is not None:
        return None
    return call_key(Op.FUSED_STORE, (norm is None, rope is None, out is None, *scalars), *tensors)


def _with_offset(rope: RopeArgs | None, elements: int) -> RopeArgs | None:
    """The rotation with its first element written out."""
    if rope is None or rope.offset is not None:
        return rope
    return replace(rope, offset=elements - rope.rope_dim)


def _bound(
    scope: Scope, layout: KVCacheFormat, block_size: int | None, device: torch.device, stages: tuple[str, ...]
) -> Launcher:
    key = (Op.FUSED_STORE, layout, block_size, device, stages)
    launch: Launcher | None = scope.table.get(key)
    if launch is None:
        launch = scope.table[key] = launcher(scope, Op.FUSED_STORE, layout, block_size, device, stages)
    return launch


def _check_types(norm: object, rope: object, hadamard: object, cast: object, out: object) -> None:
    check_type("cast_args", cast, CastArgs)
    optional = (("norm_args", norm, NormArgs), ("rope_args", rope, RopeArgs), ("hadamard_args", hadamard, HadamardArgs))
    for name, value, kind in (*optional, ("out_args", out, KVCacheOutArgs)):
        if value is not None:
            check_type(name, value, kind)


def _layout(kv: torch.Tensor, cast: CastArgs, out: KVCacheOutArgs | None) -> tuple[KVCacheFormat, int | None]:
    """The record's format and block size: the cache's, or the format that cast_args spells when nothing is stored."""
    if cast.round_sf != (cast.sf_format == "ue8m0"):
        reject("cast_args.round_sf", f"{cast.round_sf} with sf_format {cast.sf_format!r}", "True exactly for 'ue8m0'")
    if out is None:
        if not cast.cast_back:
            reject(
                "out_args", "None without cast_args.cast_back", "a KVCacheOutArgs, or cast_back=True", "nothing would be done"
            )
        return _record(cast, kv.shape[1:].numel()), None
    check_tensor("out_args.kv_cache", out.kv_cache, (torch.uint8, torch.bfloat16), rank=4)
    layout = geometry_of(out.kv_cache, out.layout, None if out.layout else cast.sf_format).layout
    have = (cast.fmt, cast.num_per_channels, cast.sf_format)
    need = (layout.quantized_dtype, layout.elements_per_sf, layout.sf_format)
    if have != need:
        reject("cast_args", f"(fmt, num_per_channels, sf_format) = {have}", f"{need}, as the cache's layout {layout}")
    return layout, out.kv_cache.shape[1]


def _record(cast: CastArgs, elements: int) -> KVCacheFormat:
    """A record of `elements` as cast_args spells it; its scales follow its data, since no cache says otherwise."""
    group, scale = cast.num_per_channels, cast.sf_format
    try:
        if cast.fmt is None:
            return KVCacheFormat(None, 0, group, elements, False, scale, "cast_args")
        return KVCacheFormat(cast.fmt, elements, group, 0, True, scale, "cast_args", token_interleaved=True)
    except ValueError as error:
        raise ValueError(f"cast_args: {error}") from error


def _check_norm(norm: NormArgs, elements: int, device: torch.device) -> NormArgs:
    check_tensor("norm_args.weight", norm.weight, (torch.bfloat16, torch.float32), rank=1)
    if norm.weight.shape[0] != elements:
        reject("norm_args.weight", f"{norm.weight.shape[0]} elements", f"{elements}, one an element of the record")
    check_contiguous("norm_args.weight", norm.weight)
    if not (isinstance(norm.eps, float | int) and math.isfinite(norm.eps) and norm.eps >= 0):
        reject("norm_args.eps", norm.eps, "a finite number >= 0")
    check_same_device(device, "kv", **{"norm_args.weight": norm.weight})
    return norm


def _check_rope(rope: RopeArgs, elements: int, tokens: int, device: torch.device) -> RopeArgs:
    check_tensor("rope_args.positions", rope.positions, SLOT_DTYPES, rank=1)
    check_contiguous("rope_args.positions", rope.positions)
    if rope.positions.shape[0] != tokens:
        reject("rope_args.positions", f"{rope.positions.shape[0]} entries", f"{tokens}, one a token")
    width = check_int("rope_args.rope_dim", rope.rope_dim, 2, elements)
    if width % 2:
        reject("rope_args.rope_dim", width, "an even count")
    if rope.offset is not None:
        check_int("rope_args.offset", rope.offset, 0, elements - width)
    check_tensor("rope_args.cos_sin_cache", rope.cos_sin_cache, (torch.float32,), rank=2)
    check_rows("rope_args.cos_sin_cache", rope.cos_sin_cache, columns=width)
    check_same_device(device, "kv", **{"rope_args.positions": rope.positions, "rope_args.cos_sin_cache": rope.cos_sin_cache})
    return cast(RopeArgs, _with_offset(rope, elements))


def _check_out(out: KVCacheOutArgs, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    slots = check_tensor("out_args.slot_mapping", out.slot_mapping, SLOT_DTYPES, rank=1)
    check_contiguous("out_args.slot_mapping", slots)
    if slots.shape[0] != tokens:
        reject("out_args.slot_mapping", f"{slots.shape[0]} slots", f"{tokens}, one a token")
    check_same_device(device, "kv", **{"out_args.kv_cache": out.kv_cache, "out_args.slot_mapping": slots})
    return out.kv_cache, slots


def _check_values(
    rope: RopeArgs | None, cache: torch.Tensor | None, slots: torch.Tensor | None, block_size: int | None
) -> None:
    if cache is not None and slots is not None and block_size is not None:
        strict.check_store_slots(slots, cache.shape[0] * block_size)
    if rope is not None:
        strict.check_positions(rope.positions, rope.cos_sin_cache.shape[0])
