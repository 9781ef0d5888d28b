"""What the kernels of a load by segments share: its segments, and the output's rows that they cover."""

from typing import Any

import tilelang.language as T

from kvhal.backends.cuda_tilelang.build import FEW_BLOCKS, call

MANY_BLOCKS = 8 * FEW_BLOCKS  #: as FEW_BLOCKS, of a load by segments, whose thread blocks have more to do
INT32_MAX = 2**31 - 1


def max_segments(block_size: int) -> int:
    """As many as have a thread block for each token are counted in 32 bits."""
    return INT32_MAX // block_size


def output_fits(stride: Any, rows: Any, total_k: Any, width: int) -> Any:
    """Whether an output of `rows` rows, `stride` elements apart, has one for each of total_k tokens, and none overlap."""
    return (total_k >= 0) & (total_k <= INT32_MAX) & (total_k <= rows) & ((rows <= 1) | (stride >= width))


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
