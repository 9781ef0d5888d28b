"""What any kernel takes at least for the bytes of a prefill chunk, launched in a stream as those of cuda_tilelang are.

    python benchmarks/gpu_floor.py OUT.json

A kernel that reads so many bytes of every eight elements and writes so many, all of them where it knows beforehand: no slot and
no segment is read first, nothing is worked out, and all that it reads is on its way to L2 while the kernel in front still runs.
The shortest time of some launch shapes, bytes checked first. Scales (1/32 and 1/16 of the elements' bytes) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import tilelang.language as T
import torch
from rows import DEVICE, write

from kvhal.backends.cuda_tilelang.build import call, kernel
from kvhal.bench.timing import ROTATION_BYTES, Clock, WrongBytes
from kvhal.formats import BF16_FORMAT, V41_FORMAT, V41_FP4_FORMAT, format_to_text
from kvhal.interface import Op
from kvhal.platform import detect
from kvhal.warm import side_by_side

TOKENS, OCTETS = 8192, 64
SHAPES = tuple(product((256, 512, 1024), (1, 2, 4)))  #: threads of a thread block, octets of each
#: bytes of an octet of bf16, and of its data in a record
BYTES = {V41_FORMAT: (16, 8), V41_FP4_FORMAT: (16, 4), BF16_FORMAT: (16, 16)}

MOVE = r"""
namespace moved {
template <int N> struct __align__(4 * N) Words { unsigned at[N]; };
template <int COUNT, int READ> __device__ __forceinline__ void ask(const void* from, int first, int step) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"((const Words<READ / 4>*)from + first + i * step));
  }
}
template <int COUNT, int READ, int WRITE> __device__ __forceinline__
void move(const void* from, void* to, int first, int step) {
  constexpr int R = READ / 4, W = WRITE / 4;
  Words<R> found[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) found[i] = ((const Words<R>*)from)[first + i * step];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    Words<W> made = {};
#pragma unroll
    for (int j = 0; j < (R > W ? R : W); ++j) made.at[j % W] ^= found[i].at[j % R];
    ((Words<W>*)to)[first + i * step] = made;
  }
}
}
"""


def move_kernel(octets: int, read: int, write: int, threads: int, count: int) -> Any:
    """`count` octets a thread: that many words read, folded or repeated into those that are written."""

    @T.prim_func
    def move(source: T.Tensor((octets * read // 4,), "int32"), target: T.Tensor((octets * write // 4,), "int32")):
        with T.Kernel(octets // (threads * count), threads=threads, prelude=MOVE) as block:
            first = block * (threads * count) + T.get_thread_binding()
            T.pdl_trigger()
            call(f"moved::ask<{count}, {read}>", T.address_of(source[0]), first, threads)
            T.pdl_sync()
            call(f"moved::move<{count}, {read}, {write}>", T.address_of(source[0]), T.address_of(target[0]), first, threads)

    return move


def moved(source: torch.Tensor, read: int, write: int) -> torch.Tensor:
    """What `move_kernel` makes of its source."""
    words = source.view(-1, read // 4)
    if write >= read:
        return words.repeat(1, write // read).flatten()
    parts = words.view(-1, read // write, write // 4)
    folded = parts[:, 0]
    for part in range(1, read // write):
        folded = folded ^ parts[:, part]
    return folded.flatten()


def rows(clock: Clock) -> Iterator[dict[str, Any]]:
    """The shortest time of each cell."""
    platform, octets = detect(DEVICE), TOKENS * OCTETS
    cells = [(op, layout) for op in (Op.STORE, Op.LOAD) for layout in BYTES]
    for op, layout in cells:
        read, write = BYTES[layout] if op == Op.STORE else BYTES[layout][::-1]
        count = ROTATION_BYTES // (octets * (read + write))
        sources = torch.randint(0, 1 << 31, (count, octets * read // 4), dtype=torch.int32, device=DEVICE)
        targets = torch.empty((count, octets * write // 4), dtype=torch.int32, device=DEVICE)

        def build(shape: tuple[int, int], read: int = read, write: int = write) -> Callable[..., Any]:
            return kernel(move_kernel, octets, read, write, *shape, platform=platform, device=DEVICE)

        side_by_side([partial(build, shape) for shape in SHAPES])
        times = {}
        for shape in SHAPES:
            targets.fill_(-1)
            calls = [partial(build(shape), sources[n], targets[n]) for n in range(count)]
            for run in calls:
                run()
            if not torch.equal(targets[-1], moved(sources[-1], read, write)):
                raise WrongBytes(f"{op} of {layout}: {shape}")
            times[shape] = clock.median_us(calls, octets * (read + write))
        shape = min(times, key=lambda one: times[one])
        found = {"op": str(op), "format": format_to_text(layout), "tokens": TOKENS, "read": read, "write": write}
        share = octets * (read + write) / times[shape] / 1e3 / clock.copy_gbs
        yield found | {"shape": list(shape), "us": times[shape], "share_of_copy": share}


if __name__ == "__main__":
    write(rows)
