"""From a request to a bound launcher, cached a configuration: the one place where decisions meet the real machine."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from kvhal.config import Scope, current
from kvhal.dispatcher import Policy, resolve
from kvhal.errors import BackendFailure, refusal
from kvhal.formats import KVCacheFormat
from kvhal.interface import Decision, Launcher, Op, Reason, Request
from kvhal.platform import Platform, detect, on_device
from kvhal.registry import backends

log = logging.getLogger("kvhal")

#: reasons met while binding: (device type, backend, reason); a backend that failed to import stays out until the process ends
_failures: list[tuple[str, str, Reason]] = []


def launcher(
    scope: Scope,
    op: Op,
    layout: KVCacheFormat | None,
    block_size: int | None,
    device: torch.device,
    stages: tuple[str, ...] = (),
) -> Launcher:
    """The launcher that serves an operation under `scope`, bound on first use.

    Raises:
        ForcedBackendError: the forced backend cannot serve; all its reasons.
        UnsupportedError: no backend can serve; every candidate's reasons.
    """
    request = Request(op, layout, platform_of(device), block_size, stages)
    while True:
        decision = resolve(request, scope.policy, backends())
        if decision.chosen is None:
            raise refusal(decision)
        try:
            launch = backends()[decision.chosen].bind(decision.request)
        except (ImportError, OSError, BackendFailure) as error:
            _failures.append((device.type, decision.chosen, _reason(error)))
            log.warning("%s cannot be bound: %s", decision.chosen, error)
            request = Request(op, layout, platform_of(device), block_size, stages)
            continue
        log.info("%s", decision)
        return on_device(launch, device)


def _reason(error: Exception) -> Reason:
    if isinstance(error, BackendFailure):
        return error.reason
    return Reason("import", f"{type(error).__name__}: {error}", "an importable language", "see `kvhal doctor`")


def platform_of(device: torch.device) -> Platform:
    """The device's platform with the failures met so far."""
    platform = detect(device)
    failures = tuple((name, reason) for kind, name, reason in _failures if kind == device.type)
    return replace(platform, failures=failures) if failures else platform


def bound(
    scope: Scope, op: Op, key: Any, layout: KVCacheFormat | None, block_size: int | None, device: torch.device
) -> Launcher:
    """`launcher` behind the scope's table; `key` is whatever identifies (layout, block_size) cheaply."""
    entry = (op, key, device)
    launch: Launcher | None = scope.table.get(entry)
    if launch is None:
        launch = scope.table[entry] = launcher(scope, op, layout, block_size, device)
    return launch


def explain(
    op: Op | str,
    *,
    layout: KVCacheFormat | None = None,
    device: torch.device | str = "cpu",
    block_size: int | None = None,
    platform: Platform | None = None,
    policy: Policy | None = None,
) -> Decision:
    """The Decision that a call would use.

    Args:
        op: the operation, or its name.
        layout: the record's format; None for index operations.
        device: the tensors' device.
        block_size: tokens a block, where known.
        platform: a platform to ask about instead of the device's own (any machine can be described).
        policy: a policy to ask under instead of the one in force.

    Raises:
        ValueError: `op` is not an operation; the message lists them.
    """
    try:
        op = Op(op)
    except ValueError:
        raise ValueError(f"op: has {op!r}, needs one of {', '.join(Op)}") from None
    platform = platform_of(torch.device(device)) if platform is None else platform
    request = Request(op, layout, platform, block_size)
    return resolve(request, current().policy if policy is None else policy, backends())
