"""The fused store: norm, rotary embedding, Hadamard, cast and scatter with a token's record in registers throughout."""

from dataclasses import replace
from typing import Any

import tilelang.language as T
import torch

from kvhal.backends.cuda_tilelang.build import (
    BF16_BYTES,
    ROW_ALIGNMENT,
    SLOT_DTYPES,
    Kernel,
    aligned,
    await_producers,
    call,
    kernel,
    launcher,
)
from kvhal.backends.cuda_tilelang.codec import OCTET, WARP, Octets
from kvhal.backends.cuda_tilelang.fused_stages import (
    INPUT_WORDS,
    TYPE_NAMES,
    Rope,
    Stages,
    fused_source,
    parameter_types,
    token_reader,
    value_writer,
)
from kvhal.backends.cuda_tilelang.tuned import TUNED_ROUNDS, shape_of
from kvhal.formats import KVCacheFormat
from kvhal.interface import Launcher, NormArgs, Request, RopeArgs
from kvhal.layout import cache_geometry

#: As build.FEW_BLOCKS; one a multiprocessor of an H200. Of a larger grid some multiprocessors get two thread blocks and others
#: none, since those of later kernels, which wait, take up the places.
FEW_FUSED_BLOCKS = 132
MAX_TOKENS = 2**30  #: tokens are counted in 32 bits
FLOAT_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def bind_fused_store(request: Request) -> Launcher:
    """``launch(kv, norm, rope, hadamard, cache, slots, back)``, see `kvhal.interface`."""
    layout, block_size = request.layout, request.block_size or 1
    built: dict[tuple[Stages, bool], Kernel] = {}
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
        key = (stages, kv.shape[0] <= shape[3])
        run = built.get(key)
        if run is None:
            arguments = (
                (few_kernel, layout, block_size, stages) if key[1] else (fused_kernel, layout, block_size, stages, shape)
            )
            compiled = kernel(*arguments, platform=request.platform, device=kv.device)
            run = built[key] = _without_holes(compiled, torch.empty(1, device=kv.device))
        return run

    return launcher(prepare)


def _without_holes(run: Kernel, absent: torch.Tensor) -> Kernel:
    """A kernel behind the launcher's arguments; `absent`, a tensor of one float, stands for those that are left out."""

    def launch(
        kv: torch.Tensor, norm: NormArgs | None, rope: RopeArgs | None, _: Any, cache: Any, slots: Any, back: Any
    ) -> None:
        if norm is not None and rope is not None and back is None:  # most calls
            run(kv, norm.weight, float(norm.eps), rope.positions, rope.cos_sin_cache, cache, slots, absent)
            return
        run(
            kv,
            absent if norm is None else norm.weight,
            0.0 if norm is None else float(norm.eps),
            absent if rope is None else rope.positions,
            absent if rope is None else rope.cos_sin_cache,
            absent if cache is None else cache,
            absent if slots is None else slots,
            absent if back is None else back,
        )

    return launch


def _rope(rope: RopeArgs, elements: int) -> Rope:
    begin = elements - rope.rope_dim if rope.offset is None else rope.offset
    return Rope(begin, rope.rope_dim, rope.is_neox_style, SLOT_DTYPES[rope.positions.dtype])


def fused_kernel(layout: KVCacheFormat, block_size: int, stages: Stages, shape: tuple[int, ...]) -> Any:
    """Each warp carries a token after another through the stages, the next one's row on its way. See Stages and tuned.py."""
    geometry, octets, (warps, blocks_at_most, held) = cache_geometry(layout, block_size), Octets.of(layout), shape[:3]
    rounds, lanes, tokens = octets.rounds, octets.lanes, octets.tokens_a_warp * warps  # of a thread block
    prelude = fused_source(geometry, stages, octets, tokens, staged=True)
    types = parameter_types(geometry, stages)
    n, kv_stride, max_position = types.n, types.kv_stride, types.max_position
    words, step, rope = INPUT_WORDS[stages.input_dtype], tokens * blocks_at_most, stages.rope
    turn_count = rope.turns(octets) if rope else 1
    with_norm, with_rope = stages.weight_dtype is not None, rope is not None
    stage_weights = f"kv::stage_{TYPE_NAMES.get(str(stages.weight_dtype))}"
    fetch, finish = token_reader(stages, octets), value_writer(geometry, stages, octets)
    held = held if rounds <= TUNED_ROUNDS else 1  # larger records need the registers of several

    @T.prim_func
    def fused(
        kv: types.kv,
        weight: types.weight,
        eps: T.float32,
        positions: types.positions,
        cos_sin: types.cos_sin,
        cache: types.cache,
        slots: types.slots,
        back: types.back,
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
                finish(values, lane, cache, where, types.blocks * block_size, back, n, token)
                token += step
                at += step * kv_stride

    return fused


def few_octets(layout: KVCacheFormat, stages: Stages) -> Octets:
    """Two warps share a token where every lane then has one octet, and only the sum of squares goes from one to the other."""
    octets, apart = Octets.of(layout), stages.rope is None or stages.rope.inside
    wide = octets.rounds == 2 and octets.group <= WARP and apart and not stages.hadamard
    return replace(octets, lanes=2 * WARP, rounds=1) if wide else octets


def few_kernel(layout: KVCacheFormat, block_size: int, stages: Stages) -> Any:
    """As `fused_kernel` without a second token for any lane: all that one needs is asked for at once, weights to registers."""
    geometry, octets = cache_geometry(layout, block_size), few_octets(layout, stages)
    rounds, lanes, words, rope = octets.rounds, octets.lanes, INPUT_WORDS[stages.input_dtype], stages.rope
    threads = max(WARP, lanes)
    tokens, turn_count = threads // lanes, rope.turns(octets) if rope else 1
    types = parameter_types(geometry, stages)
    n, kv_stride, max_position = types.n, types.kv_stride, types.max_position
    with_norm, with_rope = stages.weight_dtype is not None, rope is not None
    weight_words, weight_type = INPUT_WORDS.get(str(stages.weight_dtype), 1), TYPE_NAMES.get(str(stages.weight_dtype))
    fetch, finish = token_reader(stages, octets), value_writer(geometry, stages, octets)
    prelude = fused_source(geometry, stages, octets, tokens, staged=False)

    @T.prim_func
    def fused_few(
        kv: types.kv,
        weight: types.weight,
        eps: T.float32,
        positions: types.positions,
        cos_sin: types.cos_sin,
        cache: types.cache,
        slots: types.slots,
        back: types.back,
    ):
        with T.Kernel(T.ceildiv(n, tokens), threads=threads, prelude=prelude) as program:
            raw = T.alloc_local((rounds * words,), "uint32")
            raw_weights = T.alloc_local((rounds * weight_words,), "uint32")
            values = T.alloc_local((rounds * OCTET,), "float32")
            factors = T.alloc_local((rounds * OCTET,), "float32")
            slot = T.alloc_local((1,), "int64")
            place = T.alloc_local((1,), "int64")  # position
            turns = T.alloc_local((turn_count,), "float32")  # cosines and sines
            lane = T.get_thread_binding() % lanes
            token = program * tokens + T.get_thread_binding() // lanes
            await_producers(T.ceildiv(n, tokens), FEW_FUSED_BLOCKS)
            place[0] = T.int64(-1)
            for w in T.unroll(rounds * words):
                raw[w] = T.uint32(0)
            fetch(kv, T.cast(token, "int64") * kv_stride + lane * OCTET, slots, positions, n, token, lane, raw, slot, place)
            if with_norm:
                if octets.padded:
                    for w in T.unroll(rounds * weight_words):
                        raw_weights[w] = T.uint32(0)
                for h in T.unroll(rounds):
                    if h * lanes + lane < octets.count:
                        at = (h * lanes + lane) * OCTET
                        call(f"kv::fetch_{weight_type}", T.address_of(raw_weights[h * weight_words]), T.address_of(weight[at]))
            if with_rope:
                valid = T.cast(place[0], "uint64") < T.cast(max_position, "uint64")
                call("kv::fetch_turns", T.address_of(turns[0]), T.address_of(cos_sin[place[0], 0]), valid, lane)
            call(f"kv::widen_{TYPE_NAMES[stages.input_dtype]}", T.address_of(values[0]), T.address_of(raw[0]))
            if with_norm:
                call(f"kv::widen_{weight_type}", T.address_of(factors[0]), T.address_of(raw_weights[0]))
                call("kv::norm", T.address_of(values[0]), T.address_of(factors[0]), eps, lane)
            if with_rope:
                call("kv::rope", T.address_of(values[0]), T.address_of(turns[0]), lane)
            finish(values, lane, cache, slot[0], types.blocks * block_size, back, n, token)

    return fused_few
