"""From a request to a bound launcher, cached a configuration: the one place where decisions meet the real machine."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvhal.config import Scope, current
from kvhal.dispatcher import Policy, resolve
from kvhal.errors import BackendFailure, refusal
from kvhal.formats import KVCacheFormat
from kvhal.interface import FORMAT_OPS, STAGES, Decision, Launcher, Op, Reason, Request
from kvhal.platform import Platform, detect, on_device, usable_device
from kvhal.registry import backends

log = logging.getLogger("kvhal")


@dataclass(frozen=True)
class Failure:
    """A backend could not be bound; it stays out for the same question until the process ends.

    Attributes:
        device_type, backend, op: what was being bound.
        layout, block_size: what for; None, for any, when something could not be imported.
        reason: what stood in the way.
    """

    device_type: str
    backend: str
    op: Op
    layout: KVCacheFormat | None
    block_size: int | None
    reason: Reason

    def concerns(self, device: torch.device, op: Op | None, layout: KVCacheFormat | None, block_size: int | None) -> bool:
        """It happened to this question, or to a more special one; an unknown operation means all of them."""
        if self.device_type != device.type or op is None:
            return self.device_type == device.type
        same_size = block_size is None or self.block_size in (None, block_size)
        return self.op == op and self.layout in (None, layout) and same_size


_failures: list[Failure] = []


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
    while True:
        request = Request(op, layout, platform_of(device, op, layout, block_size), block_size, stages)
        decision = resolve(request, scope.policy, backends())
        if decision.chosen is None:
            raise refusal(decision)
        try:
            launch = backends()[decision.chosen].bind(decision.request)
        except (ImportError, OSError, BackendFailure) as error:
            _failures.append(_failure(error, decision.chosen, device, request))
            log.warning("%s cannot be bound: %s", decision.chosen, error)
            continue
        log.info("%s", decision)
        return on_device(launch, device)


def _failure(error: Exception, backend: str, device: torch.device, request: Request) -> Failure:
    if isinstance(error, BackendFailure):
        return Failure(device.type, backend, request.op, request.layout, request.block_size, error.reason)
    reason = Reason("import", f"{type(error).__name__}: {error}", "an importable language", "see `kvhal doctor`")
    return Failure(device.type, backend, request.op, None, None, reason)


def platform_of(
    device: torch.device, op: Op | None = None, layout: KVCacheFormat | None = None, block_size: int | None = None
) -> Platform:
    """The device's platform with the failures met so far that concern a question; all of them without an operation."""
    platform = detect(device)
    failures = tuple((f.backend, f.reason) for f in _failures if f.concerns(device, op, layout, block_size))
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
    stages: tuple[str, ...] = (),
    platform: Platform | None = None,
    policy: Policy | None = None,
) -> Decision:
    """The Decision that a call would use.

    Args:
        op: the operation, or its name.
        layout: the record's format; None for index operations.
        device: the tensors' device.
        block_size: tokens a block, where known; index operations do not depend on it.
        stages: stages of a fused store that are on, out of "norm", "rope", "hadamard"; () for the other operations.
        platform: a platform to ask about instead of the device's own (any machine can be described).
        policy: a policy to ask under instead of the one in force.

    Raises:
        ValueError: `op` is not an operation (the message lists them), `layout` or `stages` is missing or means nothing to it,
            `device` is none of this machine's, or `block_size` is out of range.
        TypeError: an argument is of another type.
    """
    from kvhal.ops.checks import check_int, check_type, reject  # kvhal.ops imports this module

    op = Op(op)
    for name, value, kind in (("layout", layout, KVCacheFormat), ("platform", platform, Platform), ("policy", policy, Policy)):
        if value is not None:
            check_type(name, value, kind)
    if not isinstance(stages, tuple | list) or any(stage not in STAGES for stage in stages):
        reject("stages", repr(stages), f"a tuple of names out of {', '.join(STAGES)}")
    if stages and op != Op.FUSED_STORE:
        reject("stages", repr(stages), f"(): only {Op.FUSED_STORE} has stages")
    if block_size is not None:
        block_size = check_int("block_size", block_size, 1)
    if (op in FORMAT_OPS) != (layout is not None):
        need = "the record's format" if op in FORMAT_OPS else "None: index operations handle no records"
        raise ValueError(f"layout: has {layout}, needs {need} for {op}")
    block_size = block_size if op in FORMAT_OPS else None
    platform = platform_of(usable_device(device), op, layout, block_size) if platform is None else platform
    request = Request(op, layout, platform, block_size, tuple(stages))
    return resolve(request, current().policy if policy is None else policy, backends())
