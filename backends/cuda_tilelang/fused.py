"""The fused store: norm, rotary embedding, Hadamard, cast and scatter with a token's record in registers throughout."""

import struct
from dataclasses import dataclass
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
from kvhal.backends.cuda_tilelang.fused_cuda import CONVERT, HADAMARD, NORM, ROOT, ROPE, ROPE_INSIDE
from kvhal.backends.cuda_tilelang.store import record_writer
from kvhal.backends.cuda_tilelang.tuned import shape_of
from kvhal.formats import KVCacheFormat
from kvhal.interface import Launcher, NormArgs, Request, RopeArgs
from kvhal.layout import CacheGeometry, cache_geometry

MAX_TOKENS = 2**30  #: tokens are counted in 32 bits
FLOAT_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
TYPE_NAMES = {"bfloat16": "bf16", "float32": "fp32"}
INPUT_WORDS = {"bfloat16": OCTET_WORDS, "float32": OCTET}  #: 32-bit registers of an octet as it comes
TUNED_ROUNDS = 2  #: octets of a lane in the records that tuned.py was measured with


@dataclass(frozen=True)
class Rope:
    """The static facts of a rotary embedding."""

    begin: int
    dim: int
    neox: bool
    position_dtype: str

    @property
    def inside(self) -> bool:
        """Every pair lies inside an octet, so that its lane rotates it alone."""
        return not self.neox and self.begin % OCTET == 0 and self.dim % OCTET == 0

    def turns(self, octets: Octets) -> int:
        """Cosines and sines that a lane keeps: of every pair that it rotates."""
        if self.inside:
            span = octets.lanes * OCTET  # elements of a round
            return OCTET * ((self.begin + self.dim - 1) // span - self.begin // span + 1)
        return 2 * -(-self.dim // (2 * octets.lanes))


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
    built: dict[Stages, Kernel] = {}
    shape = shape_of(request.platform.arch, "fused", layout.quantized_dtype)

    def prepare(
        kv: torch.Tensor, norm: NormArgs | None, rope: RopeArgs | None, hadamard: Any, *into: torch.Tensor | None
    ) -> Kernel:
        _, slots, back = into
        if kv.shape[0] > MAX_TOKENS:
            raise ValueError(f"kv: has {kv.shape[0]} rows, {request.op} takes {MAX_TOKENS} at a time; pass it in parts")
        wide = aligned(kv) and (back is None or aligned(back)) and (norm is None or norm.weight.data_ptr() % ROW_ALIGNMENT == 0)
        wide = wide and (rope is None or aligned(rope.cos_sin_cache))
        stages = Stages(
            FLOAT_DTYPES[kv.dtype],
            None if norm is None else FLOAT_DTYPES[norm.weight.dtype],
            None if rope is None else _rope(rope, kv.shape[1]),
            hadamard is not None,
            None if slots is None else SLOT_DTYPES[slots.dtype],
            back is not None,
            ROW_ALIGNMENT if wide else BF16_BYTES,
        )
        run = built.get(stages)
        if run is None:
            compiled = kernel(fused_kernel, layout, block_size, stages, shape, platform=request.platform, device=kv.device)
            run = built[stages] = _without_holes(compiled, torch.empty(1, device=kv.device))
        return run

    return launcher(prepare)


def _without_holes(run: Kernel, absent: torch.Tensor) -> Kernel:
    """A kernel behind the launcher's arguments; `absent`, a tensor of one float, stands for those that are left out."""

    def launch(kv: torch.Tensor, norm: NormArgs | None, rope: RopeArgs | None, _: Any, *into: torch.Tensor | None) -> None:
        weight, eps = (absent, 0.0) if norm is None else (norm.weight, float(norm.eps))
        positions, cos_sin = (absent, absent) if rope is None else (rope.positions, rope.cos_sin_cache)
        cache, slots, back = [absent if tensor is None else tensor for tensor in into]
        run(kv, weight, eps, positions, cos_sin, cache, slots, back)

    return launch


def _rope(rope: RopeArgs, elements: int) -> Rope:
    begin = elements - rope.rope_dim if rope.offset is None else rope.offset
    return Rope(begin, rope.rope_dim, rope.is_neox_style, SLOT_DTYPES[rope.positions.dtype])


def fused_source(layout: KVCacheFormat, stages: Stages, tokens_a_block: int) -> str:
    """The device functions of the stages that are switched on; they follow the codec's."""
    scale = struct.unpack("f", struct.pack("f", layout.elements**-0.5))[0]
    constants = {"ELEMENTS": layout.elements, "TOKENS_A_BLOCK": tokens_a_block}
    functions = [CONVERT]
    if stages.weight_dtype is not None:
        functions += [ROOT, NORM]
    if stages.rope is not None:
        rope = stages.rope
        constants |= {"ROPE_BEGIN": rope.begin, "ROPE_DIM": rope.dim, "ROPE_NEOX": int(rope.neox)}
        functions.append(ROPE_INSIDE if rope.inside else ROPE)
    if stages.hadamard:
        functions.append(HADAMARD)
    lines = [f"constexpr int {name} = {value};" for name, value in constants.items()]
    lines.append(f"constexpr float HADAMARD_SCALE = {scale.hex()}f;")
    return "namespace kv {\n" + "\n".join(lines) + "".join(functions) + "}  // namespace kv\n"


def fused_kernel(layout: KVCacheFormat, block_size: int, stages: Stages, shape: tuple[int, int, int]) -> Any:
    """Each warp carries a token after another through the stages, the next one's row on its way. See Stages and tuned.py."""
    geometry, octets, (warps, blocks_at_most, held) = cache_geometry(layout, block_size), Octets.of(layout), shape
    rounds, lanes, tokens = octets.rounds, octets.lanes, octets.tokens_a_warp * warps  # of a thread block
    prelude = source(geometry, stages.alignment) + fused_source(layout, stages, tokens)
    n, blocks, block_stride = T.dynamic("n"), T.dynamic("blocks", "int64"), T.dynamic("block_stride", "int64")
    kv_stride, back_stride = T.dynamic("kv_stride", "int64"), T.dynamic("back_stride", "int64")
    max_position, position_stride = T.dynamic("max_position", "int64"), T.dynamic("position_stride", "int64")
    words, step, rope = INPUT_WORDS[stages.input_dtype], tokens * blocks_at_most, stages.rope
    turn_count = rope.turns(octets) if rope else 1
    with_norm, with_rope, with_slots = stages.weight_dtype is not None, rope is not None, stages.slot_dtype is not None
    stage_weights = f"kv::stage_{TYPE_NAMES.get(str(stages.weight_dtype))}"
    fetch, finish = token_reader(layout, stages), value_writer(geometry, stages)
    held = held if rounds <= TUNED_ROUNDS else 1  # larger records need the registers of several

    @T.prim_func
    def fused(
        kv: T.StridedTensor((n, layout.elements), (kv_stride, 1), stages.input_dtype),
        weight: _absent_unless(stages.weight_dtype, (layout.elements,), (1,), stages.weight_dtype),
        eps: T.float32,
        positions: _absent_unless(rope, (n,), (1,), rope.position_dtype if rope else None),
        cos_sin: _absent_unless(rope, (max_position, rope.dim if rope else 1), (position_stride, 1), "float32"),
        cache: cache_argument(geometry, blocks, block_stride) if with_slots else T.Tensor((1,), "float32"),
        slots: _absent_unless(with_slots, (n,), (1,), stages.slot_dtype),
        back: _absent_unless(stages.back, (n, layout.elements), (back_stride, 1), "bfloat16"),
    ):
        with T.Kernel(T.min(T.ceildiv(n, tokens), blocks_at_most), threads=WARP * warps, prelude=prelude) as program:
            T.annotate_min_blocks_per_sm(held)
            raw = T.alloc_local((rounds * words,), "uint32")  # of the next token
            values = T.alloc_local((rounds * OCTET,), "float32")
            factors = T.alloc_shared((lanes * rounds * OCTET if with_norm else 4,), "float32")
            slot = T.alloc_local((1,), "int64")  # of the next token
            place = T.alloc_local((1,), "int64")  # position of the next token
            turns = T.alloc_local((turn_count,), "float32")  # cosines and sines of the token
            lane = T.get_thread_binding() % lanes
            token = T.alloc_var("int32", init=program * tokens + T.get_thread_binding() // lanes)
            at = T.alloc_var("int64", init=T.cast(token, "int64") * kv_stride + lane * OCTET)  # of the lane's first octet
            T.pdl_sync()
            for w in T.unroll(rounds * words):
                raw[w] = T.uint32(0)
            fetch(kv, at, slots, positions, n, token, lane, raw, slot, place)
            if with_norm:
                call(stage_weights, T.address_of(factors[0]), T.address_of(weight[0]))
                T.sync_threads()
            for _ in T.serial(T.ceildiv(n - program * tokens, step)):  # some token of the thread block
                where = T.alloc_var("int64", init=slot[0])
                call(f"kv::widen_{TYPE_NAMES[stages.input_dtype]}", T.address_of(values[0]), T.address_of(raw[0]))
                if with_rope:
                    valid = T.cast(place[0], "uint64") < T.cast(max_position, "uint64")
                    call("kv::fetch_turns", T.address_of(turns[0]), T.address_of(cos_sin[place[0], 0]), valid, lane)
                fetch(kv, at + step * kv_stride, slots, positions, n, token + step, lane, raw, slot, place)
                if with_norm:
                    call("kv::norm", T.address_of(values[0]), T.address_of(factors[0]), eps, lane)
                if with_rope:
                    call("kv::rope", T.address_of(values[0]), T.address_of(turns[0]), lane)
                finish(values, lane, cache, where, blocks * block_size, back, n, token)
                token += step
                at += step * kv_stride

    return fused


def _absent_unless(present: Any, shape: tuple[Any, ...], strides: tuple[Any, ...], dtype: str | None) -> Any:
    """A tensor parameter; one float stands for an argument that is left out."""
    return T.StridedTensor(shape, strides, dtype) if present else T.Tensor((1,), "float32")


def value_writer(geometry: CacheGeometry, stages: Stages) -> Any:
    """A macro that carries one token's values on: Hadamard, rounding, cast, to the cache and to the row that goes back."""
    octets, quantized = Octets.of(geometry.layout), geometry.layout.quantized_dtype is not None
    put_record, put_back, with_slots = record_writer(geometry), back_writer(geometry.layout), stages.slot_dtype is not None

    @T.macro
    def finish(values, lane, cache, slot, capacity, back, n, token):
        words = T.alloc_local((octets.rounds * OCTET_WORDS,), "uint32")
        data = T.alloc_local((octets.rounds * octets.data_words,), "uint32")
        sf = T.alloc_local((octets.rounds,), "uint32")
        if stages.hadamard:
            call("kv::hadamard", T.address_of(values[0]), lane)
        call("kv::narrow", T.address_of(words[0]), T.address_of(values[0]))
        if with_slots:
            put_record(cache, slot, capacity, lane, words, 0, data, sf)
        elif quantized:
            call("kv::quantize", T.address_of(data[0]), T.address_of(sf[0]), T.address_of(words[0]))
        if stages.back:
            put_back(back, n, token, lane, words, data, sf)

    return finish


def token_reader(layout: KVCacheFormat, stages: Stages) -> Any:
    """A macro that starts the loads of a token: octets, from element `at` of the rows on, slot, position. No token: no slot."""
    octets, with_slots, with_rope = Octets.of(layout), stages.slot_dtype is not None, stages.rope is not None
    words, get = INPUT_WORDS[stages.input_dtype], f"kv::fetch_{TYPE_NAMES[stages.input_dtype]}"

    @T.macro
    def fetch(kv, at, slots, positions, n, token, lane, raw, slot, place):
        slot[0] = T.int64(-1)
        if token < n:
            for h in T.unroll(octets.rounds):
                if h * octets.lanes + lane < octets.count:
                    call(get, T.address_of(raw[h * words]), T.address_of(kv[0, at + h * octets.lanes * OCTET]))
            if with_slots:
                slot[0] = T.cast(slots[token], "int64")
            if with_rope:
                place[0] = T.cast(positions[token], "int64")

    return fetch


def back_writer(layout: KVCacheFormat) -> Any:
    """A macro that writes one token's row as a load of its record would give it."""
    octets, quantized = Octets.of(layout), layout.quantized_dtype is not None

    @T.macro
    def put_back(back, n, token, lane, words, data, sf):
        for h in T.unroll(octets.rounds):
            octet = h * octets.lanes + lane
            if (token < n) & (octet < octets.count):
                if quantized:
                    code = h * octets.data_words
                    call("kv::decode_row", T.address_of(back[token, octet * OCTET]), T.address_of(data[code]), sf[h])
                else:
                    call("kv::put_row", T.address_of(back[token, octet * OCTET]), T.address_of(words[h * OCTET_WORDS]))

    return put_back
