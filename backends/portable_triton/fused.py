"""`fused_norm_rope_hadamard_cast_store_kvcache` in Triton: fp32 stages in registers, one rounding, then the store."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from kvhal.backends.portable_triton.codec import BF16_LOW, decode_scale, dequantise_codes, round_bf16, to_fp32
from kvhal.backends.portable_triton.codec_e2m1 import dequantise_words
from kvhal.backends.portable_triton.launch import Kernel, await_previous, few_shape, launch_shape, let_next_start, prefetch_rows
from kvhal.backends.portable_triton.load import write_rows
from kvhal.backends.portable_triton.packed import addresses, pair_bf16, rows_of
from kvhal.backends.portable_triton.prepared import launcher
from kvhal.backends.portable_triton.record import by_pairs, record_of, whole_octets
from kvhal.backends.portable_triton.stages import Stages, hadamard, pair_turns, rms_norm, rotate_any, rotate_pairs
from kvhal.backends.portable_triton.store import (
    element_of,
    quantise,
    quantise_packed,
    record_bases,
    resolve_slots,
    write_records,
)
from kvhal.interface import Launcher, NormArgs, Request, RopeArgs
from kvhal.operands import tensors_only


@triton.jit(
    do_not_specialize=["n", "num_blocks", "block_stride", "max_position"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"],
)
def fused_kernel(
    kv_ptr,
    kv_stride,
    weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    cos_sin_stride,
    cache_ptr,
    slots_ptr,
    back_ptr,
    back_stride,
    eps: tl.float32,
    n: tl.int64,
    max_position: tl.int64,
    num_blocks: tl.int64,
    block_stride: tl.int64,
    rec: tl.constexpr,
    stages: tl.constexpr,
    tokens: tl.constexpr,
    early: tl.constexpr,
):
    let_next_start(early)
    row = tl.program_id(0).to(tl.int64) * tokens + tl.arange(0, tokens)
    wanted = row < n
    rows = kv_ptr + tl.minimum(row, n - 1) * kv_stride
    if tokens == 1:  # else grids are hardly ever small, and one of the kernels would take 23 registers more
        prefetch_rows(early, rows, wanted, rec.tile, rec.elements)
    await_previous(early)
    # everything that a later stage waits for is asked for first
    if stages.rope_dim > 0:
        position = tl.load(positions_ptr + tl.minimum(row, n - 1)).to(tl.int64)
    if stages.store:
        block, token, ok = resolve_slots(slots_ptr, row, n, num_blocks, rec)
    x = load_rows(rows, rec)
    if stages.norm:
        weight = to_fp32(load_weights(weight_ptr, tokens, rec))
    if stages.rope_dim > 0:
        known = (position >= 0) & (position < max_position)
        cos_sin = cos_sin_ptr + position * cos_sin_stride
        adjacent: tl.constexpr = not stages.neox and stages.rope_offset % 2 == 0
        if adjacent:
            cos, sin = pair_turns(cos_sin, known, rec, stages)
    x = to_fp32(x)
    if stages.norm:
        x = rms_norm(x, weight, eps, rec)
    if stages.rope_dim > 0:
        x = rotate_pairs(x, cos, sin, stages) if adjacent else rotate_any(x, cos_sin, known, stages)
    if stages.hadamard:
        x = hadamard(x, rec, stages.scale)
    if rec.pairs:
        low, high = tl.split(tl.reshape(x, (tokens, rec.tile // 2, 2)))
        data, scale = quantise_packed(pair_bf16(low, high), rec)
    else:
        data, scale = quantise(masked_bits(x, stages.hadamard, rec), rec)
    if stages.store:
        base, sf_base = record_bases(cache_ptr, block_stride, block, token, rec)
        write_records(base, sf_base, ok, data, scale, rec)
    if stages.back:
        write_rows(back_ptr, back_stride, row, wanted, dequantise(data, scale, rec), rec)


@triton.jit
def load_rows(source, rec: tl.constexpr):
    """bf16 or fp32 [T, tile] of rows at `source` (pointers [T]) that exist: a mask would clear registers first."""
    if rec.pairs:
        x = rows_of(tl.load(addresses(source, rec, 8)))
    else:
        element, exists = element_of(tl.arange(0, rec.groups * rec.group), rec)
        x = tl.load(source[:, None] + element[None, :], mask=exists[None, :], other=0.0)
    return x


@triton.jit
def load_weights(weight_ptr, rows: tl.constexpr, rec: tl.constexpr):
    """bf16 or fp32 [1, tile], or [rows, tile] where a lane has one row and so reads no more than it needs."""
    if rec.pairs:
        weight = rows_of(tl.load(addresses(weight_ptr + tl.zeros((rows,), tl.int32), rec, 8)))
    else:
        element, exists = element_of(tl.arange(0, rec.groups * rec.group), rec)
        weight = tl.load(weight_ptr + element, mask=exists, other=0.0)[None, :]
    return weight


@triton.jit
def masked_bits(x, alone: tl.constexpr, rec: tl.constexpr):
    """bf16 bits int16 [T, tile] of fp32, zero where there is no element.

    Args:
        alone: neighbours are in other lanes, where the cast of a single number is a slower instruction than that of a pair.
    """
    if alone and rec.native:
        bits = (pair_bf16(x, tl.zeros_like(x)) & BF16_LOW).to(tl.int16)
    else:
        bits = round_bf16(x, rec.native)
    if not rec.dense:
        _, exists = element_of(tl.arange(0, rec.groups * rec.group), rec)
        bits = tl.where(exists[None, :], bits, 0)
    return bits


@triton.jit
def dequantise(data, scale, rec: tl.constexpr):
    """bf16 bits int16 [T, tile] of what `quantise` returned."""
    if rec.dtype == "bf16":
        bits = data
    else:
        factor = decode_scale(scale if rec.sf_format == "fp32" else scale.to(tl.uint8), rec)
        bits = dequantise_codes(data, factor, rec) if rec.dtype == "e4m3" else dequantise_words(data, factor, rec)
    return bits


def bind_fused_store(request: Request) -> Launcher:
    """The launcher of FUSED_STORE (kvhal.interface, "Launchers")."""
    layout = request.layout
    record = record_of(layout, request.block_size or 1, request.platform)
    record = replace(record, narrow=record.token_stride % 8 == 0)  # a claim about addresses: only where it is true
    packed = by_pairs(record)
    unit = record.block_unit if layout.quantized_dtype else record.block_unit // 2
    kernels: dict[tuple, tuple[Kernel, int]] = {}
    limit, few_warps = few_shape("fused_few", record, request.platform)

    def kernel_of(octets: bool, few: bool, norm: NormArgs | None, rope: RopeArgs | None, *flags: bool) -> tuple[Kernel, int]:
        rotation = (0, 0, False) if rope is None else (rope.rope_dim, rope.first(record.elements), rope.is_neox_style)
        key = (octets, few, norm is None, rotation, flags)
        kernel = kernels.get(key)
        if kernel is None:
            stages = Stages(norm is not None, *rotation, *flags, scale=record.elements**-0.5)
            # ptxas 12.8 packs four codes of the hardware's cast to a register and, where single codes are used again, reads
            # another one (wrong bytes on an H200): kernels that give rows back encode by integers
            codec = replace(record, native=False) if stages.back else packed
            codec = replace(codec, guarded=not few)
            # of a Hadamard transform and a single group by pairs Triton makes code that spills kilobytes a lane
            codec = replace(codec, pairs=codec.pairs and octets and not (stages.hadamard and record.groups == 1))
            name = "fused_pairs" if codec.pairs else "fused"
            tokens, warps = (1, few_warps) if few else launch_shape(name, codec, request.platform.arch)
            made = Kernel(fused_kernel, (codec, stages, tokens), warps, request.platform, even=True)
            kernel = kernels[key] = made, tokens
        return kernel

    def call_of(kv, norm, rope, hadamard, cache, slots, back):
        n = kv.shape[0]
        # an argument that a kernel does not look at gets the rows: a pointer that exists
        weight, eps = (kv, 0.0) if norm is None else (norm.weight, norm.eps)
        positions, table = (kv, kv) if rope is None else (rope.positions, rope.cos_sin_cache)
        blocks, block_stride = (0, 0) if cache is None else (cache.shape[0], cache.stride(0) // unit)
        few = n <= limit
        octets = packed.pairs and not few and whole_octets(kv)
        kernel, tokens = kernel_of(octets, few, norm, rope, hadamard is not None, cache is not None, back is not None)
        return (
            kernel,
            (n + tokens - 1) // tokens,
            kv,
            kv.stride(0),
            weight,
            positions,
            table,
            table.stride(0),
            kv if cache is None else cache,
            kv if slots is None else slots,
            kv if back is None else back,
            0 if back is None else back.stride(0),
            float(eps),
            n,
            table.shape[0],
            blocks,
            block_stride,
        )

    return launcher(call_of, request.platform, tensors_only)
