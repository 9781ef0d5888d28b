"""What the kernels of a load by segments share: its parameters, its segments, and the output's rows that they cover."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kvhal.backends.cuda_tilelang.build import BF16_BYTES, FEW_BLOCKS, INT32_MAX, cache_argument, call
from kvhal.backends.cuda_tilelang.host import Counts, cache_fits, count_between, meant, rows_fit
from kvhal.layout import CacheGeometry

MANY_BLOCKS = 8 * FEW_BLOCKS  #: as FEW_BLOCKS, of a load by segments, whose thread blocks have more to do


def max_segments(block_size: int) -> int:
    """As many as have a thread block for each token are counted in 32 bits."""
    return INT32_MAX // block_size


@dataclass(frozen=True)
class MainLoad:
    """The parameters of a load of main records, and of them what a kernel computes with.

    Attributes:
        blocks, count, out_stride: blocks of the cache, segments (32 bits), elements from one row of the output to the next.
        cache, segments, out, out_sf: types; out_sf is always None, as main layouts give rows only.
        fit: a function of cache, total_k and out for `launch_only_if`: the launcher would take this kernel for them.
    """

    blocks: Any
    count: Any
    out_stride: Any
    cache: Any
    segments: Any
    out: Any
    out_sf: Any
    fit: Callable[[Any, Any, Any], Any]


def main_load(geometry: CacheGeometry, alignment: int, counts: Counts) -> MainLoad:
    """Those of kernels for an output of this alignment and so many segments."""
    names = ("blocks", "block_stride", "segment_count", "rows", "out_stride")
    blocks, block_stride, segment_count, rows, out_stride = (T.dynamic(name, "int64") for name in names)
    elements = geometry.layout.elements

    def fit(cache: Any, total_k: Any, out: Any) -> Any:
        enough = (total_k >= 0) & (total_k <= INT32_MAX) & (total_k <= rows)
        apart = (rows <= 1) | (out_stride >= elements)
        return (
            count_between(segment_count, *counts)
            & meant(rows_fit(out, out_stride, rows, elements, BF16_BYTES), alignment)
            & enough
            & apart
            & cache_fits(cache, blocks, block_stride, geometry)
        )

    return MainLoad(
        blocks,
        T.cast(segment_count, "int32"),
        out_stride,
        cache_argument(geometry, blocks, block_stride),
        T.Tensor((segment_count, 4), "int32"),
        T.StridedTensor((rows, elements), (out_stride, 1), "bfloat16"),
        T.Tensor((1,), "float32"),
        fit,
    )


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
