"""Store: quantise one record a token, scatter it by slot."""

from typing import Any

import tilelang.language as T
import torch

from kvhal.backends.cuda_tilelang.build import (
    BF16_BYTES,
    ROW_ALIGNMENT,
    SLOT_DTYPES,
    Kernel,
    aligned,
    cache_argument,
    call,
    kernel,
    launcher,
)
from kvhal.backends.cuda_tilelang.codec import OCTET, OCTET_WORDS, WARP, Octets, source
from kvhal.backends.cuda_tilelang.host import ANY_COUNT, Counts, cache_fits, count_between, launch_only_if, meant, rows_fit
from kvhal.backends.cuda_tilelang.tuned import ONE_ROUND, TUNED_ROUNDS, shape_of
from kvhal.formats import KVCacheFormat
from kvhal.interface import Launcher, Request
from kvhal.layout import CacheGeometry, cache_geometry
from kvhal.tuning import MULTIPROCESSORS, Shape

#: as build.FEW_BLOCKS: so many of 128 threads are there at a time, so that each has its first row on its way
FEW_STORE_BLOCKS = 16 * MULTIPROCESSORS


def bind_store(request: Request) -> Launcher:
    """``launch(kv, cache, slots)``, see `kvhal.interface`."""
    built: dict[tuple[torch.dtype, bool, bool], Kernel] = {}
    name = "store_index" if request.layout.is_index else "store"
    many = shape_of(request.platform.arch, name, request.layout.quantized_dtype)

    def prepare(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> Kernel:
        key = (slots.dtype, aligned(kv), kv.shape[0] <= many[2])
        run = built.get(key)
        if run is None:
            alignment = ROW_ALIGNMENT if key[1] else BF16_BYTES
            shape, counts = ((*ONE_ROUND, 0, 1), (1, many[2])) if key[2] else (many, (many[2] + 1, ANY_COUNT[1]))
            arguments = (request.layout, request.block_size, SLOT_DTYPES[key[0]], alignment, shape, counts)
            run = built[key] = kernel(store_kernel, *arguments, platform=request.platform, device=kv.device)
        return run

    return launcher(prepare, checks=True)


def store_kernel(
    layout: KVCacheFormat, block_size: int, slot_dtype: str, alignment: int, shape: Shape, counts: Counts = ANY_COUNT
) -> Any:
    """Each warp quantises a few tokens in registers; all their rows are read before the first is used.

    Args:
        layout, block_size: what is static of the cache.
        slot_dtype: "int32" or "int64".
        alignment: bytes that divide every row's address, ROW_ALIGNMENT or BF16_BYTES.
        shape: see tuned.py; the tokens in it are the launcher's business.
        counts: the least and the most tokens that the kernel is meant for.
    """
    geometry, octets = cache_geometry(layout, block_size), Octets.of(layout)
    tokens, warps, _, held = shape
    rounds, lanes, side, step = octets.rounds, octets.lanes, octets.tokens_a_warp, tokens * octets.tokens_a_warp
    held = held if rounds <= TUNED_ROUNDS else 1  # larger records need the registers of several
    n, blocks, kv_stride, block_stride = (T.dynamic(name, "int64") for name in ("n", "blocks", "kv_stride", "block_stride"))
    await_rows, put_record = row_waiter(octets), record_writer(geometry)

    @T.prim_func
    def store(
        kv: T.StridedTensor((n, layout.elements), (kv_stride, 1), "bfloat16"),
        cache: cache_argument(geometry, blocks, block_stride),
        slots: T.Tensor((n,), slot_dtype),
    ):
        launch_only_if(
            count_between(n, *counts)
            & meant(rows_fit(kv, kv_stride, n, layout.elements, BF16_BYTES), alignment)
            & cache_fits(cache, blocks, block_stride, geometry)
        )
        with T.Kernel(T.ceildiv(n, step * warps), threads=WARP * warps, prelude=source(geometry, alignment)) as group:
            T.annotate_min_blocks_per_sm(held)
            raw = T.alloc_local((tokens * rounds * OCTET_WORDS,), "uint32")
            data = T.alloc_local((rounds * octets.data_words,), "uint32")
            sf = T.alloc_local((rounds,), "uint32")
            slot = T.alloc_local((tokens,), "int64")
            thread = T.get_thread_binding()
            lane = thread % lanes
            first = T.cast(group * warps + thread // WARP, "int64") * step + thread % WARP // lanes
            early = T.ceildiv(n, step * warps) <= FEW_STORE_BLOCKS
            if early:
                call("kv::prefetch", T.address_of(slots[T.min(first, n - 1)]))
            if layout.quantized_dtype != "e2m1":  # those take up to 0.3 us more with it at 4,096 and 8,192 tokens
                call("kv::ready", T.address_of(kv[T.min(first, n - 1), lane * OCTET]))
            await_rows(early, kv, first, n, lane)
            for i in T.unroll(tokens):
                row = T.min(first + i * side, n - 1)  # past the last token: its row again, for no slot
                slot[i] = T.if_then_else(first + i * side < n, T.cast(slots[row], "int64"), T.int64(-1))
                for h in T.unroll(rounds):
                    octet = h * lanes + lane
                    word = (i * rounds + h) * OCTET_WORDS
                    if octets.padded:
                        for w in T.unroll(OCTET_WORDS):
                            raw[word + w] = T.uint32(0)
                    if octet < octets.count:
                        call("kv::get_row", T.address_of(raw[word]), T.address_of(kv[row, octet * OCTET]))
            for i in T.unroll(tokens):
                put_record(cache, slot[i], blocks * block_size, lane, raw, i * rounds * OCTET_WORDS, data, sf)

    return store


def row_waiter(octets: Octets) -> Any:
    """A macro that waits for the kernels in front, see build.FEW_BLOCKS. Where the next kernel may start before that, a lane's
    octets of its first row are brought to L2 meanwhile: a hint, which reads nothing."""

    @T.macro
    def await_rows(early, kv, row, n, lane):
        if early:
            T.pdl_trigger()
            if row < n:
                for h in T.unroll(octets.rounds):
                    if h * octets.lanes + lane < octets.count:
                        call("kv::prefetch", T.address_of(kv[row, (h * octets.lanes + lane) * OCTET]))
        T.pdl_sync()

    return await_rows


def record_writer(geometry: CacheGeometry) -> Any:
    """A macro that quantises one token's octets, in the registers of the lanes that share it, and writes them to its slot.

    Every lane of the warp must come here, since lanes exchange maxima; a slot out of range is then skipped.
    """
    quantized, block_size = geometry.layout.quantized_dtype is not None, T.uint64(geometry.block_size)
    item = 1 if quantized else BF16_BYTES  # of the cache's dtype

    @T.macro
    def put_record(cache, slot, capacity, lane, raw, word, data, sf):
        if quantized:
            call("kv::quantize", T.address_of(data[0]), T.address_of(sf[0]), T.address_of(raw[word]))
        place = T.cast(slot, "uint64")  # negative ones are beyond any capacity
        if place < T.cast(capacity, "uint64"):
            block = T.cast(T.truncdiv(place, block_size), "int64")
            token = T.cast(T.truncmod(place, block_size), "int64")
            if quantized:
                call(
                    "kv::put_record",
                    T.address_of(cache[block, 0, 0, token * geometry.data_token_stride]),
                    T.address_of(cache[block, 0, 0, token * geometry.sf_token_stride + geometry.sf_offset]),
                    lane,
                    T.address_of(data[0]),
                    T.address_of(sf[0]),
                )
            else:
                call(
                    "kv::put_record",
                    T.address_of(cache[block, 0, 0, token * (geometry.data_token_stride // item)]),
                    T.address_of(cache[block, 0, 0, 0]),
                    lane,
                    T.address_of(raw[word]),
                    T.address_of(sf[0]),
                )

    return put_record
