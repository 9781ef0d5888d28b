"""The fused store: norm, rotary embedding, Hadamard, cast and scatter with a token's record in registers throughout."""

import struct
from dataclasses import dataclass
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
from kvhal.backends.cuda_tilelang.fused_cuda import CONVERT, HADAMARD, NORM, ROPE_PAIRS, ROPE_SHARED, ROTATE
from kvhal.backends.cuda_tilelang.store import record_writer
from kvhal.formats import KVCacheFormat
from kvhal.interface import HadamardArgs, Launcher, NormArgs, Request, RopeArgs
from kvhal.layout import cache_geometry

TOKENS = 2  #: rounds of tokens a warp
WARPS = 4  #: a thread block
FLOAT_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True)
class Rope:
    """The static facts of a rotary embedding; `wide`: the cache's rows are read in 16-byte accesses."""

    begin: int
    dim: int
    neox: bool
    wide: bool
    position_dtype: str


@dataclass(frozen=True)
class Stages:
    """What a fused kernel is specialised by, beside format and block size; None leaves a stage out."""

    input_dtype: str
    weight_dtype: str | None
    rope: Rope | None
    hadamard: bool
    slot_dtype: str | None
    back: bool
    alignment: int


def bind_fused_store(request: Request) -> Launcher:
    """``launch(kv, norm, rope, hadamard, cache, slots, back)``, see `kvhal.interface`."""
    layout, block_size = request.layout, request.block_size or 1
    built: dict[Any, tuple[Kernel, torch.Tensor]] = {}

    def launch(
        kv: torch.Tensor,
        norm: NormArgs | None,
        rope: RopeArgs | None,
        hadamard: HadamardArgs | None,
        cache: torch.Tensor | None,
        slots: torch.Tensor | None,
        back: torch.Tensor | None,
    ) -> None:
        wide = aligned(kv) and (back is None or aligned(back)) and (norm is None or norm.weight.data_ptr() % ROW_ALIGNMENT == 0)
        stages = Stages(
            FLOAT_DTYPES[kv.dtype],
            None if norm is None else FLOAT_DTYPES[norm.weight.dtype],
            None if rope is None else _rope(rope, kv.shape[1]),
            hadamard is not None,
            None if slots is None else SLOT_DTYPES[slots.dtype],
            back is not None,
            ROW_ALIGNMENT if wide else ITEM_ALIGNMENT,
        )
        if stages not in built:
            run = kernel(fused_kernel, layout, block_size, stages, platform=request.platform, device=kv.device)
            built[stages] = run, torch.empty(1, device=kv.device)  # stands for arguments that are left out
        run, absent = built[stages]
        weight, eps = (absent, 0.0) if norm is None else (norm.weight, float(norm.eps))
        positions, cos_sin = (absent, absent) if rope is None else (rope.positions, rope.cos_sin_cache)
        run(
            kv,
            weight,
            eps,
            positions,
            cos_sin,
            absent if cache is None else cache,
            absent if slots is None else slots,
            absent if back is None else back,
        )

    return launch


def _rope(rope: RopeArgs, elements: int) -> Rope:
    begin = elements - rope.rope_dim if rope.offset is None else rope.offset
    wide = begin % OCTET == 0 and rope.rope_dim % OCTET == 0 and aligned(rope.cos_sin_cache)
    return Rope(begin, rope.rope_dim, rope.is_neox_style, wide, SLOT_DTYPES[rope.positions.dtype])


def fused_source(layout: KVCacheFormat, stages: Stages, tokens_a_block: int) -> str:
    """The device functions of the stages that are switched on; they go between the codec's and the kernel."""
    scale = struct.unpack("f", struct.pack("f", layout.elements**-0.5))[0]
    constants = {"ELEMENTS": layout.elements, "TOKENS_A_BLOCK": tokens_a_block}
    functions = [CONVERT]
    if stages.weight_dtype is not None:
        functions.append(NORM)
    if stages.rope is not None:
        rope = stages.rope
        constants |= {"ROPE_BEGIN": rope.begin, "ROPE_DIM": rope.dim, "ROPE_NEOX": int(rope.neox), "ROPE_WIDE": int(rope.wide)}
        functions += [ROPE_SHARED] if rope.neox or rope.begin % 2 else [ROTATE, ROPE_PAIRS]
    if stages.hadamard:
        functions.append(HADAMARD)
    lines = [f"constexpr int {name} = {value};" for name, value in constants.items()]
    lines.append(f"constexpr float HADAMARD_SCALE = {scale.hex()}f;")
    return "namespace kv {\n" + "\n".join(lines) + "".join(functions) + "}  // namespace kv\n"


def fused_kernel(layout: KVCacheFormat, block_size: int, stages: Stages, tokens: int = TOKENS, warps: int = WARPS) -> Any:
    """Each warp carries `tokens` rounds of tokens through the stages; weights stay in its registers.

    Args:
        layout, block_size: what is static of the cache.
        stages: what else is static.
        tokens, warps: see TOKENS and WARPS.
    """
    geometry, octets = cache_geometry(layout, block_size), Octets.of(layout)
    rounds, lanes, side, step = octets.rounds, octets.lanes, octets.tokens_a_warp, tokens * octets.tokens_a_warp
    quantized = layout.quantized_dtype is not None
    prelude = source(geometry, stages.alignment) + fused_source(layout, stages, side * warps)
    n, blocks, block_stride = T.dynamic("n", "int64"), T.dynamic("blocks", "int64"), T.dynamic("block_stride", "int64")
    kv_stride, back_stride = T.dynamic("kv_stride", "int64"), T.dynamic("back_stride", "int64")
    max_position, position_stride = T.dynamic("max_position", "int64"), T.dynamic("position_stride", "int64")
    get_value = {"bfloat16": "kv::get_bf16", "float32": "kv::get_fp32"}
    rope, with_back = stages.rope, stages.back
    with_norm, with_rope, with_slots = stages.weight_dtype is not None, rope is not None, stages.slot_dtype is not None
    put_record = record_writer(geometry)

    def absent_unless(present: Any, shape: tuple[Any, ...], strides: tuple[Any, ...], dtype: str | None) -> Any:
        return T.StridedTensor(shape, strides, dtype) if present else T.Tensor((1,), "float32")

    @T.prim_func
    def fused(
        kv: T.StridedTensor((n, layout.elements), (kv_stride, 1), stages.input_dtype),
        weight: absent_unless(with_norm, (layout.elements,), (1,), stages.weight_dtype),
        eps: T.float32,
        positions: absent_unless(with_rope, (n,), (1,), rope.position_dtype if rope else None),
        cos_sin: absent_unless(with_rope, (max_position, rope.dim if rope else 1), (position_stride, 1), "float32"),
        cache: cache_argument(geometry, blocks, block_stride) if with_slots else T.Tensor((1,), "float32"),
        slots: absent_unless(with_slots, (n,), (1,), stages.slot_dtype),
        back: absent_unless(with_back, (n, layout.elements), (back_stride, 1), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(n, step * warps), threads=WARP * warps, prelude=prelude) as group:
            values = T.alloc_local((tokens * rounds * OCTET,), "float32")
            factors = T.alloc_local((rounds * OCTET,), "float32")
            raw = T.alloc_local((rounds * OCTET_WORDS,), "uint32")
            data = T.alloc_local((rounds * octets.data_words,), "uint32")
            sf = T.alloc_local((rounds,), "uint32")
            slot = T.alloc_local((tokens,), "int64")
            place = T.alloc_local((tokens,), "int64")
            thread = T.get_thread_binding()
            lane = thread % lanes
            first = T.cast(group * warps + thread // WARP, "int64") * step + thread % WARP // lanes
            T.pdl_sync()
            for i in T.unroll(tokens):
                slot[i] = T.int64(-1)
                place[i] = T.int64(-1)
                if first + i * side < n:
                    if with_slots:
                        slot[i] = T.cast(slots[first + i * side], "int64")
                    if with_rope:
                        place[i] = T.cast(positions[first + i * side], "int64")
                for h in T.unroll(rounds):
                    octet = h * lanes + lane
                    value = (i * rounds + h) * OCTET
                    for v in T.unroll(OCTET):
                        values[value + v] = T.float32(0)
                    if (first + i * side < n) & (octet < octets.count):
                        call(
                            get_value[stages.input_dtype],
                            T.address_of(values[value]),
                            T.address_of(kv[first + i * side, octet * OCTET]),
                        )
            if with_norm:
                for h in T.unroll(rounds):
                    for v in T.unroll(OCTET):
                        factors[h * OCTET + v] = T.float32(0)
                    if h * lanes + lane < octets.count:
                        call(
                            get_value[stages.weight_dtype],
                            T.address_of(factors[h * OCTET]),
                            T.address_of(weight[(h * lanes + lane) * OCTET]),
                        )
            for i in T.unroll(tokens):
                value = i * rounds * OCTET
                if with_norm:
                    call("kv::norm", T.address_of(values[value]), T.address_of(factors[0]), eps)
                if with_rope:
                    valid = (place[i] >= 0) & (place[i] < max_position)
                    row = T.if_then_else(valid, place[i], T.int64(0))
                    call("kv::rope", T.address_of(values[value]), T.address_of(cos_sin[row, 0]), valid, lane)
                if stages.hadamard:
                    call("kv::hadamard", T.address_of(values[value]), lane)
                call("kv::narrow", T.address_of(raw[0]), T.address_of(values[value]))
                if with_slots:
                    put_record(cache, slot[i], blocks * block_size, lane, raw, 0, data, sf)
                elif quantized:
                    call("kv::quantize", T.address_of(data[0]), T.address_of(sf[0]), T.address_of(raw[0]))
                if with_back:
                    for h in T.unroll(rounds):
                        octet = h * lanes + lane
                        if (first + i * side < n) & (octet < octets.count):
                            element = octet * OCTET
                            if quantized:
                                call(
                                    "kv::decode_row",
                                    T.address_of(back[first + i * side, element]),
                                    T.address_of(data[h * octets.data_words]),
                                    sf[h],
                                )
                            else:
                                call(
                                    "kv::put_row",
                                    T.address_of(back[first + i * side, element]),
                                    T.address_of(raw[h * OCTET_WORDS]),
                                )

    return fused
