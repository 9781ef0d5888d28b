"""Fused stores one after another, each unlike the one before in one thing: none is taken for the other."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kvhal
from kvhal import CastArgs, HadamardArgs, KVCacheFormat, KVCacheOutArgs, NormArgs, RopeArgs
from kvhal.ops.repeated import Call
from tests.unit.hot_launchers import use_preparing

PLAIN = kvhal.MXFP8_INDEX_KV_FORMAT
#: the same numbers with scales behind each record's data, so that a cache of eight tokens a block fits both
OTHER = KVCacheFormat("e4m3", 128, 32, 0, True, "ue8m0", "interleaved", token_interleaved=True)
TOKENS = 5

#: what a call is like instead of having every stage and going to a cache of PLAIN records
VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "no norm": {"norm": False},
    "no rope": {"rope": False},
    "no hadamard": {"hadamard": False},
    "nowhere": {"out": False},
    "other layout": {"layout": OTHER},
    "no rows back": {"back": False},
}


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    kvhal.configure(backend="reference_torch")
    yield
    kvhal.configure()


def run(
    cache: torch.Tensor,
    norm: bool = True,
    rope: bool = True,
    hadamard: bool = True,
    out: bool = True,
    layout: KVCacheFormat = PLAIN,
    back: bool = True,
) -> Any:
    torch.manual_seed(0)
    kv, weight, turns = torch.randn(TOKENS, 128).bfloat16(), torch.rand(128), torch.rand(9, 64)
    return kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
        kv,
        norm_args=NormArgs(weight) if norm else None,
        rope_args=RopeArgs(torch.arange(TOKENS), turns, 64) if rope else None,
        hadamard_args=HadamardArgs() if hadamard else None,
        cast_args=CastArgs.for_layout(layout, cast_back=back),
        out_args=KVCacheOutArgs(cache, torch.arange(TOKENS), layout) if out else None,
    )


def outcome(cache: torch.Tensor, variant: dict[str, Any]) -> tuple[list[int], list[float]]:
    cache.zero_()
    rows = run(cache, **variant)
    return cache.flatten().tolist(), [] if rows is None else rows.float().flatten().tolist()


@pytest.mark.parametrize("prepares", ["nothing", "alike", "checks"])
def test_calls_that_differ_in_one_thing_are_told_apart(prepares: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = torch.zeros((2, 8 * 132), dtype=torch.uint8).view(2, 8, 1, 132)
    assert cache.data_ptr() % 32 == 0
    fresh = {}
    for name, variant in VARIANTS.items():
        kvhal.configure(backend="reference_torch")
        fresh[name] = outcome(cache, variant)
    assert len({str(seen) for seen in fresh.values()}) == len(VARIANTS), "each of them is seen"
    log = [] if prepares == "nothing" else use_preparing(monkeypatch, checks=prepares == "checks")
    kvhal.configure(backend="reference_torch")
    for first, second in permutations(VARIANTS, 2):
        for name in (first, first, second, first):
            assert outcome(cache, VARIANTS[name]) == fresh[name], f"{first}, then {second}"
    assert (log.count("prepared") > len(VARIANTS) ** 2) == (prepares != "nothing")


@pytest.mark.parametrize("name", ["norm_args", "rope_args", "hadamard_args", "cast_args", "out_args"])
def test_an_object_that_only_looks_like_an_argument_is_refused(name: str) -> None:
    cache, positions = kvhal.alloc_kv_cache(2, 8, PLAIN, "cpu"), torch.arange(TOKENS)
    given = {
        "norm_args": NormArgs(torch.ones(128)),
        "rope_args": RopeArgs(positions, torch.ones(9, 64), 64),
        "hadamard_args": HadamardArgs(),
        "cast_args": CastArgs.for_layout(PLAIN),
        "out_args": KVCacheOutArgs(cache, positions.clone(), PLAIN),
    }
    kv = torch.ones((TOKENS, 128), dtype=torch.bfloat16)
    for _ in range(2):
        kvhal.fused_norm_rope_hadamard_cast_store_kvcache(kv, **given)
    with pytest.raises(TypeError, match=name):
        kvhal.fused_norm_rope_hadamard_cast_store_kvcache(kv, **given | {name: SimpleNamespace(**vars(given[name]))})


def test_every_call_gives_rows_of_its_own() -> None:
    cache = kvhal.alloc_kv_cache(2, 8, PLAIN, "cpu")
    rows = [run(cache) for _ in range(4)]
    assert len({row.data_ptr() for row in rows}) == 4


@pytest.mark.parametrize("offered", [None, "itself"])
def test_a_launcher_that_prepares_nothing_gets_the_arguments_as_they_are(
    offered: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def launch(kv: Any, norm: Any, rope: Any, hadamard: Any, *into: Any) -> None:
        seen.append((type(norm), type(rope), type(hadamard)))

    launch.prepare = offered and (lambda *given: launch)  # type: ignore[attr-defined]
    monkeypatch.setattr(importlib.import_module("kvhal.ops.fused_calls"), "_bound", lambda *given: launch)
    cache = kvhal.alloc_kv_cache(2, 8, PLAIN, "cpu")
    for _ in range(3):
        run(cache)
    assert seen == 3 * [(NormArgs, RopeArgs, HadamardArgs)]


@pytest.mark.parametrize("eps", [2**64, 1])
def test_a_whole_number_as_eps_is_served_again_and_again(eps: int) -> None:
    def call(number: Any) -> Any:
        cast = CastArgs.for_layout(PLAIN, cast_back=True)
        return kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
            torch.ones((3, 128), dtype=torch.bfloat16), norm_args=NormArgs(torch.ones(128), number), cast_args=cast
        )

    want = call(float(eps))
    assert all(torch.equal(call(eps), want) for _ in range(3))


@pytest.mark.parametrize("wrong", [{"num_per_channels": 32.0}, {"fmt": np.array(["e4m3", "e4m3"])}, {"sf_format": ["ue8m0"]}])
def test_a_cast_that_only_compares_like_one_or_not_at_all_is_refused(wrong: dict[str, Any]) -> None:
    def call(**changes: Any) -> Any:
        cast = CastArgs(
            **({"fmt": "e4m3", "num_per_channels": 32, "round_sf": True, "sf_format": "ue8m0", "cast_back": True} | changes)
        )
        return kvhal.fused_norm_rope_hadamard_cast_store_kvcache(torch.ones((3, 128), dtype=torch.bfloat16), cast_args=cast)

    for _ in range(2):
        call()
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match="cast_args"):
            call(**wrong)


def test_calls_that_are_forgotten_are_gone_without_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serving engines switch the collector of cycles off."""
    monkeypatch.setattr(importlib.import_module("kvhal.ops.repeated"), "LIMIT", 5)
    gc.collect()
    gc.disable()
    try:
        cache = kvhal.alloc_kv_cache(2, 8, PLAIN, "cpu")
        before = sum(type(thing) is Call for thing in gc.get_objects())
        for count in range(1, 30):
            cast = CastArgs.for_layout(PLAIN, cast_back=True)
            kvhal.fused_norm_rope_hadamard_cast_store_kvcache(torch.ones((count, 128), dtype=torch.bfloat16), cast_args=cast)
            kvhal.store_kv_cache(
                torch.ones((count % 9, 128), dtype=torch.bfloat16), cache, torch.arange(count % 9), layout=PLAIN
            )
        assert sum(type(thing) is Call for thing in gc.get_objects()) - before <= 15
    finally:
        gc.enable()
