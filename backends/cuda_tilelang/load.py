"""Loads: runs of records into rows (dequantised, or raw for index layouts), and single records by slot."""

import math
from typing import Any

import tilelang.language as T
import torch

from kvhal.backends.cuda_tilelang.build import (
    BF16_BYTES,
    FEW_BLOCKS,
    ROW_ALIGNMENT,
    SLOT_DTYPES,
    Kernel,
    aligned,
    await_slots,
    cache_argument,
    call,
    kernel,
    launcher,
)
from kvhal.backends.cuda_tilelang.codec import OCTET, WARP, Octets, source
from kvhal.backends.cuda_tilelang.tuned import shape_of
from kvhal.formats import SF_ITEM_BYTES, KVCacheFormat
from kvhal.interface import Launcher, Request
from kvhal.layout import CacheGeometry, cache_geometry, sf_output

MANY_BLOCKS = 8 * FEW_BLOCKS  #: as FEW_BLOCKS, of a load by segments, whose thread blocks have more to do
SF_TYPES = {torch.int32: "int32", torch.float32: "float32", torch.uint8: "uint8", torch.float8_e4m3fn: "float8_e4m3fn"}


def bind_load(request: Request) -> Launcher:
    """``launch(cache, segments, total_k, out, out_sf)``, see `kvhal.interface`."""
    layout, block_size = request.layout, request.block_size
    built: dict[bool, Kernel] = {}
    factory, name = (raw_kernel, "raw") if layout.is_index else (load_kernel, "load")
    shape = shape_of(request.platform.arch, name, layout.quantized_dtype)

    def prepare(
        cache: torch.Tensor, segments: torch.Tensor, total_k: int, out: torch.Tensor, out_sf: torch.Tensor | None
    ) -> Kernel:
        wide = aligned(out)
        run = built.get(wide)
        if run is None:
            alignment = ROW_ALIGNMENT if wide else out.element_size()
            arguments = (layout, block_size, alignment, shape)
            run = built[wide] = kernel(factory, *arguments, platform=request.platform, device=out.device)
        return run

    return launcher(prepare)


def bind_load_slots(request: Request) -> Launcher:
    """``launch(cache, slots, out)``, see `kvhal.interface`."""
    layout, block_size = request.layout, request.block_size
    built: dict[tuple[torch.dtype, bool], Kernel] = {}
    shape = shape_of(request.platform.arch, "slots", layout.quantized_dtype)

    def prepare(cache: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> Kernel:
        key = (slots.dtype, aligned(out))
        run = built.get(key)
        if run is None:
            arguments = (layout, block_size, SLOT_DTYPES[key[0]], ROW_ALIGNMENT if key[1] else BF16_BYTES, shape)
            run = built[key] = kernel(slots_kernel, *arguments, platform=request.platform, device=out.device)
        return run

    return launcher(prepare)


def record_reader(geometry: CacheGeometry, get_data: str = "kv::get_data") -> tuple[Any, Any]:
    """Macros on one octet of a valid token: read its data (by `get_data`) and scale into registers; write it out as bf16."""
    layout, octets = geometry.layout, Octets.of(geometry.layout)
    if layout.quantized_dtype is None:

        @T.macro
        def get_copied(cache, block, token, octet, data, sf):
            call("kv::get_data", T.address_of(data), T.address_of(cache[block, 0, 0, token * layout.elements + octet * OCTET]))

        @T.macro
        def put_copied(out, row, octet, data, sf):
            call("kv::put_row", T.address_of(out[row, octet * OCTET]), T.address_of(data))

        return get_copied, put_copied

    sf_bytes = SF_ITEM_BYTES[str(layout.sf_format)]

    @T.macro
    def get_record(cache, block, token, octet, data, sf):
        byte = token * geometry.data_token_stride + octet * octets.data_bytes
        call(get_data, T.address_of(data), T.address_of(cache[block, 0, 0, byte]))
        byte = geometry.sf_offset + token * geometry.sf_token_stride + octet // octets.group * sf_bytes
        call("kv::get_scale", T.address_of(sf), T.address_of(cache[block, 0, 0, byte]))

    @T.macro
    def put_decoded(out, row, octet, data, sf):
        call("kv::decode_row", T.address_of(out[row, octet * OCTET]), T.address_of(data), sf)

    return get_record, put_decoded


def load_kernel(layout: KVCacheFormat, block_size: int, alignment: int, shape: tuple[int, int]) -> Any:
    """A thread block copies a tile of a segment's rows; the octets of its rows lie side by side on the lanes.

    Args:
        layout, block_size: what is static of the cache.
        alignment: bytes that divide every output row's address, ROW_ALIGNMENT or BF16_BYTES.
        shape: see tuned.py.
    """
    geometry, octets = cache_geometry(layout, block_size), Octets.of(layout)
    tokens, warps = shape
    rounds, lanes, side = octets.rounds, octets.lanes, octets.tokens_a_warp
    tile = tokens * side * warps
    tiles, words = -(-block_size // tile), octets.data_words
    blocks, block_stride = T.dynamic("blocks", "int64"), T.dynamic("block_stride", "int64")
    segment_count, rows, out_stride = T.dynamic("segment_count"), T.dynamic("rows", "int64"), T.dynamic("out_stride", "int64")
    get_record, put_record = record_reader(geometry, "kv::get_data_ahead")

    @T.prim_func
    def load(
        cache: cache_argument(geometry, blocks, block_stride),
        segments: T.Tensor((segment_count, 4), "int32"),
        total_k: T.int64,
        out: T.StridedTensor((rows, layout.elements), (out_stride, 1), "bfloat16"),
        out_sf: T.Tensor((1,), "float32"),  # always None: main layouts give rows only
    ):
        with T.Kernel(segment_count * tiles, threads=WARP * warps, prelude=source(geometry, alignment)) as program:
            data = T.alloc_local((tokens * rounds * words,), "uint32")
            sf = T.alloc_local((tokens * rounds,), "uint32")
            thread = T.get_thread_binding()
            lane = thread % lanes
            await_segments(segments, program, tiles, segment_count)
            block, shift, first, last = covered_rows(segments, program // tiles, program % tiles * tile, block_size, total_k)
            mine = first + thread // WARP * (tokens * side) + thread % WARP // lanes
            for i in T.unroll(tokens):
                for h in T.unroll(rounds):
                    octet = h * lanes + lane
                    at = i * rounds + h
                    sf[at] = T.uint32(0)
                    for w in T.unroll(words):
                        data[at * words + w] = T.uint32(0)
                    if (mine + i * side < last) & (octet < octets.count) & (block >= 0) & (block < blocks):
                        get_record(cache, block, mine + i * side, octet, data[at * words], sf[at])
            for i in T.unroll(tokens):
                for h in T.unroll(rounds):
                    octet = h * lanes + lane
                    at = i * rounds + h
                    if (mine + i * side < last) & (octet < octets.count):
                        put_record(out, shift + mine + i * side, octet, data[at * words], sf[at])

    return load


@T.macro
def await_segments(segments, program, tiles, segment_count):
    """As `build.await_producers`; meanwhile the thread block of a segment's first tile has the segment brought to L2."""
    if segment_count * tiles <= MANY_BLOCKS:
        T.pdl_trigger()
        if (program % tiles == 0) & (T.get_thread_binding() == 0):
            call("kv::prefetch", T.address_of(segments[program // tiles, 0]))
    T.pdl_sync()


@T.macro
def covered_rows(segments, index, skip, block_size, total_k):
    """``(block, shift, first, last)`` of a segment: its rows [first + skip, last) exist in the block and in the output, where
    row t goes to ``shift + t``; 64 bits where the metadata could overflow 32."""
    block = T.alloc_var("int64", init=T.cast(segments[index, 0], "int64"))
    shift = T.alloc_var("int64", init=T.cast(segments[index, 3], "int64") - T.cast(segments[index, 1], "int64"))
    begin = T.max(T.cast(segments[index, 1], "int64"), T.max(-shift, T.int64(0)))
    end = T.max(T.min(T.cast(segments[index, 2], "int64"), total_k - shift), T.int64(0))
    first = T.alloc_var("int32", init=T.cast(T.min(begin, T.int64(block_size)), "int32") + skip)
    last = T.alloc_var("int32", init=T.cast(T.min(end, T.int64(block_size)), "int32"))
    return block, shift, first, last


def slots_kernel(layout: KVCacheFormat, block_size: int, slot_dtype: str, alignment: int, shape: tuple[int, int]) -> Any:
    """As `load_kernel`, each token's record found by its slot; a slot out of range reads as zeros."""
    geometry, octets = cache_geometry(layout, block_size), Octets.of(layout)
    tokens, warps = shape
    rounds, lanes, side, step = octets.rounds, octets.lanes, octets.tokens_a_warp, tokens * octets.tokens_a_warp
    words = octets.data_words
    n, out_stride = T.dynamic("n", "int64"), T.dynamic("out_stride", "int64")
    blocks, block_stride = T.dynamic("blocks", "int64"), T.dynamic("block_stride", "int64")
    get_record, put_record = record_reader(geometry)

    @T.prim_func
    def load_slots(
        cache: cache_argument(geometry, blocks, block_stride),
        slots: T.Tensor((n,), slot_dtype),
        out: T.StridedTensor((n, layout.elements), (out_stride, 1), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(n, step * warps), threads=WARP * warps, prelude=source(geometry, alignment)) as group:
            data = T.alloc_local((tokens * rounds * words,), "uint32")
            sf = T.alloc_local((tokens * rounds,), "uint32")
            slot = T.alloc_local((tokens,), "int64")
            thread = T.get_thread_binding()
            lane = thread % lanes
            first = T.cast(group * warps + thread // WARP, "int64") * step + thread % WARP // lanes
            await_slots(slots, T.min(first, n - 1), T.ceildiv(n, step * warps))
            for i in T.unroll(tokens):
                slot[i] = T.int64(-1)
                if first + i * side < n:
                    slot[i] = T.cast(slots[first + i * side], "int64")
            for i in T.unroll(tokens):
                for h in T.unroll(rounds):
                    octet = h * lanes + lane
                    at = i * rounds + h
                    sf[at] = T.uint32(0)
                    for w in T.unroll(words):
                        data[at * words + w] = T.uint32(0)
                    if (slot[i] >= 0) & (slot[i] < blocks * block_size) & (octet < octets.count):
                        block = T.truncdiv(slot[i], T.int64(block_size))
                        get_record(cache, block, slot[i] - block * block_size, octet, data[at * words], sf[at])
            for i in T.unroll(tokens):
                for h in T.unroll(rounds):
                    octet = h * lanes + lane
                    at = i * rounds + h
                    if (first + i * side < n) & (octet < octets.count):
                        put_record(out, first + i * side, octet, data[at * words], sf[at])

    return load_slots


def raw_kernel(layout: KVCacheFormat, block_size: int, alignment: int, shape: tuple[int, int]) -> Any:
    """The load of an index layout: bytes as they are, data in chunks that lie side by side on the threads.

    Args:
        layout, block_size: what is static of the cache.
        alignment: bytes that divide every output row's address.
        shape: see tuned.py.
    """
    geometry, (tile, threads) = cache_geometry(layout, block_size), shape
    chunk = math.gcd(ROW_ALIGNMENT, layout.data_bytes, geometry.token_alignment)
    get, put = f"kv::get<{chunk}, {chunk}>", f"kv::put<{chunk}, {min(chunk, alignment)}>"
    chunks, words, sf_dtype, sf_trailing = layout.data_bytes // chunk, -(-chunk // 4), *sf_output(layout)
    tiles, steps, copy_scales = -(-block_size // tile), -(-tile * chunks // threads), scale_copier(geometry)
    blocks, block_stride = T.dynamic("blocks", "int64"), T.dynamic("block_stride", "int64")
    segment_count, rows, out_stride = T.dynamic("segment_count"), T.dynamic("rows", "int64"), T.dynamic("out_stride", "int64")
    sf_rows, sf_stride = T.dynamic("sf_rows", "int64"), T.dynamic("sf_stride", "int64")
    data_type = "float8_e4m3fn" if layout.quantized_dtype == "e4m3" else "int8"

    @T.prim_func
    def load_raw(
        cache: cache_argument(geometry, blocks, block_stride),
        segments: T.Tensor((segment_count, 4), "int32"),
        total_k: T.int64,
        out: T.StridedTensor((rows, layout.data_bytes), (out_stride, 1), data_type),
        out_sf: T.StridedTensor((sf_rows, *sf_trailing), (sf_stride, 1)[: 1 + len(sf_trailing)], SF_TYPES[sf_dtype]),
    ):
        with T.Kernel(segment_count * tiles, threads=threads, prelude=source(geometry, alignment)) as program:
            data = T.alloc_local((steps * words,), "uint32")
            thread = T.get_thread_binding()
            await_segments(segments, program, tiles, segment_count)
            block, shift, first, last = covered_rows(segments, program // tiles, program % tiles * tile, block_size, total_k)
            valid = (block >= 0) & (block < blocks)
            for i in T.unroll(steps):
                piece = i * threads + thread
                for w in T.unroll(words):
                    data[i * words + w] = T.uint32(0)
                if (first + piece // chunks < last) & (piece < tile * chunks) & valid:
                    byte = T.cast(first + piece // chunks, "int64") * geometry.data_token_stride + piece % chunks * chunk
                    call(get, T.address_of(data[i * words]), T.address_of(cache[block, 0, 0, byte]))
            if (thread < tile) & (first + thread < last):
                copy_scales(cache, block, valid, first + thread, out_sf, shift)
            for i in T.unroll(steps):
                piece = i * threads + thread
                row = first + piece // chunks
                if (row < last) & (piece < tile * chunks):
                    call(put, T.address_of(out[shift + row, piece % chunks * chunk]), T.address_of(data[i * words]))

    return load_raw


def scale_copier(geometry: CacheGeometry) -> Any:
    """A macro that copies the scales of one row, zeros where its block does not exist."""
    width, (dtype, trailing) = geometry.layout.sf_bytes, sf_output(geometry.layout)
    squeezed = not trailing
    get = f"kv::get<{width}, {math.gcd(ROW_ALIGNMENT, width, geometry.sf_offset, geometry.sf_token_stride)}>"
    put = f"kv::put<{width}, {math.gcd(ROW_ALIGNMENT, width, dtype.itemsize)}>"

    @T.macro
    def copy_scales(cache, block, valid, row, out_sf, shift):
        sf = T.alloc_local((-(-width // 4),), "uint32")
        for w in T.unroll(-(-width // 4)):
            sf[w] = T.uint32(0)
        if valid:
            byte = geometry.sf_offset + T.cast(row, "int64") * geometry.sf_token_stride
            call(get, T.address_of(sf[0]), T.address_of(cache[block, 0, 0, byte]))
        if squeezed:
            call(put, T.address_of(out_sf[shift + row]), T.address_of(sf[0]))
        else:
            call(put, T.address_of(out_sf[shift + row, 0]), T.address_of(sf[0]))

    return copy_scales
