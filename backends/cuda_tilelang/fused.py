"""The fused store: norm, rotary embedding, Hadamard, cast and scatter with a token's record in registers throughout."""

from bisect import bisect_left
from dataclasses import replace
from functools import partial
from typing import Any

import tilelang.language as T
import torch

from kvhal.backends.cuda_tilelang.build import (
    BF16_BYTES,
    ROW_ALIGNMENT,
    SLOT_DTYPES,
    Kernel,
    aligned,
    call,
    evenly,
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
    metadata_hint,
    operands_fit,
    parameter_types,
    token_reader,
    turn_reader,
    value_writer,
    weight_reader,
)
from kvhal.backends.cuda_tilelang.host import ANY_COUNT, Counts, launch_only_if
from kvhal.backends.cuda_tilelang.store import row_waiter
from kvhal.backends.cuda_tilelang.tuned import TUNED_ROUNDS, shape_of
from kvhal.formats import KVCacheFormat
from kvhal.interface import Launcher, NormArgs, Request, RopeArgs
from kvhal.layout import cache_geometry
from kvhal.operands import tensors_only
from kvhal.tuning import MULTIPROCESSORS, Shape

#: of few tokens (see tuned.py): a warp for each scheduler of a multiprocessor, as many lanes a token as there may be; up to so
#: many thread blocks a multiprocessor the next kernel may start early
FEW = (4, 1, 6, 1)
#: warps of a thread block, thread blocks of a multiprocessor: registers and shared memory for more octets a lane than are tuned
LARGE = (4, 2)
MAX_TOKENS = 2**30  #: tokens are counted in 32 bits
FLOAT_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def bind_fused_store(request: Request) -> Launcher:
    """``launch(kv, norm, rope, hadamard, cache, slots, back)``, see `kvhal.interface`."""
    layout, block_size = request.layout, request.block_size or 1
    built: dict[tuple[Stages, int], Kernel] = {}
    kernels = kernels_of(layout, request.platform.arch)
    limits = [most for _, _, (_, most) in kernels]

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
            rope and Rope(rope.first(kv.shape[1]), rope.rope_dim, rope.is_neox_style, SLOT_DTYPES[rope.positions.dtype]),
            hadamard is not None,
            None if slots is None else SLOT_DTYPES[slots.dtype],
            back is not None,
            ROW_ALIGNMENT if wide else BF16_BYTES,
        )
        key = (stages, bisect_left(limits, kv.shape[0]))
        run = built.get(key)
        if run is None:
            factory, shape, counts = kernels[key[1]]
            arguments = (factory, layout, block_size, stages, shape, counts)
            run = built[key] = kernel(*arguments, platform=request.platform, device=kv.device)
        return partial(run, 0.0 if norm is None else float(norm.eps))

    return launcher(prepare, tensors_only, checks=True)


def kernels_of(layout: KVCacheFormat, arch: str) -> list[tuple[Any, Shape, Counts]]:
    """The factories for growing numbers of tokens, their shapes, and the least and most tokens of each."""
    kind = "_index" if layout.is_index else ""
    chunk, many = (shape_of(arch, name + kind, layout.quantized_dtype) for name in ("chunk", "fused"))
    found: list[tuple[Any, Shape, Counts]] = []
    least = 1
    for shape, most in ((FEW, many[-1]), (chunk, chunk[-1]), (many, MAX_TOKENS)):
        if least <= most:
            found.append((one_token_kernel if shape[1] == 1 else fused_kernel, shape, (least, most)))
            least = most + 1
    return found


def fused_kernel(layout: KVCacheFormat, block_size: int, stages: Stages, shape: Shape, counts: Counts = ANY_COUNT) -> Any:
    """Each warp carries some tokens after others through the stages, the next ones' rows on their way. See Stages, tuned.py."""
    geometry, passes, (octets, warps, held) = cache_geometry(layout, block_size), shape[1], placement(layout, stages, shape)
    rounds, lanes, tokens = octets.rounds, octets.lanes, octets.tokens_a_warp * warps  # of a thread block
    prelude = fused_source(geometry, stages, octets, tokens, staged=True)
    types = parameter_types(geometry, stages)
    n, kv_stride, max_position = T.cast(types.n, "int32"), types.kv_stride, types.max_position
    words, turn_count = INPUT_WORDS[stages.input_dtype], stages.rope.turns(octets) if stages.rope else 1
    wave, with_norm = MULTIPROCESSORS * held, stages.weight_dtype is not None
    fetch, fetch_turns, fetch_weights = token_reader(stages, octets), turn_reader(stages), weight_reader(stages, octets, True)
    await_rows, finish = row_waiter(octets), value_writer(geometry, stages, octets)
    fit = operands_fit(geometry, stages, types, counts)

    @T.prim_func
    def fused(
        eps: T.float32,
        kv: types.kv,
        weight: types.weight,
        positions: types.positions,
        cos_sin: types.cos_sin,
        cache: types.cache,
        slots: types.slots,
        back: types.back,
    ):
        launch_only_if(fit(kv, weight, cos_sin, cache, back))
        with T.Kernel(whole_waves(T.ceildiv(n, tokens), wave, passes), threads=WARP * warps, prelude=prelude) as program:
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
            step = T.alloc_var("int32", init=tokens * T.call_extern("int32", "kv::thread_blocks"))
            ahead = T.alloc_var("int64", init=T.cast(step, "int64") * kv_stride)
            await_rows(T.call_extern("int32", "kv::thread_blocks") <= wave, kv, token, n, lane)  # a wave lies evenly
            for w in T.unroll(rounds * words):
                raw[w] = T.uint32(0)
            fetch(kv, at, slots, positions, n, token, lane, raw, slot, place)
            fetch_weights(factors, weight, lane)
            first = T.alloc_var("int32", init=program * tokens)  # of the thread block's
            while first < n:
                where = T.alloc_var("int64", init=slot[0])
                call(f"kv::widen_{TYPE_NAMES[stages.input_dtype]}", T.address_of(values[0]), T.address_of(raw[0]))
                fetch_turns(turns, cos_sin, place, max_position, lane)
                fetch(kv, at + ahead, slots, positions, n, token + step, lane, raw, slot, place)
                finish(values, factors, eps, turns, lane, cache, where, types.blocks * block_size, back, n, token)
                first += step
                token += step
                at += ahead

    return fused


def placement(layout: KVCacheFormat, stages: Stages, shape: Shape) -> tuple[Octets, int, int]:
    """How a record lies on lanes, warps of a thread block, and thread blocks that a multiprocessor must hold."""
    warps, _, held, most = shape[:4]
    if most == 1:
        return few_octets(layout, stages), warps, held
    most = most if stages.input_dtype == "bfloat16" else min(most, TUNED_ROUNDS)  # fp32 rows take twice the registers
    octets = Octets.of(layout, most)
    return octets, *((warps, held) if octets.rounds <= most else LARGE)


def whole_waves(tiles: Any, wave: int, passes: int) -> Any:
    """Thread blocks for so many tiles, `passes` or more each; of part of a wave, some would take a turn and others none."""
    return T.max(T.min(evenly(tiles, wave), wave), tiles // (wave * passes) * wave)


def few_octets(layout: KVCacheFormat, stages: Stages) -> Octets:
    """One octet a lane where `Octets.of` has two; over two warps only if nothing but the sum of squares crosses them."""
    octets = Octets.of(layout)
    if octets.rounds != 2:
        return octets
    together = octets.group > WARP or stages.hadamard or not (stages.rope is None or stages.rope.inside)
    return octets if octets.lanes == WARP and together else replace(octets, lanes=2 * octets.lanes, rounds=1)


def one_token_kernel(layout: KVCacheFormat, block_size: int, stages: Stages, shape: Shape, counts: Counts = ANY_COUNT) -> Any:
    """As `fused_kernel` without a second token for any lane: all that one needs is asked for at once."""
    geometry, (octets, warps, held) = cache_geometry(layout, block_size), placement(layout, stages, shape)
    rounds, lanes, words, rope = octets.rounds, octets.lanes, INPUT_WORDS[stages.input_dtype], stages.rope
    threads = warps * WARP
    tokens, turn_count = threads // lanes, rope.turns(octets) if rope else 1
    types = parameter_types(geometry, stages)
    n, kv_stride, max_position = T.cast(types.n, "int32"), types.kv_stride, types.max_position
    wave, with_norm, staged = MULTIPROCESSORS * held, stages.weight_dtype is not None, shape[3] > 1
    weights_to, weight_count = (T.alloc_shared, lanes * rounds * OCTET) if staged else (T.alloc_local, rounds * OCTET)
    hint, fetch, fetch_turns = metadata_hint(stages), token_reader(stages, octets), turn_reader(stages)
    await_rows, finish = row_waiter(octets), value_writer(geometry, stages, octets)
    fetch_weights = weight_reader(stages, octets, staged)
    fit = operands_fit(geometry, stages, types, counts)
    prelude = fused_source(geometry, stages, octets, tokens, staged=staged)

    @T.prim_func
    def fused_one(
        eps: T.float32,
        kv: types.kv,
        weight: types.weight,
        positions: types.positions,
        cos_sin: types.cos_sin,
        cache: types.cache,
        slots: types.slots,
        back: types.back,
    ):
        launch_only_if(fit(kv, weight, cos_sin, cache, back))
        with T.Kernel(evenly(T.ceildiv(n, tokens), wave), threads=threads, prelude=prelude) as program:
            T.annotate_min_blocks_per_sm(held if staged else 1)
            raw = T.alloc_local((rounds * words,), "uint32")
            values = T.alloc_local((rounds * OCTET,), "float32")
            factors = weights_to((weight_count if with_norm else 4,), "float32")
            slot = T.alloc_local((1,), "int64")
            place = T.alloc_local((1,), "int64")  # position
            turns = T.alloc_local((turn_count,), "float32")  # cosines and sines
            lane = T.get_thread_binding() % lanes
            token = program * tokens + T.get_thread_binding() // lanes
            early = T.ceildiv(n, tokens) <= wave
            call("kv::ready", T.address_of(kv[token, lane * OCTET]))
            if not staged:  # at 8,192 tokens it takes 0.1 us more than it saves
                hint(early, weight, slots, positions, n, token, lane)
            await_rows(early, kv, token, n, lane)
            place[0] = T.int64(-1)
            for w in T.unroll(rounds * words):
                raw[w] = T.uint32(0)
            fetch(kv, T.cast(token, "int64") * kv_stride + lane * OCTET, slots, positions, n, token, lane, raw, slot, place)
            fetch_weights(factors, weight, lane)
            # a variable, so that nvcc has rows worked on before it asks for cosines: V41_FP4_FORMAT takes 0.3 us less at 8,192
            first = T.alloc_var("int32", init=program * tokens)
            if (not staged) | (first < n):
                call(f"kv::widen_{TYPE_NAMES[stages.input_dtype]}", T.address_of(values[0]), T.address_of(raw[0]))
                fetch_turns(turns, cos_sin, place, max_position, lane)
                finish(values, factors, eps, turns, lane, cache, slot[0], types.blocks * block_size, back, n, token)

    return fused_one
