"""The operations as torch.library operators (``torch.ops.kvhal.*``): what torch.compile sees.

Every operator writes into tensors that it is given and returns nothing; results are allocated before it, while tracing too.
A format travels as text, "" where it is inferred. The operators call the public functions, which validate; what a schema would
turn into something valid is checked before. Eager calls of the public functions never come here.
"""

from __future__ import annotations

from typing import cast

import torch

from kvhal.formats import KVCacheFormat, QuantizedDtype, ScaleFormat, format_from_text, format_to_text
from kvhal.interface import CastArgs, HadamardArgs, KVCacheOutArgs, NormArgs, RopeArgs
from kvhal.layout import check_format, layout_of
from kvhal.ops import cache as eager
from kvhal.ops import fused as eager_fused
from kvhal.ops import index as eager_index
from kvhal.ops import plan as eager_plan
from kvhal.ops.cache_calls import KVCacheTensors, load_output, load_rows
from kvhal.ops.checks import check_int, int32_output, record_rows
from kvhal.ops.fused_calls import check_arguments, check_types
from kvhal.ops.index_calls import check_base


def _text(layout: KVCacheFormat | None) -> str:
    check_format(layout)
    return "" if layout is None else format_to_text(layout)


def _layout(text: str) -> KVCacheFormat | None:
    return format_from_text(text) if text else None


@torch.library.custom_op("kvhal::store_kv_cache", mutates_args=("kv_cache",))
def _store(kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, layout: str) -> None:
    eager.store_kv_cache(kv, kv_cache, slot_mapping, layout=_layout(layout))


@torch.library.custom_op("kvhal::load_paged_kv_cache", mutates_args=("out", "out_sf"))
def _load(
    kv_cache: torch.Tensor,
    load_segments: torch.Tensor,
    total_k: int,
    out: torch.Tensor,
    out_sf: torch.Tensor | None,
    layout: str,
) -> None:
    if out.dtype == torch.uint8:
        out = out.view(torch.float8_e4m3fn)
    eager.load_paged_kv_cache(kv_cache, load_segments, total_k, KVCacheTensors(out, out_sf), layout=_layout(layout))


@torch.library.custom_op("kvhal::load_kv_slots", mutates_args=("out",))
def _load_slots(kv_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor, layout: str) -> None:
    eager.load_kv_slots(kv_cache, slots, out, layout=_layout(layout))


@torch.library.custom_op("kvhal::convert_kv_index", mutates_args=("topk_idxs",))
def _convert(topk_idxs: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor, block_size: int) -> None:
    eager_index.convert_kv_index(topk_idxs, block_tables, context_lens, block_size)


@torch.library.custom_op("kvhal::kv_index_cat", mutates_args=("out",))
def _cat(left: torch.Tensor, right: torch.Tensor, swa_cached: int, swa_cur: int, out: torch.Tensor) -> None:
    eager_index.kv_index_cat(left, right, swa_cached, swa_cur, out)


@torch.library.custom_op("kvhal::expand_swa_index", mutates_args=("out",))
def _expand(pivots: torch.Tensor, out: torch.Tensor) -> None:
    eager_index.expand_swa_index(pivots, out.shape[1], out)


@torch.library.custom_op("kvhal::get_kv_swa_index_decode", mutates_args=("out",))
def _decode(offset_len: torch.Tensor, swa_block_size: int, out: torch.Tensor) -> None:
    eager_index.get_kv_swa_index_decode(offset_len, out.shape[1], swa_block_size, out)


@torch.library.custom_op("kvhal::expand_load_plan", mutates_args=("out",))
def _expand_plan(spans: torch.Tensor, block_tables: torch.Tensor, block_size: int, out: torch.Tensor) -> None:
    eager_plan.expand_load_plan(spans, block_tables, block_size, out.shape[0], out)


@torch.library.custom_op("kvhal::fused_norm_rope_hadamard_cast_store_kvcache", mutates_args=("kv_cache", "back"))
def _fused(
    kv: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    rope: list[int],
    hadamard: bool,
    fmt: str | None,
    num_per_channels: int,
    round_sf: bool,
    sf_format: str | None,
    kv_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
    layout: str,
    back: torch.Tensor | None,
) -> None:
    result = eager_fused.fused_norm_rope_hadamard_cast_store_kvcache(
        kv,
        norm_args=None if weight is None else NormArgs(weight, eps),
        rope_args=None if positions is None else RopeArgs(positions, cos_sin_cache, rope[0], bool(rope[1]), *rope[2:]),
        hadamard_args=HadamardArgs() if hadamard else None,
        cast_args=CastArgs(
            cast(QuantizedDtype | None, fmt),
            num_per_channels,
            round_sf,
            cast(ScaleFormat | None, sf_format),
            cast_back=back is not None,
        ),
        out_args=None if kv_cache is None else KVCacheOutArgs(kv_cache, slot_mapping, _layout(layout)),
    )
    if back is not None and result is not None:
        back.copy_(result)


@_store.register_fake
@_load.register_fake
@_load_slots.register_fake
@_convert.register_fake
@_cat.register_fake
@_expand.register_fake
@_decode.register_fake
@_expand_plan.register_fake
@_fused.register_fake
def _writes_only(*arguments: object) -> None:
    """Results are arguments: there is nothing to shape. Called for a meta tensor too, whatever the others are."""
    devices = {str(given.device) for given in arguments if isinstance(given, torch.Tensor)}
    if len(devices) > 1:
        raise ValueError(f"tensors: have devices {', '.join(sorted(devices))}, need one device")


# What the public functions do while compiling: check what is no tensor, allocate, then call the operator.


def store_kv_cache(kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, layout: KVCacheFormat | None) -> None:
    torch.ops.kvhal.store_kv_cache(kv, kv_cache, slot_mapping, _text(layout))


def load_paged_kv_cache(
    kv_cache: torch.Tensor,
    load_segments: torch.Tensor,
    total_k: int,
    out: torch.Tensor | KVCacheTensors | None,
    layout: KVCacheFormat | None,
    sf_format: ScaleFormat | None,
) -> KVCacheTensors:
    layout = layout_of(kv_cache.dtype, kv_cache.shape[-1], layout, sf_format)
    result = load_output(out, layout, check_int("total_k", total_k, 0), kv_cache.device)
    load_rows(result, layout, total_k)
    # float8 results go in as bytes: torch's own operator checks cannot compare float8 tensors
    data = result.kv.view(torch.uint8) if result.kv.dtype == torch.float8_e4m3fn else result.kv
    torch.ops.kvhal.load_paged_kv_cache(kv_cache, load_segments, total_k, data, result.sf, _text(layout))
    return result


def load_kv_slots(
    kv_cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor | None, layout: KVCacheFormat | None
) -> torch.Tensor:
    layout = layout_of(kv_cache.dtype, kv_cache.shape[-1], layout)
    if out is None:
        out = torch.empty((*slots.shape, layout.elements), dtype=torch.bfloat16, device=kv_cache.device)
    torch.ops.kvhal.load_kv_slots(kv_cache, slots, out, _text(layout))
    return out


def convert_kv_index(
    topk_idxs: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor, block_size: int
) -> torch.Tensor:
    torch.ops.kvhal.convert_kv_index(topk_idxs, block_tables, context_lens, check_int("block_size", block_size, 1))
    return topk_idxs


def kv_index_cat(
    left: torch.Tensor, right: torch.Tensor, swa_cached: int, swa_cur: int, out: torch.Tensor | None
) -> torch.Tensor:
    check_base(swa_cached, swa_cur)
    out = int32_output(out, (left.shape[0], left.shape[1] + right.shape[1]), left.device)
    torch.ops.kvhal.kv_index_cat(left, right, swa_cached, swa_cur, out)
    return out


def expand_swa_index(pivots: torch.Tensor, width: int, out: torch.Tensor | None) -> torch.Tensor:
    out = int32_output(out, (pivots.shape[0], check_int("width", width, 0)), pivots.device)
    torch.ops.kvhal.expand_swa_index(pivots, out)
    return out


def get_kv_swa_index_decode(
    offset_len: torch.Tensor, window_size: int, swa_block_size: int, out: torch.Tensor | None
) -> torch.Tensor:
    swa_block_size = check_int("swa_block_size", swa_block_size, 1)
    out = int32_output(out, (offset_len.shape[0], check_int("window_size", window_size, 0)), offset_len.device)
    torch.ops.kvhal.get_kv_swa_index_decode(offset_len, swa_block_size, out)
    return out


def expand_load_plan(
    spans: torch.Tensor, block_tables: torch.Tensor, block_size: int, num_segments: int, out: torch.Tensor | None
) -> torch.Tensor:
    block_size = check_int("block_size", block_size, 1)
    out = int32_output(out, (check_int("num_segments", num_segments, 0), 4), spans.device)
    torch.ops.kvhal.expand_load_plan(spans, block_tables, block_size, out)
    return out


def fused_store(
    kv: torch.Tensor,
    norm: NormArgs | None,
    rope: RopeArgs | None,
    hadamard: HadamardArgs | None,
    cast_args: CastArgs,
    out: KVCacheOutArgs | None,
) -> torch.Tensor | None:
    check_types(norm, rope, hadamard, cast_args, out)
    rows = record_rows("kv", kv, kv.shape[1:].numel())
    norm, rope, cache, slots = check_arguments(rows, norm, rope, hadamard, out)
    back = torch.empty(rows.shape, dtype=torch.bfloat16, device=kv.device) if cast_args.cast_back else None
    rotation: list[int] = []
    if rope is not None:
        rotation = [rope.rope_dim, int(rope.is_neox_style), *(() if rope.offset is None else (rope.offset,))]
    torch.ops.kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
        kv,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        None if rope is None else rope.positions,
        None if rope is None else rope.cos_sin_cache,
        rotation,
        hadamard is not None,
        cast_args.fmt,
        cast_args.num_per_channels,
        cast_args.round_sf,
        cast_args.sf_format,
        cache,
        slots,
        _text(None if out is None else out.layout),
        back,
    )
    return back
