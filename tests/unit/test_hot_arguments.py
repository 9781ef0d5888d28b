"""What stays in Python where launchers check tensors themselves: classes, scalars, tracing, and errors of those that do not."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvhal
from tests.unit.hot_calls import LAYOUT, new_cache, rows
from tests.unit.hot_launchers import use_preparing


class Sub(Tensor):
    pass


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    kvhal.configure()
    yield
    kvhal.configure()


#: operation -> a call of tensors by name, and their names
CALLS: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "store": (lambda t: kvhal.store_kv_cache(t["kv"], t["cache"], t["slots"]), ("kv", "cache", "slots")),
    "load": (lambda t: kvhal.load_paged_kv_cache(t["cache"], t["segments"], 3, t["kv"]), ("kv", "cache", "segments")),
    "load, new": (lambda t: kvhal.load_paged_kv_cache(t["cache"], t["segments"], 3), ("cache", "segments")),
    "load_slots": (lambda t: kvhal.load_kv_slots(t["cache"], t["slots"], t["kv"]), ("kv", "cache", "slots")),
    "fused": (lambda t: fused_of(t, rope=True), ("kv", "weight", "positions", "turns", "cache", "slots")),
    "fused, no rope": (lambda t: fused_of(t, rope=False), ("kv", "weight", "cache", "slots")),
}


def fused_of(given: dict[str, Any], rope: bool) -> None:
    kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
        given["kv"],
        norm_args=kvhal.NormArgs(given["weight"]),
        rope_args=kvhal.RopeArgs(given["positions"], given["turns"], 64) if rope else None,
        cast_args=kvhal.CastArgs.for_layout(LAYOUT),
        out_args=kvhal.KVCacheOutArgs(given["cache"], given["slots"]),
    )


def values() -> dict[str, Any]:
    return {
        "kv": rows(),
        "cache": new_cache(),
        "slots": torch.arange(3),
        "segments": torch.tensor([[0, 0, 3, 0]], dtype=torch.int32),
        "weight": torch.ones(512),
        "positions": torch.arange(3),
        "turns": torch.ones(8, 64),
    }


@pytest.mark.parametrize(("name", "argument"), [(name, argument) for name, (_, names) in CALLS.items() for argument in names])
def test_the_class_of_every_tensor_is_looked_at(name: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = use_preparing(monkeypatch, checks=True)
    kvhal.configure()
    call, _ = CALLS[name]
    given = values()
    for _ in range(2):
        call(given)
    assert log == ["launch", "prepare", "prepared"]
    call(given | {argument: given[argument].as_subclass(Sub)})
    assert log[3:] == ["launch"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: kvhal.store_kv_cache(t["kv"], t["cache"], t["slots"], layout=kvhal.V41_FP4_FORMAT), "kv_cache: has dtype"),
        (
            lambda t: kvhal.load_paged_kv_cache(t["cache"], t["segments"], 3, t["kv"], layout=kvhal.V41_FP4_FORMAT),
            "kv_cache: has dtype",
        ),
        (lambda t: kvhal.load_paged_kv_cache(t["cache"], t["segments"], 3, t["kv"], sf_format="fp32"), "kv_cache: has dtype"),
        (lambda t: kvhal.load_kv_slots(t["cache"], t["slots"], t["kv"], layout=kvhal.V41_FP4_FORMAT), "kv_cache: has dtype"),
        (lambda t: kvhal.load_paged_kv_cache(t["cache"], t["segments"], 2**64, t["kv"]), "total_k: has"),
        (lambda t: kvhal.load_paged_kv_cache(t["cache"], t["segments"], -1, t["kv"]), "total_k: has"),
    ],
)
def test_scalars_are_compared_before_anything_is_tried(
    call: Callable[[dict[str, Any]], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = use_preparing(monkeypatch, checks=True)
    kvhal.configure()
    given = values()
    for name in ("store", "store", "load", "load", "load_slots", "load_slots"):
        CALLS[name][0](given)
    count = len(log)
    with pytest.raises(ValueError, match=message):
        call(given)
    assert "prepared" not in log[count:] and ("total_k" in message or len(log) == count)


@pytest.mark.parametrize("name", ["store", "load", "load_slots", "fused"])
def test_a_launch_that_fails_is_not_tried_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a launcher that does not check: its error is the caller's, whatever its class."""
    log = use_preparing(monkeypatch)
    kvhal.configure()
    call, given = CALLS[name][0], values()
    for _ in range(2):
        call(given)
    scope = kvhal.config.current()
    (near,) = [calls for calls in scope.near if calls]
    (kept,) = near.values()

    def fails(*arguments: Any) -> None:
        log.append("fails")
        raise RuntimeError("out of resources")

    kept.prepared = fails
    with pytest.raises(RuntimeError, match="out of resources"):
        call(given)
    assert log == ["launch", "prepare", "prepared", "fails"]


def test_checks_without_anything_prepared_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that says it checks, and prepares nothing, gets validated tensors only."""
    use_preparing(monkeypatch, checks=True)
    module = importlib.import_module("kvhal.ops.cache_calls")
    bound = module.bound

    def bind(*given: Any) -> Any:
        launch = bound(*given)
        launch.prepare = None
        return launch

    monkeypatch.setattr(module, "bound", bind)
    kvhal.configure()
    given = values()
    for _ in range(2):
        CALLS["store"][0](given)
    with pytest.raises(ValueError, match="slot_mapping: has dtype"):
        CALLS["store"][0](given | {"slots": given["slots"].to(torch.int16)})


class Stores(torch.nn.Module):
    """Its tensors are no buffers: an export keeps them as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.held = values()

    def forward(self, x: Tensor) -> Tensor:
        CALLS["store"][0](self.held)
        CALLS["load"][0](self.held)
        CALLS["load_slots"][0](self.held)
        CALLS["fused"][0](self.held)
        return x + 1


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_an_export_has_the_operations(warm: bool, checks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not strict, so that Python runs as ever: nothing is launched while the graph is traced, called before or not."""
    log = use_preparing(monkeypatch, checks=checks)
    kvhal.configure()
    module = Stores()
    for _ in range(2 * warm):
        module(rows())
    count = len(log)
    graph = torch.export.export(module, (rows(),), strict=False).graph
    found = [str(node.target) for node in graph.nodes if "kvhal." in str(node.target)]
    assert len(found) == 4 and len(log) == count
