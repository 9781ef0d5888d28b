"""`load_paged_kv_cache` and `load_kv_slots` in Triton: dequantised rows for main layouts, raw bytes for index layouts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvhal.backends.portable_triton.codec import decode_scale, dequantise_codes
from kvhal.backends.portable_triton.codec_e2m1 import dequantise_words
from kvhal.backends.portable_triton.launch import Kernel, await_producers, few_shape, launch_shape
from kvhal.backends.portable_triton.prepared import launcher
from kvhal.backends.portable_triton.record import record_of
from kvhal.backends.portable_triton.store import element_of, record_bases, resolve_slots, word_of
from kvhal.interface import Launcher, Request


@triton.jit
def read_scales(base, ok, rec: tl.constexpr):
    """Scale factors [T, groups] of rows at `base` (uint8 pointers [T]): uint8, or fp32 bit patterns as int32."""
    group = tl.arange(0, rec.groups)
    mask = ok[:, None] & (group < rec.num_scales)[None, :]
    if rec.sf_item == 1:
        bits = tl.load(base[:, None] + group[None, :], mask=mask, other=0)
    elif rec.sf_aligned:
        bits = tl.load(base.to(tl.pointer_type(tl.int32))[:, None] + group[None, :], mask=mask, other=0)
    else:
        bits = tl.zeros(mask.shape, tl.int32)
        for byte in tl.static_range(4):
            part = tl.load(base[:, None] + group[None, :] * 4 + byte, mask=mask, other=0)
            bits |= part.to(tl.int32) << (8 * byte)
    return bits


@triton.jit
def read_words(base, ok, rec: tl.constexpr):
    """e2m1 words int32 [T, tile / 8] of rows at `base` (uint8 pointers [T])."""
    rows: tl.constexpr = ok.shape[0]
    width: tl.constexpr = rec.groups * rec.group // 8
    if rec.words:
        word, exists = word_of(tl.arange(0, width), rec)
        source = base.to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
        # one word a lane becomes the sixteen bytes that the lane stores: nothing has to change lanes in between
        source = tl.multiple_of(source, (1, 4))
        words = tl.load(source, mask=ok[:, None] & exists[None, :], other=0)
    else:
        element, exists = element_of(tl.arange(0, width * 4) * 2, rec)
        data = tl.load(base[:, None] + element[None, :] // 2, mask=ok[:, None] & exists[None, :], other=0)
        shifts = tl.arange(0, 4) * 8
        words = tl.sum(tl.reshape(data, (rows, width, 4)).to(tl.int32) << shifts[None, None, :], axis=2)
    return words


@triton.jit
def read_records(base, sf_base, ok, rec: tl.constexpr):
    """Records at `base` and `sf_base` (uint8 pointers [T]) as bf16 bits int16 [T, tile]; zeros where not ok."""
    if rec.dtype == "e2m1":
        scale = decode_scale(read_scales(sf_base, ok, rec), rec)
        bits = dequantise_words(read_words(base, ok, rec), scale, rec)
    else:
        element, exists = element_of(tl.arange(0, rec.groups * rec.group), rec)
        mask = ok[:, None] & exists[None, :]
        if rec.dtype == "e4m3":
            scale = decode_scale(read_scales(sf_base, ok, rec), rec)
            codes = tl.load(base[:, None] + element[None, :], mask=mask, other=0)
            bits = dequantise_codes(codes, scale, rec)
        else:
            bits = tl.load(base.to(tl.pointer_type(tl.int16))[:, None] + element[None, :], mask=mask, other=0)
    return bits


@triton.jit
def write_rows(out_ptr, out_stride, row, written, bits, rec: tl.constexpr):
    """Writes bf16 bits int16 [T, tile] to rows [T] (int64) of a bf16 matrix, where written (bool [T])."""
    element, exists = element_of(tl.arange(0, rec.groups * rec.group), rec)
    target = out_ptr.to(tl.pointer_type(tl.int16)) + row[:, None] * out_stride + element[None, :]
    tl.store(target, bits, mask=written[:, None] & exists[None, :])


@triton.jit
def segment_rows(segments_ptr, count, total_k, num_blocks, rec: tl.constexpr, tokens: tl.constexpr):
    """Block, tokens [T], whether they can be read, output rows [T], whether they are written, and whether any is."""
    parts: tl.constexpr = (rec.block_size + tokens - 1) // tokens
    program = tl.program_id(0)
    segment = program // parts
    exists = segment < count  # else one of the programs that let a small grid lie evenly
    segments_ptr += tl.where(exists, segment, 0).to(tl.int64) * 4
    block = tl.load(segments_ptr).to(tl.int64)
    begin = tl.load(segments_ptr + 1).to(tl.int64)
    end = tl.load(segments_ptr + 2).to(tl.int64)
    target = tl.load(segments_ptr + 3).to(tl.int64)
    first = tl.maximum(begin, 0) + (program % parts) * tokens
    token = first + tl.arange(0, tokens)
    row = token + (target - begin)
    limit = tl.where(exists, tl.minimum(end, rec.block_size), 0)
    covered = (token < limit) & (row.to(tl.uint64, bitcast=True) < total_k.to(tl.uint64))
    return block, token, covered & (block >= 0) & (block < num_blocks), row, covered, first < limit


@triton.jit(
    do_not_specialize=["count", "total_k", "num_blocks", "block_stride"], do_not_specialize_on_alignment=["segments_ptr"]
)
def load_kernel(
    cache_ptr,
    segments_ptr,
    out_ptr,
    out_stride,
    count: tl.int32,
    total_k: tl.int64,
    num_blocks: tl.int64,
    block_stride: tl.int64,
    rec: tl.constexpr,
    tokens: tl.constexpr,
    early: tl.constexpr,
):
    await_producers(early)
    block, token, ok, row, covered, any_covered = segment_rows(segments_ptr, count, total_k, num_blocks, rec, tokens)
    if any_covered:
        base, sf_base = record_bases(cache_ptr, block_stride, block, token, rec)
        write_rows(out_ptr, out_stride, row, covered, read_records(base, sf_base, ok, rec), rec)


@triton.jit(do_not_specialize=["n", "num_blocks", "block_stride"], do_not_specialize_on_alignment=["slots_ptr"])
def load_slots_kernel(
    cache_ptr,
    slots_ptr,
    out_ptr,
    out_stride,
    n: tl.int64,
    num_blocks: tl.int64,
    block_stride: tl.int64,
    rec: tl.constexpr,
    tokens: tl.constexpr,
    early: tl.constexpr,
):
    await_producers(early)
    row = tl.program_id(0).to(tl.int64) * tokens + tl.arange(0, tokens)
    block, token, ok = resolve_slots(slots_ptr, row, n, num_blocks, rec)
    base, sf_base = record_bases(cache_ptr, block_stride, block, token, rec)
    write_rows(out_ptr, out_stride, row, row < n, read_records(base, sf_base, ok, rec), rec)


@triton.jit
def load_items(source, ok, count: tl.constexpr):
    """`count` items a row, padded to a power of two, at pointers [T]; zeros where not ok."""
    item = tl.arange(0, triton.next_power_of_2(count))
    return tl.load(source[:, None] + item[None, :], mask=ok[:, None] & (item < count)[None, :], other=0)


@triton.jit
def store_items(target, items, covered, count: tl.constexpr):
    """The first `count` items of each row to pointers [T], where covered."""
    item = tl.arange(0, items.shape[1])
    tl.store(target[:, None] + item[None, :], items, mask=covered[:, None] & (item < count)[None, :])


@triton.jit(
    do_not_specialize=["count", "total_k", "num_blocks", "block_stride"], do_not_specialize_on_alignment=["segments_ptr"]
)
def load_raw_kernel(
    cache_ptr,
    segments_ptr,
    out_ptr,
    out_stride,
    out_sf_ptr,
    out_sf_stride,
    count: tl.int32,
    total_k: tl.int64,
    num_blocks: tl.int64,
    block_stride: tl.int64,
    rec: tl.constexpr,
    tokens: tl.constexpr,
    early: tl.constexpr,
):
    await_producers(early)
    block, token, ok, row, covered, any_covered = segment_rows(segments_ptr, count, total_k, num_blocks, rec, tokens)
    if any_covered:
        base, sf_base = record_bases(cache_ptr, block_stride, block, token, rec)
        # byte by byte only where a record's scales do not lie on the addresses that whole words need
        sf_target = out_sf_ptr + row * out_sf_stride
        words: tl.constexpr = sf_target.dtype.element_ty != tl.uint8
        sf_items: tl.constexpr = rec.sf_bytes // 4 if words else rec.sf_bytes
        # both are on their way before the first is written
        data = load_items(base, ok, rec.data_bytes)
        sf = load_items(sf_base.to(sf_target.dtype), ok, sf_items)
        store_items(out_ptr + row * out_stride, data, covered, rec.data_bytes)
        store_items(sf_target, sf, covered, sf_items)


def bind_load(request: Request) -> Launcher:
    """The launcher of LOAD (kvhal.interface, "Launchers")."""
    layout, block_size = request.layout, request.block_size
    record = record_of(layout, block_size, request.platform)
    if layout.is_index:
        return _bind_raw(record, request.platform)
    unit = record.block_unit if layout.quantized_dtype else record.block_unit // 2

    def kernel_of(tokens, warps):
        return Kernel(load_kernel, (record, tokens), warps, request.platform, even=True), -(-block_size // tokens)

    many = kernel_of(*launch_shape("load", record, request.platform.arch))
    limit, warps = few_shape("load_few", record, request.platform)
    few = kernel_of(1, warps)

    def call_of(cache, segments, total_k, out, out_sf):
        count = segments.shape[0]
        kernel, parts = few if count * block_size <= limit else many
        blocks, stride = cache.shape[0], cache.stride(0) // unit
        return kernel, count * parts, cache, segments, out, out.stride(0), count, total_k, blocks, stride

    return launcher(call_of, request.platform)


def _bind_raw(record, platform) -> Launcher:
    tokens, warps = launch_shape("raw", record, platform.arch)
    kernel = Kernel(load_raw_kernel, (record, tokens), warps, platform, even=True)
    parts = (record.block_size + tokens - 1) // tokens

    def call_of(cache, segments, total_k, out, out_sf):
        # bits are copied, whatever they mean; fp8 pointers do not exist below sm_89
        sf = out_sf.view(torch.int32 if record.sf_words and out_sf.element_size() == 4 else torch.uint8)
        sf_stride = out_sf.stride(0) * out_sf.element_size() // sf.element_size()
        return (
            kernel,
            segments.shape[0] * parts,
            cache,
            segments,
            out.view(torch.uint8),
            out.stride(0),
            sf,
            sf_stride,
            segments.shape[0],
            total_k,
            cache.shape[0],
            cache.stride(0) // record.block_unit,
        )

    return launcher(call_of, platform)


def bind_load_slots(request: Request) -> Launcher:
    """The launcher of LOAD_SLOTS (kvhal.interface, "Launchers")."""
    layout = request.layout
    record = record_of(layout, request.block_size, request.platform)
    unit = record.block_unit if layout.quantized_dtype else record.block_unit // 2

    def kernel_of(tokens, warps):
        return Kernel(load_slots_kernel, (record, tokens), warps, request.platform, even=True), tokens

    many = kernel_of(*launch_shape("slots", record, request.platform.arch))
    limit, warps = few_shape("slots_few", record, request.platform)
    few = kernel_of(1, warps)

    def call_of(cache, slots, out):
        n = slots.shape[0]
        kernel, tokens = few if n <= limit else many
        programs = (n + tokens - 1) // tokens
        return kernel, programs, cache, slots, out, out.stride(0), n, cache.shape[0], cache.stride(0) // unit

    return launcher(call_of, request.platform)
