"""Calls of portable_triton's launchers on CPU tensors, for tests that compile or count instead of launching."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvhal.formats import BUILTIN_FORMATS, KVCacheFormat
from kvhal.interface import HadamardArgs, NormArgs, Op, Request, RopeArgs
from kvhal.layout import DATA_DTYPES, alloc_kv_cache, sf_output
from kvhal.platform import Platform

FEW, MANY = 100, 4096  #: tokens for which every operation takes its kernel for few, if it has one, and for many

if TYPE_CHECKING:
    from tests.triton.aot import Job


def rows(count: int, elements: int, misaligned: bool, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``[count, elements]``, one column into wider rows when misaligned."""
    if misaligned:
        return torch.zeros((count, elements + 1), dtype=dtype)[:, 1:]
    return torch.zeros((count, elements), dtype=dtype)


def call(job: Job) -> None:
    """Binds and calls the job's launcher as the public operation would."""
    from kvhal.backends.portable_triton.manifest import BACKEND
    from tests.triton.aot import TARGETS

    layout = BUILTIN_FORMATS[job.format] if job.format else None
    request = Request(Op(job.op), layout, Platform(TARGETS[job.arch][0], job.arch), 64 if layout else None)
    launch = BACKEND.bind(request)
    if layout is None:
        index_call(request.op, launch)
    else:
        format_call(request.op, launch, layout, job.variant, FEW if "few" in job.variant else MANY)


def sweep(arch: str) -> Iterator[tuple[tuple[str, str], Callable[[], None]]]:
    """((name, "sizes" | "alignments"), call) over sizes, slot types and alignments; one launcher an operation and format."""
    from kvhal.backends.portable_triton.manifest import BACKEND
    from tests.triton.aot import TARGETS

    platform = Platform(TARGETS[arch][0], arch)
    for name in ("V41_FORMAT", "V41_FP4_FORMAT", "MXFP8_INDEX_KV_FORMAT", "BF16_FORMAT"):
        layout = BUILTIN_FORMATS[name]
        for op in (Op.STORE, Op.LOAD, Op.LOAD_SLOTS, Op.FUSED_STORE):
            launch = BACKEND.bind(Request(op, layout, platform, 64))
            for n in range(1, MANY, MANY // 200):  # the kernels for few tokens and those for many
                dtype = torch.int32 if n // (MANY // 200) % 2 else torch.int64
                run = partial(format_call, op, launch, layout, "", n, 1 + n // 140, dtype)
                yield (f"{op}/{name}", "sizes"), run
            for variant in ("", "misaligned"):
                for n in (1, 16, 33, MANY):
                    for dtype in (torch.int32, torch.int64):
                        run = partial(format_call, op, launch, layout, variant, n, 2, dtype)
                        yield (f"{op}/{name}", "alignments"), run
    for op in (Op.CONVERT_INDEX, Op.INDEX_CAT, Op.EXPAND_SWA_INDEX, Op.DECODE_SWA_INDEX, Op.EXPAND_LOAD_PLAN):
        launch = BACKEND.bind(Request(op, None, platform, None))
        for n in range(1, 201):
            yield (str(op), "alignments"), partial(index_call, op, launch, n, 2 * n)
            yield (str(op), "sizes"), partial(index_call, op, launch, n, 64 * n)


def format_call(
    op: Op,
    launch: Callable[..., None],
    layout: KVCacheFormat,
    variant: str,
    n: int,
    blocks: int = 3,
    slot_dtype: torch.dtype = torch.int64,
) -> None:
    """One call of an operation on records: n tokens, a cache of `blocks` blocks of 64 tokens."""
    cache, misaligned = alloc_kv_cache(blocks, 64, layout, "cpu"), variant == "misaligned"
    slots = torch.zeros(n, dtype=slot_dtype)
    kv, segments = rows(n, layout.elements, misaligned), torch.zeros((-(-n // 64), 4), dtype=torch.int32)
    if op == Op.STORE:
        launch(kv, cache, slots)
    elif op == Op.LOAD_SLOTS:
        launch(cache, slots, kv)
    elif op == Op.LOAD and layout.is_index:
        dtype, tail = sf_output(layout)
        data = torch.zeros((n, layout.data_bytes), dtype=torch.uint8).view(DATA_DTYPES[layout.quantized_dtype])
        launch(cache, segments, n, data, torch.zeros((n, *tail), dtype=dtype))
    elif op == Op.LOAD:
        launch(cache, segments, n, kv, None)
    else:
        full = "back" in variant
        norm = None if full else NormArgs(torch.zeros(layout.elements, dtype=torch.bfloat16))
        rope = RopeArgs(slots, torch.zeros((9, 64)), 64, is_neox_style=full, offset=layout.elements - 64)
        launch(kv, norm, rope, HadamardArgs() if "hadamard" in variant else None, cache, slots, kv.clone() if full else None)


def index_call(op: Op, launch: Callable[..., None], n: int = 5, width: int = 100) -> None:
    """One call of an index operation: n rows of `width` entries."""
    table = torch.zeros((n, width), dtype=torch.int32)
    if op == Op.CONVERT_INDEX:
        launch(table.view(1, n, width), table[:1], torch.zeros((1, n), dtype=torch.int32), 64)
    elif op == Op.INDEX_CAT:
        launch(table, table, 7, torch.zeros((n, 2 * width), dtype=torch.int32))
    elif op == Op.EXPAND_SWA_INDEX:
        launch(torch.zeros((n, 4), dtype=torch.int32), table)
    elif op == Op.EXPAND_LOAD_PLAN:
        launch(torch.zeros((n, 5), dtype=torch.int32), table, 64, torch.zeros((width, 4), dtype=torch.int32))
    else:
        launch(torch.zeros((n, 2), dtype=torch.int32), 64, table)
