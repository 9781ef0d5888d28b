"""Kernels for few tokens against those for many, at few tokens: what the thresholds and shapes in tuned.py come from.

    python benchmarks/gpu_few.py OUT.json

Device time of a call in a stream of such calls (kvhal.bench), bytes checked first. "shape" is the table's: for portable_triton
(elements a warp, tokens at most), for cuda_tilelang (tokens at most,); with 0 tokens at most every call goes through the kernel
for more. "share_of_smallest" is the time of the smallest kernel of the same run over the call's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from rows import DEVICE, write

import kvhal
from kvhal.backends.cuda_tilelang import fused
from kvhal.backends.portable_triton import launch
from kvhal.bench.timing import Clock, measure
from kvhal.bench.work import make_work
from kvhal.formats import BF16_FORMAT, MXFP8_INDEX_KV_FORMAT, V41_FORMAT, V41_FP4_FORMAT, format_to_text
from kvhal.interface import Op
from kvhal.tuning import Shape
from kvhal.warm import side_by_side
from tests.gpu.small_calls import shapes_changed

ALL = 1 << 30
TOKENS = (1, 128, 256, 512, 1024, 2048)
SHAPES = {
    "portable_triton": ((128, ALL), (256, ALL), (512, ALL), (256, 0)),
    "cuda_tilelang": ((ALL,), (0,)),
}
CELLS = [(op, layout) for op in (Op.FUSED_STORE, Op.LOAD_SLOTS) for layout in (V41_FORMAT, V41_FP4_FORMAT, BF16_FORMAT)]
CELLS += [(Op.LOAD, layout) for layout in (V41_FORMAT, V41_FP4_FORMAT, BF16_FORMAT)]
CELLS += [(Op.FUSED_STORE, MXFP8_INDEX_KV_FORMAT), (Op.STORE, V41_FP4_FORMAT), (Op.STORE, V41_FORMAT)]


def with_few(backend: str, few: Shape) -> AbstractContextManager[None]:
    """Inside, the backend's kernels for few tokens have this shape."""
    if backend == "portable_triton":
        return shapes_changed((launch,), lambda kernel, shape: few if kernel.endswith("_few") else shape)
    return shapes_changed((fused,), lambda kernel, shape: (*shape[:-1], *few) if kernel.startswith("fused") else shape)


def rows(clock: Clock) -> Iterator[dict[str, Any]]:
    """The table, a row a cell, shape and number of tokens."""
    for backend, shapes in SHAPES.items():
        cells = [cell for cell in CELLS if backend == "portable_triton" or cell[0] == Op.FUSED_STORE]
        for shape in shapes:
            with with_few(backend, shape), kvhal.use_backend(backend):
                side_by_side([make_work(op, layout, 1, 64, "pages", DEVICE, 0).call for op, layout in cells])
                for op, layout in cells:
                    for tokens in TOKENS:
                        us = measure(clock, backend, op, layout, tokens, 64, "pages").median_us
                        row = {"backend": backend, "op": str(op), "format": format_to_text(layout), "tokens": tokens}
                        yield row | {"shape": list(shape), "us": us, "share_of_smallest": clock.empty_us / us}


if __name__ == "__main__":
    write(rows)
