"""What a kernel's host function looks at before it launches, so that public functions need not.

TileLang's own checks, of every dtype, device, constant shape and stride, and of extents that two parameters share, raise. What
depends on addresses and on dynamic extents and strides is left to `launch_only_if`. Together they let through what validation
lets through and the launcher takes this very kernel for, and nothing else (tests/compile/test_cuda_host.py compares), but for
one thing: tensors that all lie on another GPU. Those are launched there; `kvhal.platform.on_device` sees to it that none come.
"""

from typing import Any

import tilelang.language as T

from kvhal.backends.cuda_tilelang.build import BF16_BYTES, ROW_ALIGNMENT
from kvhal.formats import ALIGNMENT
from kvhal.layout import CacheGeometry, min_block_stride

Counts = tuple[int, int]  #: the least and the most tokens, or segments, that a kernel is meant for
ANY_COUNT = (1, 2**63 - 1)
REFUSED = 1  #: what a host function returns where it launches nothing; else it returns None


@T.macro
def launch_only_if(condition):
    """Before a kernel's `T.Kernel`: where the condition does not hold, its host function returns REFUSED."""
    if T.cast(condition, "int32") == 0:  # as a number: TVM would reason about its parts for seconds
        T.evaluate(T.ret(T.int64(REFUSED)))


def count_between(count: Any, least: int, most: int) -> Any:
    """Whether there are so many tokens, or segments."""
    return (least <= count) & (count <= most)


def rows_fit(rows: Any, stride: Any, count: Any, width: int, item: int) -> Any:
    """What `aligned` says, of 2-d rows that are a parameter: `width` elements of `item` bytes, `stride` elements apart."""
    apart = (stride * item % ROW_ALIGNMENT == 0) | (stride == width) | (count <= 1)
    return divides(rows, ROW_ALIGNMENT) & apart


def meant(fit: Any, alignment: int) -> Any:
    """Whether a kernel built for rows of this alignment is the one for rows that `rows_fit`, or do not."""
    return fit if alignment == ROW_ALIGNMENT else T.Not(fit)


def cache_fits(cache: Any, blocks: Any, stride: Any, geometry: CacheGeometry) -> Any:
    """What `kvhal.layout.geometry_of` demands of a cache's address and of its block stride."""
    layout, size = geometry.layout, geometry.block_size
    step = stride * (BF16_BYTES if layout.quantized_dtype is None else 1)
    whole = (step % ALIGNMENT == 0) & (step >= size * layout.bytes_per_token)
    return divides(cache, ALIGNMENT) & (whole | ((blocks <= 1) & (step <= min_block_stride(layout, size))))


def divides(tensor: Any, alignment: int) -> Any:
    """Whether an argument's address is a multiple of `alignment` bytes."""
    return T.reinterpret(tensor.data, "uint64") % T.uint64(alignment) == T.uint64(0)
