"""Several devices, threads and tasks, as far as one CPU can show: refusals, bindings by device, contexts that do not leak."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import kvhal
from kvhal.interface import Op
from kvhal.platform import on_device
from kvhal.testing.platforms import machine

CPU, META = torch.device("cpu"), torch.device("meta")
LAYOUT = kvhal.V41_FORMAT


def ints(*shape: int, device: torch.device = CPU, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def rows(n: int = 2, device: torch.device = CPU) -> Tensor:
    return torch.ones((n, LAYOUT.elements), dtype=torch.bfloat16, device=device)


def cache(device: torch.device = CPU) -> Tensor:
    return kvhal.alloc_kv_cache(2, 4, LAYOUT, device)


def fused(kv: Tensor, **given: Any) -> Any:
    cast = kvhal.CastArgs.for_layout(LAYOUT)
    out = given.pop("out_args", kvhal.KVCacheOutArgs(cache(), ints(2), LAYOUT))
    return kvhal.fused_norm_rope_hadamard_cast_store_kvcache(kv, cast_args=cast, out_args=out, **given)


#: which argument is elsewhere -> a call in which that argument alone is on the meta device
MIXED: dict[str, Callable[[], Any]] = {
    "kv": lambda: kvhal.store_kv_cache(rows(device=META), cache(), ints(2)),
    "slot_mapping": lambda: kvhal.store_kv_cache(rows(), cache(), ints(2, device=META)),
    "load_segments": lambda: kvhal.load_paged_kv_cache(cache(), ints(1, 4, device=META), 2),
    "slots": lambda: kvhal.load_kv_slots(cache(), ints(2, device=META)),
    "out": lambda: kvhal.load_kv_slots(cache(), ints(2), rows(device=META)),
    "block_tables": lambda: kvhal.convert_kv_index(ints(1, 1, 2), ints(1, 2, device=META), ints(1, 1), 4),
    "context_lens": lambda: kvhal.convert_kv_index(ints(1, 1, 2), ints(1, 2), ints(1, 1, device=META), 4),
    "right": lambda: kvhal.kv_index_cat(ints(1, 2), ints(1, 2, device=META), 0, 0),
    "out of expand_swa_index": lambda: kvhal.expand_swa_index(ints(1, 4), 2, ints(1, 2, device=META)),
    "out of the window": lambda: kvhal.get_kv_swa_index_decode(ints(1, 2), 2, 4, ints(1, 2, device=META)),
    "block_tables of a plan": lambda: kvhal.expand_load_plan(ints(1, 5), ints(1, 2, device=META), 4, 2),
    "out_args.kv_cache": lambda: fused(rows(), out_args=kvhal.KVCacheOutArgs(cache(META), ints(2), LAYOUT)),
    "norm_args.weight": lambda: fused(rows(), norm_args=kvhal.NormArgs(torch.ones(512, device=META))),
    "rope_args.positions": lambda: fused(rows(), rope_args=kvhal.RopeArgs(ints(2, device=META), torch.ones(4, 64), 64)),
}


@pytest.mark.parametrize("name", MIXED)
def test_an_argument_on_another_device_is_refused_by_name(name: str) -> None:
    argument = name.partition(" ")[0]
    with pytest.raises(ValueError, match=rf"{argument}: has device meta, needs cpu, where .* is; move it with"):
        MIXED[name]()


@pytest.mark.parametrize("where", [{"device": META}, {"platform": machine("xpu", "b580")}])
def test_a_device_that_no_backend_knows_is_refused_with_every_reason(where: Any) -> None:
    decision = kvhal.explain("store_kv_cache", layout=LAYOUT, **where)
    assert {verdict.backend for verdict in decision.trace} >= {"cuda_tilelang", "ascend_tilelang", "portable_triton"}
    with kvhal.use_backend("cuda_tilelang"), pytest.raises(kvhal.ForcedBackendError, match=r"device: has meta, needs a CUDA"):
        kvhal.load_kv_slots(cache(META), ints(2, device=META))


def test_a_launch_for_another_device_makes_it_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda:1 while cuda:0 is current, with the driver's part made up."""
    current, log = [0], []

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index or 0

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *error: object) -> None:
            current[0] = self.before

    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch._C._cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr("torch.cuda.device", Guard)
    launches = [on_device(lambda value: log.append((value, current[0])), torch.device("cuda", index)) for index in (0, 1)]
    for value, launch in enumerate([launches[1], launches[0], launches[1]]):
        launch(value)
    assert log == [(0, 1), (1, 0), (2, 1)]
    assert current == [0]

    def launch(value: int) -> None:
        """Never called: what it prepares is."""

    def prepare(value: int) -> Any:
        log.append((value, current[0]))
        return lambda value: log.append((value, current[0])) or value

    class On(int):
        """A value that is a tensor of the GPU of its number's last digit."""

        def get_device(self) -> int:
            return self % 10

    for checks in (False, True):
        launch.prepare, launch.checks = prepare, checks  # type: ignore[attr-defined]
        there: Any = on_device(launch, torch.device("cuda", 1))
        assert there.checks == checks
        assert there.prepare(On(31))(On(41)) == 41, "what a prepared launcher says is passed on"
        assert log[-2:] == [(31, 1), (41, 1)] and current == [0], "what prepares a launcher, and the prepared one, too"
    count = len(log)
    assert there.prepare(On(31))(On(50)) is False and len(log) == count + 1, "all of its tensors are on another GPU"
    here: Any = on_device(launch, torch.device("cuda", 0))
    assert here.prepare(On(30))(On(40)) == 40 and log[-1] == (40, 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert on_device(log.append, torch.device("cuda", 0)) == log.append, "one device needs no guard"


def table(value: int) -> Tensor:
    return kvhal.expand_swa_index(torch.tensor([[value, 3, 7, 1]], dtype=torch.int32), 5)


def served() -> str | None:
    return kvhal.explain(Op.EXPAND_SWA_INDEX).chosen


def test_threads_keep_their_own_backend() -> None:
    """Two threads in step with each other, each within its own context, on top of a process-wide one."""
    meet, seen = threading.Barrier(2), {}

    def work(name: str, ops: list[str] | None) -> None:
        found = set()
        for turn in range(20):
            meet.wait(timeout=60)
            with kvhal.use_backend(name, ops):
                meet.wait(timeout=60)
                found.add(served())
                if name == "reference_torch":
                    assert table(turn)[0, 0] == turn
            found.add(f"outside: {served()}")
        seen[name] = found

    kvhal.configure(preference=["reference_torch"])
    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(work, "reference_torch", None), pool.submit(work, "cuda_tilelang", ["expand_swa_index"])]:
            job.result()
    assert seen == {
        "reference_torch": {"reference_torch", "outside: reference_torch"},
        "cuda_tilelang": {None, "outside: reference_torch"},  # forced and refused, never replaced
    }


def test_first_calls_of_many_threads_give_the_right_result() -> None:
    """All of them bind at once, while another thread changes the configuration under them."""
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            kvhal.configure(strict=True)
            kvhal.configure()

    changing = threading.Thread(target=change)
    changing.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            tables = list(pool.map(table, range(400)))
    finally:
        stop.set()
        changing.join()
    assert [row.tolist() for row in tables] == [[[value, value + 1, value + 2, 7, -1]] for value in range(400)]


def test_tasks_keep_their_own_backend_and_pass_it_on() -> None:
    async def child() -> str | None:
        await asyncio.sleep(0)
        return served()

    async def forced(name: str) -> tuple[str | None, str | None]:
        with kvhal.use_backend(name):
            started = asyncio.create_task(child())  # takes the context that it was created in
            inside = served()
        return inside, await started

    async def main() -> list[Any]:
        free = asyncio.create_task(child())
        thread = asyncio.to_thread(served)
        return await asyncio.gather(forced("reference_torch"), forced("cuda_tilelang"), free, thread)

    kvhal.configure(preference=["reference_torch"])
    assert asyncio.run(main()) == [("reference_torch", "reference_torch"), (None, None), "reference_torch", "reference_torch"]
