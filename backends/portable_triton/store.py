"""`store_kv_cache` in Triton: one kernel for every format, a few tokens a program."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from kvhal.backends.portable_triton.codec import BF16_LOW, BF16_SHIFT, quantise_e4m3
from kvhal.backends.portable_triton.codec_e2m1 import quantise_e2m1
from kvhal.backends.portable_triton.launch import Kernel, await_previous, few_shape, launch_shape, let_next_start, prefetch_rows
from kvhal.backends.portable_triton.packed import addresses, items_of, quantise_pairs, rows_of
from kvhal.backends.portable_triton.packed_e2m1 import quantise_pairs_e2m1
from kvhal.backends.portable_triton.prepared import launcher
from kvhal.backends.portable_triton.record import Record, by_pairs, record_of, whole_octets
from kvhal.interface import Launcher, Request


@triton.jit
def resolve_slots(slots_ptr, row, n, num_blocks, rec: tl.constexpr):
    """Block, token in the block, and whether the slot is in the cache, for rows [T] (int64) of a slot mapping."""
    slot = tl.load(slots_ptr + row, mask=row < n, other=-1).to(tl.int64)
    # unsigned: a negative slot is larger than any cache, and a block size that is a power of two costs shifts
    slot = slot.to(tl.uint64, bitcast=True)
    block = slot // rec.block_size
    token = slot - block * rec.block_size
    return block.to(tl.int64, bitcast=True), token.to(tl.int64, bitcast=True), block < num_blocks.to(tl.uint64)


@triton.jit
def element_of(column, rec: tl.constexpr):
    """Element at a column of the padded tile, and whether there is one."""
    if rec.dense:
        return column, column >= 0
    else:
        within = column % rec.group
        element = (column // rec.group) * rec.elements_per_sf + within
        return element, (within < rec.elements_per_sf) & (element < rec.elements)


@triton.jit
def word_of(column, rec: tl.constexpr):
    """Word of eight e2m1 elements at a column of the tile, and whether there is one."""
    if rec.dense:
        return column, column >= 0
    else:
        per_tile: tl.constexpr = rec.group // 8
        per_group: tl.constexpr = rec.elements_per_sf // 8
        within = column % per_tile
        word = (column // per_tile) * per_group + within
        return word, (within < per_group) & (word < rec.elements // 8)


@triton.jit
def write_words(base, words, ok, rec: tl.constexpr):
    """Writes e2m1 words int32 [T, tile / 8] to rows at `base` (uint8 pointers [T])."""
    if rec.words:
        word, exists = word_of(tl.arange(0, words.shape[1]), rec)
        target = base.to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
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
def record_bases(cache_ptr, block_stride, block, token, rec: tl.constexpr):
    """uint8 pointers [T] to the data and to the scales of records.

    Args:
        cache_ptr: uint8, or bf16 for unquantised records.
        block_stride: in rec.block_unit bytes.
        block, token: int64 [T], or int64 for one block.
    """
    base = cache_ptr.to(tl.pointer_type(tl.uint8)) + block * block_stride * rec.block_unit
    return base + token * rec.token_stride, base + rec.sf_offset + token * rec.sf_stride


@triton.jit
def quantise(bits, rec: tl.constexpr):
    """Data and scales (int32 [T, groups]) of bf16 bits int16 [T, tile]; data is codes, words, or the bits themselves."""
    if rec.dtype == "bf16":
        data, scale = bits, bits
    elif rec.dtype == "e4m3":
        data, scale = quantise_e4m3(bits, rec)
    else:
        data, scale = quantise_e2m1(bits, rec)
    return data, scale


@triton.jit
def quantise_packed(pairs, rec: tl.constexpr):
    """Data, as int32 words, and scales (int32 [T, groups]) of pairs: int32 [T, tile / 2] of bf16."""
    if rec.dtype == "e4m3":
        data, scale = quantise_pairs(pairs, rec)
    else:
        data, scale = quantise_pairs_e2m1(pairs, rec)
    return data, scale


@triton.jit
def write_records(base, sf_base, ok, data, scale, rec: tl.constexpr):
    """Writes what `quantise` or `quantise_packed` returned to the records at `base` and `sf_base`, where ok (bool [T])."""
    if rec.pairs:
        width: tl.constexpr = 2 if rec.dtype == "e4m3" else 1
        words = base.to(tl.pointer_type(tl.int32))
        if width == 1:  # no claim of wider accesses: a lane's words would have to change lanes for them
            words = tl.multiple_of(words, 4)
        target = addresses(words, rec, width)
        tl.store(target, items_of(data, width), mask=ok[None, :, None, None])
    elif rec.dtype == "e2m1":
        write_words(base, data, ok, rec)
    else:
        element, exists = element_of(tl.arange(0, data.shape[1]), rec)
        target = base.to(tl.pointer_type(data.dtype))[:, None] + element[None, :]
        if rec.narrow and rec.dtype == "e4m3":
            target = tl.multiple_of(target, (1, 8))
        tl.store(target, data, mask=ok[:, None] & exists[None, :])
    if rec.dtype != "bf16":
        write_scales(sf_base, scale, ok, rec)


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
    early: tl.constexpr,
):
    let_next_start(early)
    row = tl.program_id(0).to(tl.int64) * tokens + tl.arange(0, tokens)
    rows = kv_ptr + (tl.minimum(row, n - 1) if rec.pairs else row) * kv_stride
    if rec.dtype != "bf16":  # 0.02 us later: a copy is all that there is to do
        prefetch_rows(early, rows, row < n, rec.tile, rec.elements)
    await_previous(early)
    block, token, ok = resolve_slots(slots_ptr, row, n, num_blocks, rec)
    # skipped rows are read too: waiting for the slots first would cost every row a second trip to memory
    if rec.pairs:
        source = addresses(rows, rec, 8)
        bits = rows_of(tl.load(source).to(tl.int16, bitcast=True)).to(tl.int32)
        low, high = tl.split(tl.reshape(bits, (tokens, rec.tile // 2, 2)))
        data, scale = quantise_packed((low & BF16_LOW) | (high << BF16_SHIFT), rec)
    else:
        element, exists = element_of(tl.arange(0, rec.groups * rec.group), rec)
        source = rows[:, None] + element[None, :]
        bits = tl.load(source, mask=(row < n)[:, None] & exists[None, :], other=0.0).to(tl.int16, bitcast=True)
        data, scale = quantise(bits, rec)
    base, sf_base = record_bases(cache_ptr, block_stride, block, token, rec)
    write_records(base, sf_base, ok, data, scale, rec)


def packed_store(record: Record) -> bool:
    """Only e2m1 has so much work that it matters how rows lie over lanes."""
    return record.dtype == "e2m1"


def bind_store(request: Request) -> Launcher:
    """The launcher of STORE (kvhal.interface, "Launchers")."""
    layout, block_size = request.layout, request.block_size
    record = record_of(layout, block_size, request.platform)
    packed = by_pairs(record) if packed_store(record) else record
    unit = record.block_unit if layout.quantized_dtype else record.block_unit // 2

    def kernel_of(record, tokens, warps):
        return Kernel(store_kernel, (record, tokens), warps, request.platform, even=True), tokens

    arch = request.platform.arch
    plain = kernel_of(record, *launch_shape("store", record, arch))
    by_octets = kernel_of(packed, *launch_shape("store_pairs", packed, arch)) if packed.pairs else plain
    limit, warps = few_shape("store_few", record, request.platform)
    few = kernel_of(replace(record, guarded=False), 1, warps)

    def call_of(kv, cache, slots):
        n = kv.shape[0]
        kernel, tokens = few if n <= limit else by_octets if packed.pairs and whole_octets(kv) else plain
        blocks, stride = cache.shape[0], cache.stride(0) // unit
        return kernel, (n + tokens - 1) // tokens, kv, kv.stride(0), cache, slots, n, blocks, stride

    return launcher(call_of, request.platform)
