"""Loads: runs of records into rows (dequantised, or raw for index layouts), and single records by slot."""

from functools import partial
from typing import Any

import tilelang.language as T
import torch

from kvhal.backends.cuda_tilelang.build import (
    BF16_BYTES,
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
from kvhal.backends.cuda_tilelang.host import ANY_COUNT, Counts, cache_fits, launch_only_if, meant, rows_fit
from kvhal.backends.cuda_tilelang.load_bulk import load_bulk_kernel, takes
from kvhal.backends.cuda_tilelang.load_raw import raw_kernel
from kvhal.backends.cuda_tilelang.segments import await_segments, covered_rows, main_load, max_segments
from kvhal.backends.cuda_tilelang.tuned import shape_of
from kvhal.formats import SF_ITEM_BYTES, KVCacheFormat
from kvhal.interface import Launcher, Request
from kvhal.layout import CacheGeometry, cache_geometry
from kvhal.tuning import Shape


def bind_load(request: Request) -> Launcher:
    """``launch(cache, segments, total_k, out, out_sf)``, see `kvhal.interface`."""
    layout, block_size = request.layout, request.block_size
    built: dict[tuple[bool, bool], Kernel] = {}
    shape = partial(shape_of, request.platform.arch, dtype=layout.quantized_dtype)
    most = few = max_segments(block_size)
    if takes(layout):
        few = min(shape(kernel="load_bulk")[2] // block_size, most)

    def prepare(
        cache: torch.Tensor, segments: torch.Tensor, total_k: int, out: torch.Tensor, out_sf: torch.Tensor | None
    ) -> Kernel:
        count = segments.shape[0]
        if count > most:
            raise ValueError(f"load_segments: has {count} rows, {request.op} takes {most} at a time; pass it in parts")
        key = (aligned(out), count <= few)
        run = built.get(key)
        if run is None:
            alignment = ROW_ALIGNMENT if key[0] else out.element_size()
            if layout.is_index:
                special = (raw_kernel, shape(kernel="raw"))
            elif key[1]:
                special = (load_kernel, shape(kernel="load"), (1, few))
            else:
                special = (load_bulk_kernel, shape(kernel="load_bulk"), (few + 1, most))
            arguments = (special[0], layout, block_size, alignment, *special[1:])
            run = built[key] = kernel(*arguments, platform=request.platform, device=out.device)
        return run

    return launcher(prepare, checks=not layout.is_index)


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

    return launcher(prepare, checks=True)


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


def load_kernel(layout: KVCacheFormat, block_size: int, alignment: int, shape: Shape, counts: Counts = ANY_COUNT) -> Any:
    """A thread block copies a tile of a segment's rows; the octets of its rows lie side by side on the lanes.

    Args:
        layout, block_size: what is static of the cache.
        alignment: bytes that divide every output row's address, ROW_ALIGNMENT or BF16_BYTES.
        shape: see tuned.py.
        counts: the least and the most segments that the kernel is meant for.
    """
    geometry, octets = cache_geometry(layout, block_size), Octets.of(layout)
    tokens, warps = shape
    rounds, lanes, side = octets.rounds, octets.lanes, octets.tokens_a_warp
    tile = tokens * side * warps
    tiles, words = -(-block_size // tile), octets.data_words
    main = main_load(geometry, alignment, counts)
    get_record, put_record = record_reader(geometry, "kv::get_data_ahead")

    @T.prim_func
    def load(cache: main.cache, segments: main.segments, total_k: T.int64, out: main.out, out_sf: main.out_sf):
        launch_only_if(main.fit(cache, total_k, out))
        with T.Kernel(main.count * tiles, threads=WARP * warps, prelude=source(geometry, alignment)) as program:
            data = T.alloc_local((tokens * rounds * words,), "uint32")
            sf = T.alloc_local((tokens * rounds,), "uint32")
            thread = T.get_thread_binding()
            lane = thread % lanes
            await_segments(segments, program, tiles, main.count)
            block, shift, first, last = covered_rows(segments, program // tiles, program % tiles * tile, block_size, total_k)
            mine = first + thread // WARP * (tokens * side) + thread % WARP // lanes
            for i in T.unroll(tokens):
                for h in T.unroll(rounds):
                    octet = h * lanes + lane
                    at = i * rounds + h
                    sf[at] = T.uint32(0)
                    for w in T.unroll(words):
                        data[at * words + w] = T.uint32(0)
                    if (mine + i * side < last) & (octet < octets.count) & (block >= 0) & (block < main.blocks):
                        get_record(cache, block, mine + i * side, octet, data[at * words], sf[at])
            for i in T.unroll(tokens):
                for h in T.unroll(rounds):
                    octet = h * lanes + lane
                    at = i * rounds + h
                    if (mine + i * side < last) & (octet < octets.count):
                        put_record(out, shift + mine + i * side, octet, data[at * words], sf[at])

    return load


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
        launch_only_if(
            (n >= 1)
            & meant(rows_fit(out, out_stride, n, layout.elements, BF16_BYTES), alignment)
            & ((n == 1) | (out_stride >= layout.elements))
            & cache_fits(cache, blocks, block_stride, geometry)
        )
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
