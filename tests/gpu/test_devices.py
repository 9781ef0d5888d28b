"""Several GPUs, streams and threads: launches land on the tensors' device and on its current stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import kvhal
from kvhal.interface import FORMAT_OPS, Op
from kvhal.registry import backends
from kvhal.testing import Case, cases, run_case
from kvhal.testing.conformance import Target, why_not

LAYOUT = kvhal.V41_FORMAT
TOKENS, BLOCK_SIZE = 4096, 64
SLEEP_CYCLES = 200_000_000  #: a tenth of a second: whatever runs on another stream meanwhile reads what was there before

pytestmark = pytest.mark.gpu
each_backend = pytest.mark.parametrize("backend", list(backends()))
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def need(backend: str) -> None:
    with kvhal.use_backend(backend):
        decision = kvhal.explain(Op.STORE, layout=LAYOUT, device="cuda:0")
    if decision.chosen is None:
        pytest.skip(str(decision))


def some_cases() -> list[Case]:
    """One of each operation."""
    return [cases(op, LAYOUT if op in FORMAT_OPS else None)[0] for op in Op]


@two_gpus
@each_backend
@pytest.mark.parametrize("case", some_cases(), ids=lambda case: case.op)
def test_every_byte_on_the_second_gpu_while_the_first_is_current(case: Case, backend: str) -> None:
    need(backend)
    for device in (torch.device("cuda", 1), torch.device("cuda", 0), torch.device("cuda", 1)):
        if why_not(Target(backend, device), case):
            pytest.skip(f"{backend} refuses this case")
        with torch.cuda.device(0):
            run_case(backend, case, device).check()
            assert torch.cuda.current_device() == 0


@two_gpus
def test_mixed_devices_are_refused() -> None:
    cache_0 = kvhal.alloc_kv_cache(2, 4, LAYOUT, "cuda:0").zero_()
    rows = {index: torch.ones(2, 512, dtype=torch.bfloat16, device=f"cuda:{index}") for index in (0, 1)}
    slots = {index: torch.zeros(2, dtype=torch.int32, device=f"cuda:{index}") for index in (0, 1)}
    with pytest.raises(ValueError, match="kv: has device cuda:1, needs cuda:0, where kv_cache is"):
        kvhal.store_kv_cache(rows[1], cache_0, slots[0])
    with pytest.raises(ValueError, match="slot_mapping: has device cuda:1, needs cuda:0"):
        kvhal.store_kv_cache(rows[0], cache_0, slots[1])
    with pytest.raises(ValueError, match="slots: has device cpu, needs cuda:0"):
        kvhal.load_kv_slots(cache_0, slots[0].cpu())
    assert not cache_0.any()


@cache
def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, slots and the cache that a store of them leaves, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn((TOKENS, 512), generator=generator).to(torch.bfloat16)
    slots = torch.randperm(TOKENS, generator=generator)
    stored = kvhal.alloc_kv_cache(TOKENS // BLOCK_SIZE, BLOCK_SIZE, LAYOUT, "cpu").zero_()
    with kvhal.use_backend("reference_torch"):
        kvhal.store_kv_cache(rows, stored, slots)
    return rows, slots, stored


def round_trip(seed: int, device: torch.device) -> Callable[[], None]:
    """Stores and loads on the current stream; what it returns waits and compares."""
    rows, slots, stored = inputs(seed)
    own, at = rows.to(device), slots.to(device)
    own_cache = kvhal.alloc_kv_cache(stored.shape[0], BLOCK_SIZE, LAYOUT, device).zero_()
    kvhal.store_kv_cache(own, own_cache, at)
    loaded = kvhal.load_kv_slots(own_cache, at)
    stream = torch.cuda.current_stream(device)

    def compare() -> None:
        stream.synchronize()
        assert torch.equal(own_cache.cpu(), stored)
        with kvhal.use_backend("reference_torch"):
            assert torch.equal(loaded.cpu(), kvhal.load_kv_slots(stored, slots))

    return compare


@each_backend
def test_a_side_stream_orders_the_launch(backend: str) -> None:
    """Rows are filled late on the side stream; a store on any other stream would quantise the zeros."""
    need(backend)
    rows, slots, stored = inputs(0)
    device = torch.device("cuda", 0)
    with kvhal.use_backend(backend):
        round_trip(0, device)()  # builds the kernels
        late, at, source = torch.zeros_like(rows, device=device), slots.to(device), rows.to(device)
        own_cache = kvhal.alloc_kv_cache(stored.shape[0], BLOCK_SIZE, LAYOUT, device).zero_()
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SLEEP_CYCLES)
            late.copy_(source)
            kvhal.store_kv_cache(late, own_cache, at)
            loaded = kvhal.load_kv_slots(own_cache, at)
        assert not side.query(), "the launches did not wait for the stream"
        side.synchronize()
    assert torch.equal(own_cache.cpu(), stored)
    with kvhal.use_backend("reference_torch"):
        assert torch.equal(loaded.cpu(), kvhal.load_kv_slots(stored, slots))


def in_two_threads(jobs: list[Callable[[int], Any]], turns: int = 30) -> None:
    """Runs both jobs at once, in step with each other."""
    meet = threading.Barrier(2)

    def work(job: Callable[[int], Any]) -> None:
        for turn in range(turns):
            meet.wait(timeout=60)
            job(turn)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work, job) for job in jobs]:
            future.result()


def on_stream(backend: str, device: torch.device) -> Callable[[int], None]:
    stream = torch.cuda.Stream(device)

    def job(turn: int) -> None:
        with kvhal.use_backend(backend), torch.cuda.stream(stream):
            round_trip(turn % 4, device)()

    return job


@pytest.mark.parametrize("other", ["portable_triton", "cuda_tilelang"])
def test_two_threads_with_two_backends_and_streams(other: str) -> None:
    need(other)
    device = torch.device("cuda", 0)
    in_two_threads([on_stream("reference_torch", device), on_stream(other, device)])


@two_gpus
@each_backend
def test_two_threads_with_a_gpu_each(backend: str) -> None:
    """The same backend on both at once: bindings, guards and first compilations do not mix."""
    need(backend)
    in_two_threads([on_stream(backend, torch.device("cuda", index)) for index in (0, 1)])
