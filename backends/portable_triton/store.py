"""`store_kv_cache` in Triton: one kernel for every format, a few tokens a program."""

from __future__ import annotations

import triton
import triton.language as tl

from kvhal.backends.portable_triton.codec import quantise_e2m1, quantise_e4m3
from kvhal.backends.portable_triton.launch import Kernel, native, store_shape
from kvhal.backends.portable_triton.record import record_of
from kvhal.interface import Launcher, Request


@triton.jit
def resolve_slots(slots_ptr, row, n, num_blocks, rec: tl.constexpr):
    """Block, token in the block, and whether the slot is in the cache, for rows [T] (int64) of a slot mapping."""
    slot = tl.load(slots_ptr + row, mask=row < n, other=-1)
    inside = slot >= 0
    slot = tl.where(inside, slot, 0)
    block = (slot // rec.block_size).to(tl.int64)
    token = (slot % rec.block_size).to(tl.int64)
    return block, token, inside & (block < num_blocks)


@triton.jit
def element_of(column, rec: tl.constexpr):
    """Element at a column of the padded tile, and whether there is one."""
    if rec.dense:
        return column, column >= 0
    within = column % rec.group
    element = (column // rec.group) * rec.elements_per_sf + within
    return element, (within < rec.elements_per_sf) & (element < rec.elements)


@triton.jit
def write_words(base, words, ok, rec: tl.constexpr):
    """Writes e2m1 words int32 [T, tile / 8] to rows at `base` (uint8 pointers [T])."""
    if rec.words:
        word = tl.arange(0, words.shape[1])
        per_group: tl.constexpr = rec.group // 8
        if rec.dense:
            offset, exists = word, word >= 0
        else:
            within = word % per_group
            offset = (word // per_group) * (rec.elements_per_sf // 8) + within
            exists = (within < rec.elements_per_sf // 8) & (offset < rec.elements // 8)
        target = base.to(tl.pointer_type(tl.int32))[:, None] + offset[None, :]
        tl.store(target, words, mask=ok[:, None] & exists[None, :])
    else:
        shifts = tl.arange(0, 4) * 8
        data = (words[:, :, None] >> shifts[None, None, :]).to(tl.uint8)
        data = tl.reshape(data, (words.shape[0], words.shape[1] * 4))
        element, exists = element_of(tl.arange(0, words.shape[1] * 4) * 2, rec)
        tl.store(base[:, None] + element[None, :] // 2, data, mask=ok[:, None] & exists[None, :])


@triton.jit
def write_scales(base, scale, ok, rec: tl.constexpr):
    """Writes scales int32 [T, groups] to rows at `base` (uint8 pointers [T])."""
    group = tl.arange(0, rec.groups)
    mask = ok[:, None] & (group < rec.num_scales)[None, :]
    if rec.sf_item == 1:
        tl.store(base[:, None] + group[None, :], scale.to(tl.uint8), mask=mask)
    elif rec.sf_aligned:
        tl.store(base.to(tl.pointer_type(tl.int32))[:, None] + group[None, :], scale, mask=mask)
    else:
        for byte in tl.static_range(4):
            tl.store(base[:, None] + group[None, :] * 4 + byte, (scale >> (8 * byte)).to(tl.uint8), mask=mask)


@triton.jit
def write_records(cache_ptr, block_stride, block, token, ok, bits, rec: tl.constexpr):
    """Quantises a tile and writes its records.

    Args:
        cache_ptr: uint8, or bf16 for unquantised records.
        block_stride: in rec.block_unit bytes.
        block, token, ok: int64, int64, bool [T].
        bits: bf16 bits int16 [T, tile], zero in the padding.
    """
    block_base = cache_ptr.to(tl.pointer_type(tl.uint8)) + block * block_stride * rec.block_unit
    base = block_base + token * rec.token_stride
    if rec.dtype == "bf16":
        element, exists = element_of(tl.arange(0, bits.shape[1]), rec)
        target = base.to(tl.pointer_type(tl.int16))[:, None] + element[None, :]
        tl.store(target, bits, mask=ok[:, None] & exists[None, :])
    else:
        if rec.dtype == "e4m3":
            codes, scale = quantise_e4m3(bits, rec)
            element, exists = element_of(tl.arange(0, bits.shape[1]), rec)
            tl.store(base[:, None] + element[None, :], codes, mask=ok[:, None] & exists[None, :])
        else:
            words, scale = quantise_e2m1(bits, rec)
            write_words(base, words, ok, rec)
        write_scales(block_base + rec.sf_offset + token * rec.sf_stride, scale, ok, rec)


@triton.jit(
    do_not_specialize=["n", "num_blocks", "block_stride"],
    do_not_specialize_on_alignment=["slots_ptr"],
)
def store_kernel(
    kv_ptr,
    kv_stride,
    cache_ptr,
    slots_ptr,
    n: tl.int64,
    num_blocks: tl.int64,
    block_stride: tl.int64,
    rec: tl.constexpr,
    tokens: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * tokens + tl.arange(0, tokens)
    block, token, ok = resolve_slots(slots_ptr, row, n, num_blocks, rec)
    element, exists = element_of(tl.arange(0, rec.groups * rec.group), rec)
    source = kv_ptr + row[:, None] * kv_stride + element[None, :]
    bits = tl.load(source, mask=ok[:, None] & exists[None, :], other=0.0).to(tl.int16, bitcast=True)
    write_records(cache_ptr, block_stride, block, token, ok, bits, rec)


def bind_store(request: Request) -> Launcher:
    """The launcher of STORE (kvhal.interface, "Launchers")."""
    layout, block_size = request.layout, request.block_size
    record = record_of(layout, block_size, native(request.platform))
    tokens, warps = store_shape(record)
    kernel = Kernel(store_kernel, (record, tokens), warps)
    unit = record.block_unit if layout.quantized_dtype else record.block_unit // 2

    def launch(kv, cache, slots):
        n = kv.shape[0]
        blocks, stride = cache.shape[0], cache.stride(0) // unit
        kernel((n + tokens - 1) // tokens, kv, kv.stride(0), cache, slots, n, blocks, stride)

    return launch
