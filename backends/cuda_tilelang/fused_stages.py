"""What the kernels of the fused store are made of: its stages, their device functions, macros on one token."""

import struct
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from kvhal.backends.cuda_tilelang.build import BF16_BYTES, ROW_ALIGNMENT, cache_argument, call
from kvhal.backends.cuda_tilelang.codec import OCTET, OCTET_WORDS, Octets, source
from kvhal.backends.cuda_tilelang.fused_cuda import CONVERT, HADAMARD, NORM, ROOT, ROPE, ROPE_INSIDE
from kvhal.backends.cuda_tilelang.host import Counts, cache_fits, count_between, divides, meant, rows_fit
from kvhal.backends.cuda_tilelang.store import record_writer
from kvhal.layout import CacheGeometry

TYPE_NAMES = {"bfloat16": "bf16", "float32": "fp32"}
INPUT_WORDS = {"bfloat16": OCTET_WORDS, "float32": OCTET}  #: 32-bit registers of an octet as it comes


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


def fused_source(geometry: CacheGeometry, stages: Stages, octets: Octets, tokens: int, *, staged: bool) -> str:
    """The prelude: the codec's device functions, and those of the stages that are switched on.

    Args:
        geometry, stages: what the kernel is specialised by.
        octets: how a record's octets lie on the lanes.
        tokens: of a thread block.
        staged: weights are in shared memory.
    """
    layout = geometry.layout
    scale = struct.unpack("f", struct.pack("f", layout.elements**-0.5))[0]
    constants = {"ELEMENTS": layout.elements, "TOKENS_A_BLOCK": tokens, "STAGED": int(staged)}
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
    return (
        source(geometry, stages.alignment, octets)
        + "namespace kv {\n"
        + "\n".join(lines)
        + "".join(functions)
        + "}  // namespace kv\n"
    )


@dataclass(frozen=True)
class ParameterTypes:
    """The parameters of every kernel of the fused store, and the symbols in them."""

    n: Any
    blocks: Any
    block_stride: Any
    kv_stride: Any
    back_stride: Any
    max_position: Any
    position_stride: Any
    kv: Any
    weight: Any
    positions: Any
    cos_sin: Any
    cache: Any
    slots: Any
    back: Any


def parameter_types(geometry: CacheGeometry, stages: Stages) -> ParameterTypes:
    """Those of kernels of these stages; an argument that is left out is None, whatever it is declared to be."""

    def tensor(present: Any, shape: tuple[Any, ...], strides: tuple[Any, ...], dtype: str | None) -> Any:
        return T.StridedTensor(shape, strides, dtype) if present else T.Tensor((1,), "float32")

    n, blocks, block_stride = (T.dynamic(name, "int64") for name in ("n", "blocks", "block_stride"))
    kv_stride, back_stride = T.dynamic("kv_stride", "int64"), T.dynamic("back_stride", "int64")
    max_position, position_stride = T.dynamic("max_position", "int64"), T.dynamic("position_stride", "int64")
    elements, rope, with_slots = geometry.layout.elements, stages.rope, stages.slot_dtype is not None
    return ParameterTypes(
        n,
        blocks,
        block_stride,
        kv_stride,
        back_stride,
        max_position,
        position_stride,
        kv=tensor(True, (n, elements), (kv_stride, 1), stages.input_dtype),
        weight=tensor(stages.weight_dtype, (elements,), (1,), stages.weight_dtype),
        positions=tensor(rope, (n,), (1,), rope.position_dtype if rope else None),
        cos_sin=tensor(rope, (max_position, rope.dim if rope else 1), (position_stride, 1), "float32"),
        cache=cache_argument(geometry, blocks, block_stride) if with_slots else T.Tensor((1,), "float32"),
        slots=tensor(with_slots, (n,), (1,), stages.slot_dtype),
        back=tensor(stages.back, (n, elements), (back_stride, 1), "bfloat16"),
    )


def operands_fit(geometry: CacheGeometry, stages: Stages, types: ParameterTypes, counts: Counts) -> Any:
    """A function of some parameters, for `launch_only_if`: they are what the launcher would take this kernel for.

    Args:
        geometry, stages, types: what the kernel is specialised by, and its parameters' types.
        counts: the least and the most tokens that it is meant for.
    """
    elements = geometry.layout.elements

    def fit(kv: Any, weight: Any, cos_sin: Any, cache: Any, back: Any) -> Any:
        wide = rows_fit(kv, types.kv_stride, types.n, elements, 4 * INPUT_WORDS[stages.input_dtype] // OCTET)
        if stages.weight_dtype is not None:
            wide &= divides(weight, ROW_ALIGNMENT)
        if stages.rope is not None:
            wide &= rows_fit(cos_sin, types.position_stride, types.max_position, stages.rope.dim, 4)
        if stages.back:
            wide &= rows_fit(back, types.back_stride, types.n, elements, BF16_BYTES)
        found = count_between(types.n, *counts) & meant(wide, stages.alignment)
        return found if stages.slot_dtype is None else found & cache_fits(cache, types.blocks, types.block_stride, geometry)

    return fit


def value_writer(geometry: CacheGeometry, stages: Stages, octets: Octets) -> Any:
    """A macro that carries one token's values through the stages, to the cache and to the row that goes back.

    Beside them it takes the lane's weights, and the cosines and sines that `turn_reader` got.
    """
    quantized, with_slots = geometry.layout.quantized_dtype is not None, stages.slot_dtype is not None
    put_record, put_back = record_writer(geometry), back_writer(octets, quantized)

    @T.macro
    def finish(values, factors, eps, turns, lane, cache, slot, capacity, back, n, token):
        words = T.alloc_local((octets.rounds * OCTET_WORDS,), "uint32")
        data = T.alloc_local((octets.rounds * octets.data_words,), "uint32")
        sf = T.alloc_local((octets.rounds,), "uint32")
        if stages.weight_dtype is not None:
            call("kv::norm", T.address_of(values[0]), T.address_of(factors[0]), eps, lane)
        if stages.rope is not None:
            call("kv::rope", T.address_of(values[0]), T.address_of(turns[0]), lane)
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


def metadata_hint(stages: Stages) -> Any:
    """A macro that has ready, ahead of the wait, where a lane reads besides its row, and brings a token's slot and position to
    L2 where the kernel starts early: a hint, as `row_waiter`'s."""
    with_slots, with_rope, with_norm = stages.slot_dtype is not None, stages.rope is not None, stages.weight_dtype is not None

    @T.macro
    def hint(early, weight, slots, positions, n, token, lane):
        if with_norm:
            call("kv::ready", T.address_of(weight[lane * OCTET]))
        if with_slots:
            call("kv::ready", T.address_of(slots[token]))
        if with_rope:
            call("kv::ready", T.address_of(positions[token]))
        if early & (token < n) & (lane == 0):
            if with_slots:
                call("kv::prefetch", T.address_of(slots[token]))
            if with_rope:
                call("kv::prefetch", T.address_of(positions[token]))

    return hint


def token_reader(stages: Stages, octets: Octets) -> Any:
    """A macro that starts the loads of a token: octets, from element `at` of the rows on, slot, position. No token: no slot."""
    with_slots, with_rope = stages.slot_dtype is not None, stages.rope is not None
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


def weight_reader(stages: Stages, octets: Octets, staged: bool) -> Any:
    """A macro that gets the weights: the thread block's to shared memory (`staged`), or a lane's own to registers."""
    name, rounds, lanes = TYPE_NAMES.get(str(stages.weight_dtype)), octets.rounds, octets.lanes
    words = INPUT_WORDS.get(str(stages.weight_dtype), 1)

    @T.macro
    def fetch_weights(factors, weight, lane):
        if stages.weight_dtype is not None:
            if staged:
                call(f"kv::stage_{name}", T.address_of(factors[0]), T.address_of(weight[0]))
                T.sync_threads()
            else:
                raw = T.alloc_local((rounds * words,), "uint32")
                if octets.padded:
                    for w in T.unroll(rounds * words):
                        raw[w] = T.uint32(0)
                for h in T.unroll(rounds):
                    if h * lanes + lane < octets.count:
                        call(
                            f"kv::fetch_{name}", T.address_of(raw[h * words]), T.address_of(weight[(h * lanes + lane) * OCTET])
                        )
                call(f"kv::widen_{name}", T.address_of(factors[0]), T.address_of(raw[0]))

    return fetch_weights


def turn_reader(stages: Stages) -> Any:
    """A macro that starts the loads of a lane's cosines and sines at a position; none of a position that does not exist."""

    @T.macro
    def fetch_turns(turns, cos_sin, place, max_position, lane):
        if stages.rope is not None:
            valid = T.cast(place[0], "uint64") < T.cast(max_position, "uint64")
            call("kv::fetch_turns", T.address_of(turns[0]), T.address_of(cos_sin[place[0], 0]), valid, lane)

    return fetch_turns


def back_writer(octets: Octets, quantized: bool) -> Any:
    """A macro that writes one token's row as a load of its record would give it."""

    @T.macro
    def put_back(back, n, token, lane, words, data, sf):
        scales = T.alloc_local((octets.rounds,), "uint32")
        if quantized:
            call("kv::spread", T.address_of(scales[0]), T.address_of(sf[0]))
        for h in T.unroll(octets.rounds):
            octet = h * octets.lanes + lane
            if (token < n) & (octet < octets.count):
                if quantized:
                    code = h * octets.data_words
                    call("kv::decode_row", T.address_of(back[token, octet * OCTET]), T.address_of(data[code]), scales[h])
                else:
                    call("kv::put_row", T.address_of(back[token, octet * OCTET]), T.address_of(words[h * OCTET_WORDS]))

    return put_back
