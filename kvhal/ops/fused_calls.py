"""`kvhal.ops.fused` where a call is not like the one before: an equal one is found, or it is validated and bound."""

from __future__ import annotations

import math
from dataclasses import replace
from numbers import Real
from types import NoneType
from typing import Any

import torch

from kvhal.binding import launcher
from kvhal.config import Scope
from kvhal.formats import KVCacheFormat
from kvhal.interface import STAGES, CastArgs, HadamardArgs, KVCacheOutArgs, Launcher, NormArgs, Op, RopeArgs
from kvhal.layout import geometry_of
from kvhal.ops import strict
from kvhal.ops.checks import (
    SLOT_DTYPES,
    check_apart,
    check_contiguous,
    check_flag,
    check_int,
    check_rows,
    check_same_device,
    check_tensor,
    check_type,
    record_rows,
    reject,
    unequal,
)
from kvhal.ops.fused_repeat import repeater, scalars_of, tensors_of
from kvhal.ops.repeated import FUSED_STORE, Call, allocator, call_key, find, is_traced, keep_near, remember

FP32_MAX = torch.finfo(torch.float32).max


def fused(
    scope: Scope,
    kv: torch.Tensor,
    norm: NormArgs | None,
    rope: RopeArgs | None,
    hadamard: HadamardArgs | None,
    casting: CastArgs,
    out: KVCacheOutArgs | None,
) -> torch.Tensor | None:
    if is_traced(kv):
        from kvhal import library

        return library.fused_store(kv, norm, rope, hadamard, casting, out)
    stages = (norm, rope, hadamard)
    scalars = scalars_of(*stages, casting, out)
    tensors = () if scalars is None else tensors_of(kv, norm, rope, out)
    key = None if scalars is None else call_key(Op.FUSED_STORE, scalars, *tensors)
    call = find(scope, key, out.kv_cache if key and out else None)
    cache: torch.Tensor | None
    slots: torch.Tensor | None
    if call is not None:
        back: torch.Tensor | None = call.new()
        cache, slots = (None, None) if out is None else (out.kv_cache, out.slot_mapping)
        call.launch(kv, *stages, cache, slots, back)
    else:
        check_tensor("kv", kv, (torch.bfloat16, torch.float32))
        check_types(*stages, casting, out)
        layout, block_size = _layout(kv, casting, out)
        rows = record_rows("kv", kv, layout.elements)
        norm, rope, cache, slots = check_arguments(rows, *stages, out)
        _check_memory(rows, norm, rope, cache, slots)
        stages = (norm, rope, hadamard)
        shape = (rows.shape[0], layout.elements)
        back = torch.empty(shape, dtype=torch.bfloat16, device=kv.device) if casting.cast_back else None
        if rows.shape[0] == 0:
            return back
        if scope.policy.strict:
            _check_values(rope, cache, slots, block_size)
        if back is None and cache is not None and cache.shape[0] == 0:
            return None
        names = tuple(name for name, on in zip(STAGES, stages, strict=True) if on is not None)
        launch = _bound(scope, layout, block_size, kv.device, names)
        launch(rows, *stages, cache, slots, back)
        new = None if back is None else allocator(back)
        key = key if rows is kv else None
        call = remember(scope, key, lambda: _remembered(launch, tensors, scalars, new))
    if call is not None:
        hint = 0 if cache is None else cache.data_ptr()
        aligned = (kv, None if norm is None else norm.weight, None if rope is None else rope.cos_sin_cache, back)
        keep_near(scope, FUSED_STORE, hint, call, tensors, aligned, kv, *stages, cache, slots, back)
    return back


def _remembered(launch: Launcher, tensors: tuple[torch.Tensor, ...], scalars: Any, new: Any) -> Call:
    call = Call(launch, tensors, scalars, new)
    call.repeat = repeater(scalars)
    return call


def _bound(
    scope: Scope, layout: KVCacheFormat, block_size: int | None, device: torch.device, stages: tuple[str, ...]
) -> Launcher:
    key = (Op.FUSED_STORE, layout, block_size, device, stages)
    launch: Launcher | None = scope.table.get(key)
    if launch is None:
        launch = scope.table[key] = launcher(scope, Op.FUSED_STORE, layout, block_size, device, stages)
    return launch


def check_types(norm: Any, rope: Any, hadamard: Any, cast: Any, out: Any) -> None:
    """What can be said without the tensors: classes, flags, and something to do."""
    check_type("cast_args", cast, CastArgs)
    optional = (("norm_args", norm, NormArgs), ("rope_args", rope, RopeArgs), ("hadamard_args", hadamard, HadamardArgs))
    for name, value, kind in (*optional, ("out_args", out, KVCacheOutArgs)):
        if value is not None:
            check_type(name, value, kind)
    check_flag("cast_args.round_sf", cast.round_sf)
    check_flag("cast_args.cast_back", cast.cast_back)
    if rope is not None:
        check_flag("rope_args.is_neox_style", rope.is_neox_style)
    if cast.round_sf != (cast.sf_format == "ue8m0"):
        reject("cast_args.round_sf", f"{cast.round_sf} with sf_format {cast.sf_format!r}", "True exactly for 'ue8m0'")
    if out is not None:
        check_tensor("out_args.kv_cache", out.kv_cache, (torch.uint8, torch.bfloat16), rank=4)
    elif not cast.cast_back:
        reject("out_args", "None without cast_args.cast_back", "a KVCacheOutArgs, or cast_back=True", "nothing would be done")


def _layout(kv: torch.Tensor, cast: CastArgs, out: KVCacheOutArgs | None) -> tuple[KVCacheFormat, int | None]:
    """The record's format and block size: the cache's, or the format that cast_args spells when nothing is stored."""
    if out is None:
        return _record(cast, kv.shape[1:].numel()), None
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


def check_arguments(
    rows: torch.Tensor,
    norm: NormArgs | None,
    rope: RopeArgs | None,
    hadamard: HadamardArgs | None,
    out: KVCacheOutArgs | None,
) -> tuple[NormArgs | None, RopeArgs | None, torch.Tensor | None, torch.Tensor | None]:
    """Norm and rotation with plain numbers, the cache and its slots; all arguments checked against the rows."""
    (tokens, elements), device = rows.shape, rows.device
    norm = None if norm is None else _check_norm(norm, elements, device)
    rope = None if rope is None else _check_rope(rope, elements, tokens, device)
    if hadamard is not None and elements & (elements - 1):
        reject("hadamard_args", f"records of {elements} elements", "a power of two")
    return norm, rope, *((None, None) if out is None else _check_out(out, tokens, device))


def _check_norm(norm: NormArgs, elements: int, device: torch.device) -> NormArgs:
    """The same with a plain float."""
    check_tensor("norm_args.weight", norm.weight, (torch.bfloat16, torch.float32), rank=1)
    if unequal(norm.weight.shape[0], elements):
        reject("norm_args.weight", f"{norm.weight.shape[0]} elements", f"{elements}, one an element of the record")
    check_contiguous("norm_args.weight", norm.weight)
    check_same_device(device, "kv", **{"norm_args.weight": norm.weight})
    if isinstance(norm.eps, bool) or not isinstance(norm.eps, Real):
        reject("norm_args.eps", f"a {type(norm.eps).__name__}", "a number")
    try:
        eps = float(norm.eps)
    except OverflowError:
        eps = math.inf
    if not 0 <= eps <= FP32_MAX:
        reject("norm_args.eps", eps, f"a number in [0, {FP32_MAX:.8g}], the range of fp32")
    return norm if type(norm.eps) is float else replace(norm, eps=eps)


def _check_rope(rope: RopeArgs, elements: int, tokens: int, device: torch.device) -> RopeArgs:
    """The same with plain ints."""
    check_tensor("rope_args.positions", rope.positions, SLOT_DTYPES, rank=1)
    check_contiguous("rope_args.positions", rope.positions)
    if unequal(rope.positions.shape[0], tokens):
        reject("rope_args.positions", f"{rope.positions.shape[0]} entries", f"{tokens}, one a token")
    width = check_int("rope_args.rope_dim", rope.rope_dim, 2, elements)
    if width % 2:
        reject("rope_args.rope_dim", width, "an even count")
    offset = None if rope.offset is None else check_int("rope_args.offset", rope.offset, 0, elements - width)
    check_tensor("rope_args.cos_sin_cache", rope.cos_sin_cache, (torch.float32,), rank=2)
    check_rows("rope_args.cos_sin_cache", rope.cos_sin_cache, columns=width)
    check_same_device(device, "kv", **{"rope_args.positions": rope.positions, "rope_args.cos_sin_cache": rope.cos_sin_cache})
    plain = type(rope.rope_dim) is int and type(rope.offset) in (NoneType, int)
    return rope if plain else replace(rope, rope_dim=width, offset=offset)


def _check_out(out: KVCacheOutArgs, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    slots = check_tensor("out_args.slot_mapping", out.slot_mapping, SLOT_DTYPES, rank=1)
    check_contiguous("out_args.slot_mapping", slots)
    if unequal(slots.shape[0], tokens):
        reject("out_args.slot_mapping", f"{slots.shape[0]} slots", f"{tokens}, one a token")
    check_same_device(device, "kv", **{"out_args.kv_cache": out.kv_cache, "out_args.slot_mapping": slots})
    return out.kv_cache, slots


def _check_memory(
    rows: torch.Tensor, norm: NormArgs | None, rope: RopeArgs | None, cache: torch.Tensor | None, slots: torch.Tensor | None
) -> None:
    arguments = {"out_args.slot_mapping": slots, "norm_args.weight": None if norm is None else norm.weight}
    if rope is not None:
        arguments |= {"rope_args.positions": rope.positions, "rope_args.cos_sin_cache": rope.cos_sin_cache}
    check_apart("out_args.kv_cache", cache, kv=rows, **arguments)


def _check_values(
    rope: RopeArgs | None, cache: torch.Tensor | None, slots: torch.Tensor | None, block_size: int | None
) -> None:
    if cache is not None and slots is not None and block_size is not None:
        strict.check_store_slots(slots, cache.shape[0] * block_size)
    if rope is not None:
        strict.check_positions(rope.positions, rope.cos_sin_cache.shape[0])
