"""Store: quantise one record a token, scatter it by slot."""

from typing import Any

import tilelang.language as T
import torch

from kvhal.backends.cuda_tilelang.build import (
    ITEM_ALIGNMENT,
    ROW_ALIGNMENT,
    SLOT_DTYPES,
    Kernel,
    aligned,
    cache_argument,
    call,
    kernel,
)
from kvhal.backends.cuda_tilelang.codec import OCTET, OCTET_WORDS, WARP, Octets, source
from kvhal.formats import SF_ITEM_BYTES, KVCacheFormat
from kvhal.interface import Launcher, Request
from kvhal.layout import CacheGeometry, cache_geometry

TOKENS = 4  #: rounds of tokens a warp: as many independent rows are in flight before the first is used
WARPS = 1  #: a thread block


def bind_store(request: Request) -> Launcher:
    """``launch(kv, cache, slots)``, see `kvhal.interface`."""
    built: dict[tuple[torch.dtype, bool], Kernel] = {}

    def launch(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        key = (slots.dtype, aligned(kv))
        run = built.get(key)
        if run is None:
            alignment = ROW_ALIGNMENT if key[1] else ITEM_ALIGNMENT
            arguments = (request.layout, request.block_size, SLOT_DTYPES[key[0]], alignment)
            run = built[key] = kernel(store_kernel, *arguments, platform=request.platform, device=kv.device)
        run(kv, cache, slots)

    return launch


def store_kernel(
    layout: KVCacheFormat, block_size: int, slot_dtype: str, alignment: int, tokens: int = TOKENS, warps: int = WARPS
) -> Any:
    """Each warp quantises `tokens` rounds of tokens in registers; all rows are read before the first is used.

    Args:
        layout, block_size: what is static of the cache.
        slot_dtype: "int32" or "int64".
        alignment: bytes that divide every row's address, ROW_ALIGNMENT or ITEM_ALIGNMENT.
        tokens, warps: see TOKENS and WARPS.
    """
    geometry, octets = cache_geometry(layout, block_size), Octets.of(layout)
    rounds, lanes, side, step = octets.rounds, octets.lanes, octets.tokens_a_warp, tokens * octets.tokens_a_warp
    n, blocks = T.dynamic("n", "int64"), T.dynamic("blocks", "int64")
    kv_stride, block_stride = T.dynamic("kv_stride", "int64"), T.dynamic("block_stride", "int64")
    put_record = record_writer(geometry)

    @T.prim_func
    def store(
        kv: T.StridedTensor((n, layout.elements), (kv_stride, 1), "bfloat16"),
        cache: cache_argument(geometry, blocks, block_stride),
        slots: T.Tensor((n,), slot_dtype),
    ):
        with T.Kernel(T.ceildiv(n, step * warps), threads=WARP * warps, prelude=source(geometry, alignment)) as group:
            raw = T.alloc_local((tokens * rounds * OCTET_WORDS,), "uint32")
            data = T.alloc_local((rounds * octets.data_words,), "uint32")
            sf = T.alloc_local((rounds,), "uint32")
            slot = T.alloc_local((tokens,), "int64")
            thread = T.get_thread_binding()
            lane = thread % lanes
            first = T.cast(group * warps + thread // WARP, "int64") * step + thread % WARP // lanes
            T.pdl_sync()
            for i in T.unroll(tokens):
                slot[i] = T.int64(-1)
                if first + i * side < n:
                    slot[i] = T.cast(slots[first + i * side], "int64")
                for h in T.unroll(rounds):
                    octet = h * lanes + lane
                    word = (i * rounds + h) * OCTET_WORDS
                    for w in T.unroll(OCTET_WORDS):
                        raw[word + w] = T.uint32(0)
                    if (first + i * side < n) & (octet < octets.count):
                        call("kv::get_row", T.address_of(raw[word]), T.address_of(kv[first + i * side, octet * OCTET]))
            for i in T.unroll(tokens):
                put_record(cache, slot[i], blocks * block_size, lane, raw, i * rounds * OCTET_WORDS, data, sf)

    return store


def record_writer(geometry: CacheGeometry) -> Any:
    """A macro that quantises one token's octets, in the registers of the lanes that share it, and writes them to its slot.

    Every lane of the warp must come here, since lanes exchange maxima; a slot out of range is then skipped.
    """
    layout, octets, block_size = geometry.layout, Octets.of(geometry.layout), geometry.block_size
    if layout.quantized_dtype is None:

        @T.macro
        def put_copied(cache, slot, capacity, lane, raw, word, data, sf):
            if (slot >= 0) & (slot < capacity):
                block = T.truncdiv(slot, T.int64(block_size))
                for h in T.unroll(octets.rounds):
                    octet = h * octets.lanes + lane
                    if octet < octets.count:
                        element = (slot - block * block_size) * layout.elements + octet * OCTET
                        call(
                            "kv::put_data", T.address_of(cache[block, 0, 0, element]), T.address_of(raw[word + h * OCTET_WORDS])
                        )

        return put_copied

    sf_bytes = SF_ITEM_BYTES[str(layout.sf_format)]

    @T.macro
    def put_record(cache, slot, capacity, lane, raw, word, data, sf):
        call("kv::quantize", T.address_of(data[0]), T.address_of(sf[0]), T.address_of(raw[word]))
        if (slot >= 0) & (slot < capacity):
            block = T.truncdiv(slot, T.int64(block_size))
            token = slot - block * block_size
            for h in T.unroll(octets.rounds):
                octet = h * octets.lanes + lane
                if octet < octets.count:
                    byte = token * geometry.data_token_stride + octet * octets.data_bytes
                    call("kv::put_data", T.address_of(cache[block, 0, 0, byte]), T.address_of(data[h * octets.data_words]))
                    if octet % octets.group == 0:
                        byte = geometry.sf_offset + token * geometry.sf_token_stride + octet // octets.group * sf_bytes
                        call("kv::put_scale", T.address_of(cache[block, 0, 0, byte]), sf[h])

    return put_record
