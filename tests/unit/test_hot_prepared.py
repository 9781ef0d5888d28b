"""Launchers that offer `prepare`: asked once, and what they return sees aligned rows only."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvhal
from tests.unit.hot_calls import new_cache


def test_prepared_launchers_serve_aligned_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that offers `prepare` is asked once, and what it returns never sees rows at other addresses."""
    log: list[str] = []

    def launch(*arguments: Any) -> None:
        log.append("launch")

    def prepare(*arguments: Any) -> Callable[..., None]:
        log.append("prepare")
        return lambda *given: log.append("prepared")

    launch.prepare = prepare  # type: ignore[attr-defined]
    monkeypatch.setattr(importlib.import_module("kvhal.ops.cache_calls"), "bound", lambda *given: launch)
    kvhal.configure()
    cache, slots, buffer = new_cache(), torch.arange(3), torch.ones(4 * 512, dtype=torch.bfloat16)
    aligned, shifted = (buffer[first:].as_strided((3, 512), (512, 1)) for first in (0, 1))
    for kv in (shifted, shifted, aligned, aligned, shifted, aligned):
        kvhal.store_kv_cache(kv, cache, slots)
    assert log == ["launch", "launch", "launch", "prepare", "prepared", "launch", "prepared"]
    kvhal.configure()


@pytest.mark.parametrize("part", ["rows", "weight", "cosines"])
def test_prepared_fused_stores_serve_aligned_operands_only(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The same of a fused store: rows, weights and the table of cosines."""
    log: list[str] = []

    def launch(*arguments: Any) -> None:
        log.append("launch")

    def prepared(kv: Any, *others: Any) -> None:
        assert kv.shape == (3, 512) and others[1:2] + others[3:] == (positions, cache, slots, None)
        log.append("prepared")

    launch.prepare = lambda *given: log.append("prepare") or prepared  # type: ignore[attr-defined]
    monkeypatch.setattr(importlib.import_module("kvhal.ops.fused_calls"), "_bound", lambda *given: launch)
    kvhal.configure()
    cache, slots, positions = new_cache(), torch.arange(3), torch.arange(3)

    def at(shift: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(2048, dtype=dtype)[shift : shift + math.prod(shape)].view(shape)

    def call(shift: int) -> None:
        shifts = {name: shift if name == part else 0 for name in ("rows", "weight", "cosines")}
        kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
            at(shifts["rows"], 3, 512, dtype=torch.bfloat16),
            norm_args=kvhal.NormArgs(at(shifts["weight"], 512, dtype=torch.float32)),
            rope_args=kvhal.RopeArgs(positions, at(shifts["cosines"], 4, 64, dtype=torch.float32), 64),
            cast_args=kvhal.CastArgs.for_layout(kvhal.V41_FORMAT),
            out_args=kvhal.KVCacheOutArgs(cache, slots, kvhal.V41_FORMAT),
        )

    for shift in (1, 1, 0, 0, 1, 0):
        call(shift)
    assert log == ["launch", "launch", "launch", "prepare", "prepared", "launch", "prepared"]
    kvhal.configure()
