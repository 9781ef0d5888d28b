"""The load of an index layout: records as they are, data and scales apart."""

import math
from typing import Any

import tilelang.language as T
import torch

from kvhal.backends.cuda_tilelang.build import ROW_ALIGNMENT, cache_argument, call
from kvhal.backends.cuda_tilelang.codec import source
from kvhal.backends.cuda_tilelang.segments import await_segments, covered_rows
from kvhal.formats import KVCacheFormat
from kvhal.layout import CacheGeometry, cache_geometry, sf_output

SF_TYPES = {torch.int32: "int32", torch.float32: "float32", torch.uint8: "uint8", torch.float8_e4m3fn: "float8_e4m3fn"}


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
