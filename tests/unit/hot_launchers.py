"""Launchers around the reference's that can be asked to prepare, as those of GPU backends can."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvhal import NormArgs, RopeArgs
from kvhal.interface import Launcher
from kvhal.operands import tensors_only


def facts(value: Any) -> Any:
    """All that a kernel's host function can see of an argument."""
    if type(value) is not torch.Tensor:
        return value
    return value.dtype, value.shape, value.stride(), value.device, value.data_ptr() % 32


def preparing(reference: Launcher, fused: bool, checks: bool, refuse: Callable[[], Any], log: list[str]) -> Launcher:
    """A launcher that does what `reference` does, and logs "launch", "prepare", "prepared" and "refused".

    Args:
        reference: what it is made of.
        fused: it is a fused store's: what it prepares takes tensors only.
        checks: what it prepares compares its arguments with those it was made of, and else returns what `refuse` does.
        refuse: see checks.
        log: where it logs.
    """

    def launch(*given: Any) -> None:
        log.append("launch")
        reference(*given)

    def prepare(*made_of: Any) -> Callable[..., Any]:
        log.append("prepare")
        norm, rope, hadamard = made_of[1:4] if fused else (None, None, None)
        known = [facts(value) for value in (tensors_only(*made_of) if fused else made_of)]
        eps, rotation = norm and norm.eps, rope and (rope.rope_dim, rope.is_neox_style, rope.offset)
        del made_of, norm, rope  # a prepared launcher keeps no tensor

        def prepared(*given: Any) -> Any:
            assert all(type(value) in (torch.Tensor, int, type(None)) for value in given)
            if checks and [facts(value) for value in given] != known:
                log.append("refused")
                return refuse()
            log.append("prepared")
            if fused:
                kv, weight, positions, cosines, *into = given
                normed = None if weight is None else NormArgs(weight, eps)
                turned = None if rotation is None else RopeArgs(positions, cosines, *rotation)
                given = (kv, normed, turned, hadamard, *into)
            reference(*given)
            return None

        return prepared

    launch.prepare, launch.checks = prepare, checks  # type: ignore[attr-defined]
    return launch


def use_preparing(monkeypatch: pytest.MonkeyPatch, checks: bool = False, refuse: Callable[[], Any] = lambda: 1) -> list[str]:
    """Has the operations on records bind such launchers; their log."""
    log: list[str] = []
    for name, function, fused in (("cache_calls", "bound", False), ("fused_calls", "_bound", True)):
        module = importlib.import_module(f"kvhal.ops.{name}")
        bound = getattr(module, function)

        def bind(*given: Any, bound: Callable[..., Launcher] = bound, fused: bool = fused) -> Launcher:
            return preparing(bound(*given), fused, checks, refuse, log)

        monkeypatch.setattr(module, function, bind)
    return log
