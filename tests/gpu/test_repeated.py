"""Calls one after another on one cache, each unlike the one before in something: every byte is the reference's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvhal
from kvhal.interface import Op
from tests.gpu.test_devices import each_backend, need

pytestmark = pytest.mark.gpu
LAYOUT, BLOCK_SIZE, BLOCKS = kvhal.V41_FORMAT, 64, 320
COUNTS = (1, 2, 3, 64, 2048, 2049, 16384, 16385)  #: tokens, around what kernels for few take
CALLS = 150


def rows_at(generator: random.Random, n: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Random rows, mostly as an engine has them, else apart, off their alignment, or one row n times."""
    apart = generator.choice((0, 0, 0, 0, 64, 1))
    shift = generator.choice((0, 0, 0, 0, 8, 1))
    if generator.random() < 0.05:
        return torch.randn((1, columns), device="cuda").to(dtype).expand(n, columns)
    buffer = torch.randn(n * (columns + apart) + shift, device="cuda").to(dtype)
    return buffer[shift:].as_strided((n, columns), (columns + apart, 1))


def slots_for(generator: random.Random, n: int) -> Tensor:
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, device="cuda")[:n]
    slots[:: generator.choice((2, 5, n + 1))] = generator.choice((-1, 2**31 - 1))
    return slots.to(generator.choice((torch.int64, torch.int64, torch.int32)))


def store(generator: random.Random) -> Callable[[Tensor], list[Tensor]]:
    n = generator.choice(COUNTS)
    kv, slots = rows_at(generator, n, 512, torch.bfloat16), slots_for(generator, n)

    def call(to: Tensor) -> list[Tensor]:
        kvhal.store_kv_cache(kv, to, slots)
        return []

    return call


def fused(generator: random.Random) -> Callable[[Tensor], list[Tensor]]:
    n = generator.choice(COUNTS)
    kv = rows_at(generator, n, 512, generator.choice((torch.bfloat16, torch.bfloat16, torch.float32)))
    slots, turns = slots_for(generator, n), rows_at(generator, 37, 64, torch.float32)
    weight = torch.randn(520, device="cuda")[generator.choice((0, 0, 0, 1)) :][:512]
    norm = kvhal.NormArgs(weight.bfloat16() if generator.random() < 0.2 else weight)
    rope = kvhal.RopeArgs(torch.randint(-1, 38, (n,), device="cuda").to(slots.dtype), turns, 64)
    cast = kvhal.CastArgs.for_layout(LAYOUT, cast_back=generator.random() < 0.2)
    stages = {"norm_args": norm, "rope_args": rope if generator.random() < 0.8 else None, "cast_args": cast}

    def call(to: Tensor) -> list[Tensor]:
        back = kvhal.fused_norm_rope_hadamard_cast_store_kvcache(kv, **stages, out_args=kvhal.KVCacheOutArgs(to, slots))
        return [] if back is None else [back]

    return call


def load(generator: random.Random) -> Callable[[Tensor], list[Tensor]]:
    segments = torch.randint(-1, BLOCKS + 1, (generator.choice((1, 2, 40, 1100)), 4), dtype=torch.int32, device="cuda")
    segments[:, 1], segments[:, 2] = 0, BLOCK_SIZE
    segments[:, 3] = torch.arange(len(segments), device="cuda") * BLOCK_SIZE
    total = generator.choice((1000, 1000, 64))
    out = rows_at(generator, total + generator.choice((0, 0, 5)), 512, torch.bfloat16).contiguous()
    given = generator.random() < 0.8

    def call(to: Tensor) -> list[Tensor]:
        mine = out.clone()
        found = kvhal.load_paged_kv_cache(to, segments, total, mine if given else None)
        return [found.kv[: len(segments) * BLOCK_SIZE]]

    return call


def load_slots(generator: random.Random) -> Callable[[Tensor], list[Tensor]]:
    n = generator.choice(COUNTS)
    slots, given, square = slots_for(generator, n), generator.random() < 0.8, n % 2 == 0 and generator.random() < 0.3
    slots = slots.view(2, -1) if square else slots
    shift = generator.choice((0, 0, 0, 1))
    buffer = torch.zeros(n * 512 + shift, dtype=torch.bfloat16, device="cuda")

    def call(to: Tensor) -> list[Tensor]:
        out = buffer.clone()[shift:].view(*slots.shape, 512)
        return [kvhal.load_kv_slots(to, slots, out if given else None)]

    return call


MAKERS: dict[Op, Callable[..., Any]] = {
    Op.STORE: store,
    Op.FUSED_STORE: fused,
    Op.LOAD: load,
    Op.LOAD_SLOTS: load_slots,
}


@each_backend
@pytest.mark.parametrize("op", MAKERS)
def test_no_call_is_taken_for_the_one_before(op: Op, backend: str) -> None:
    need(backend)
    if backend == "reference_torch":
        pytest.skip("it is what others are compared with")
    torch.manual_seed(0)
    generator = random.Random(0)
    cache = kvhal.alloc_kv_cache(BLOCKS, BLOCK_SIZE, LAYOUT, "cuda").random_(0, 120)
    expected = kvhal.alloc_kv_cache(BLOCKS, BLOCK_SIZE, LAYOUT, "cuda").copy_(cache)
    for index in range(CALLS):
        call = MAKERS[op](generator)
        with kvhal.use_backend("reference_torch"):
            want = call(expected)
        with kvhal.use_backend(backend):
            have = call(cache)
        assert all(torch.equal(one.view(torch.int16), other.view(torch.int16)) for one, other in zip(have, want, strict=True))
        assert torch.equal(cache, expected), index
