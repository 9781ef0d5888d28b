"""`fused_norm_rope_hadamard_cast_store_kvcache` in Triton: fp32 stages in registers, one rounding, then the store.

docs/numerics.md fixes the order of every fp32 operation: sums are trees over adjacent pairs, never a reduction over more
than two elements, and products are rounded before they are added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl

from kvhal.backends.portable_triton.codec import decode_scale, dequantise_codes, reciprocal, round_bf16, to_fp32
from kvhal.backends.portable_triton.codec_e2m1 import dequantise_words
from kvhal.backends.portable_triton.launch import Kernel, launch_shape
from kvhal.backends.portable_triton.load import write_rows
from kvhal.backends.portable_triton.record import record_of
from kvhal.backends.portable_triton.store import element_of, quantise, record_bases, resolve_slots, write_records
from kvhal.interface import Launcher, NormArgs, Request, RopeArgs


@dataclass(frozen=True)
class Stages:
    """What a fused kernel does, as a compile-time constant.

    Attributes:
        norm, hadamard, store, back: the stage or output is on.
        rope_dim, rope_offset, neox: the rotated elements; rope_dim 0 is no rotation.
        scale: fp32 factor of the Hadamard transform.
    """

    norm: bool
    rope_dim: int
    rope_offset: int
    neox: bool
    hadamard: bool
    store: bool
    back: bool
    scale: float


@triton.jit
def sum_of_pairs(values, rec: tl.constexpr):
    """Sum of each row of fp32 [T, tile] by the tree over adjacent pairs."""
    levels: tl.constexpr = rec.levels
    for _ in tl.static_range(levels):
        values = tl.sum(tl.reshape(values, (values.shape[0], values.shape[1] // 2, 2)), axis=2)
    return tl.reshape(values, (values.shape[0],))


@triton.jit
def rms_norm(x, weight, eps, rec: tl.constexpr):
    """``(x * (1 / sqrt(mean(x^2) + eps))) * weight`` of fp32 [T, tile] and fp32 [tile]."""
    total = sum_of_pairs(x * x, rec)
    if rec.tile == rec.elements:  # a power of two: the product is as exact as the quotient
        mean = total * (1.0 / rec.elements)
    else:
        mean = tl.div_rn(total, tl.full(total.shape, rec.elements, tl.float32))
    inverse = reciprocal(tl.sqrt_rn(mean + eps), rec.ptx)
    return (x * inverse[:, None]) * weight[None, :]


@triton.jit
def rotate_pairs(x, cos_sin, ok, stages: tl.constexpr):
    """Rotates pairs (2i, 2i + 1) of fp32 [T, tile]; `cos_sin` are pointers [T] to a position's cosines."""
    half: tl.constexpr = x.shape[1] // 2
    a, b = tl.split(tl.reshape(x, (x.shape[0], half, 2)))
    pair = tl.arange(0, half) - stages.rope_offset // 2
    rotated = ((pair >= 0) & (pair < stages.rope_dim // 2))[None, :]
    mask = rotated & ok[:, None]
    cos = tl.load(cos_sin[:, None] + pair[None, :], mask=mask, other=0.0)
    sin = tl.load(cos_sin[:, None] + (stages.rope_dim // 2 + pair)[None, :], mask=mask, other=0.0)
    first = tl.where(rotated, a * cos - b * sin, a)
    second = tl.where(rotated, b * cos + a * sin, b)
    return tl.reshape(tl.join(first, second), x.shape)


@triton.jit
def rotate_any(x, cos_sin, ok, stages: tl.constexpr):
    """Rotates the pairs of any style at any offset of fp32 [T, tile], fetching each element's partner."""
    half: tl.constexpr = stages.rope_dim // 2
    column = tl.arange(0, x.shape[1])
    place = column - stages.rope_offset
    rotated = (place >= 0) & (place < stages.rope_dim)
    if stages.neox:
        is_first, pair = place < half, place % half
        partner = tl.where(is_first, column + half, column - half)
    else:
        is_first, pair = place % 2 == 0, place // 2
        partner = tl.where(is_first, column + 1, column - 1)
    partner = tl.where(rotated, partner, column)
    other = tl.gather(x, tl.broadcast_to(partner[None, :], x.shape), axis=1)
    mask = rotated[None, :] & ok[:, None]
    cos = tl.load(cos_sin[:, None] + pair[None, :], mask=mask, other=0.0)
    sin = tl.load(cos_sin[:, None] + (half + pair)[None, :], mask=mask, other=0.0)
    turned = tl.where(is_first[None, :], x * cos - other * sin, x * cos + other * sin)
    return tl.where(rotated[None, :], turned, x)


@triton.jit
def rotate(x, cos_sin, ok, stages: tl.constexpr):
    """Rotary embedding of fp32 [T, tile]; `cos_sin` are pointers [T] to a position's cosines, which exist where ok."""
    if stages.neox or stages.rope_offset % 2 != 0:
        x = rotate_any(x, cos_sin, ok, stages)
    else:
        x = rotate_pairs(x, cos_sin, ok, stages)
    return x


@triton.jit
def hadamard(x, rec: tl.constexpr, scale: tl.constexpr):
    """Normalised Walsh-Hadamard transform of each row of fp32 [T, tile]."""
    rows: tl.constexpr = x.shape[0]
    tile: tl.constexpr = x.shape[1]
    levels: tl.constexpr = rec.levels
    for level in tl.static_range(levels):
        pairs = tl.reshape(x, (rows, tile // (2 << level), 2, 1 << level))
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (rows, tile))
    return x * scale


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
):
    row = tl.program_id(0).to(tl.int64) * tokens + tl.arange(0, tokens)
    wanted = row < n
    element, exists = element_of(tl.arange(0, rec.groups * rec.group), rec)
    source = kv_ptr + row[:, None] * kv_stride + element[None, :]
    x = to_fp32(tl.load(source, mask=wanted[:, None] & exists[None, :], other=0.0))
    if stages.norm:
        x = rms_norm(x, to_fp32(tl.load(weight_ptr + element, mask=exists, other=0.0)), eps, rec)
    if stages.rope_dim > 0:
        position = tl.load(positions_ptr + row, mask=wanted, other=-1).to(tl.int64)
        known = (position >= 0) & (position < max_position)
        x = rotate(x, cos_sin_ptr + position * cos_sin_stride, known, stages)
    if stages.hadamard:
        x = hadamard(x, rec, stages.scale)
    bits = round_bf16(x, rec.native)
    if not rec.dense:
        bits = tl.where(exists[None, :], bits, 0)
    data, scale = quantise(bits, rec)
    if stages.store:
        block, token, ok = resolve_slots(slots_ptr, row, n, num_blocks, rec)
        base, sf_base = record_bases(cache_ptr, block_stride, block, token, rec)
        write_records(base, sf_base, ok, data, scale, rec)
    if stages.back:
        write_rows(back_ptr, back_stride, row, wanted, dequantise(data, scale, rec), rec)


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
    tokens, warps = launch_shape("fused", record, request.platform.arch)
    unit = record.block_unit if layout.quantized_dtype else record.block_unit // 2
    kernels: dict[tuple, Kernel] = {}

    def kernel_of(norm: NormArgs | None, rope: RopeArgs | None, *flags: bool) -> Kernel:
        rotation = (0, 0, False) if rope is None else (rope.rope_dim, _offset(rope), rope.is_neox_style)
        key = (norm is None, rotation, flags)
        kernel = kernels.get(key)
        if kernel is None:
            stages = Stages(norm is not None, *rotation, *flags, scale=record.elements**-0.5)
            # ptxas 12.8 packs four codes of the hardware's cast to a register and, where single codes are used again, reads
            # another one (wrong bytes on an H200): kernels that give rows back encode by integers
            codec = replace(record, native=False) if stages.back else record
            kernel = kernels[key] = Kernel(fused_kernel, (codec, stages, tokens), warps)
        return kernel

    def _offset(rope: RopeArgs) -> int:
        return record.elements - rope.rope_dim if rope.offset is None else rope.offset

    def launch(kv, norm, rope, hadamard, cache, slots, back):
        n = kv.shape[0]
        # an argument that a kernel does not look at gets the rows: a pointer that exists
        weight, eps = (kv, 0.0) if norm is None else (norm.weight, norm.eps)
        positions, table = (kv, kv) if rope is None else (rope.positions, rope.cos_sin_cache)
        blocks, block_stride = (0, 0) if cache is None else (cache.shape[0], cache.stride(0) // unit)
        kernel_of(norm, rope, hadamard is not None, cache is not None, back is not None)(
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

    return launch
