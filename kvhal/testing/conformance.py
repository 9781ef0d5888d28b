"""The conformance suite: one call on a backend, the same call on the reference, and every byte of every allocation compared.

Needs no test runner. A backend from another package is tested by::

    for target in targets():
        for case in supported_cases(target):
            outcome = run_case(target.backend, case, target.device, simulate=target.simulate)
            outcome.check()
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from kvhal.config import use_backend
from kvhal.formats import KVCacheFormat
from kvhal.interface import FORMAT_OPS, Op, Reason, Request
from kvhal.platform import available_devices, detect
from kvhal.registry import backends
from kvhal.testing.cache_cases import load_cases, load_slots_cases, store_cases
from kvhal.testing.case import Call, Case, format_name
from kvhal.testing.compare import Difference, differ, report, tensor_bytes
from kvhal.testing.duplicates import accept_any_writer
from kvhal.testing.formats import CONFORMANCE_FORMATS
from kvhal.testing.fused_cases import fused_cases
from kvhal.testing.index_cases import convert_cases, decode_cases, expand_cases, index_cat_cases, plan_cases

REFERENCE = "reference_torch"
Profile = Literal["quick", "full"]
Expected = Callable[[Call], Any]

_FORMAT_CASES: dict[Op, Callable[[KVCacheFormat], list[Case]]] = {
    Op.STORE: store_cases,
    Op.LOAD: load_cases,
    Op.LOAD_SLOTS: load_slots_cases,
    Op.FUSED_STORE: fused_cases,
}
_INDEX_CASES: dict[Op, Callable[[], list[Case]]] = {
    Op.CONVERT_INDEX: convert_cases,
    Op.INDEX_CAT: index_cat_cases,
    Op.EXPAND_SWA_INDEX: expand_cases,
    Op.DECODE_SWA_INDEX: decode_cases,
    Op.EXPAND_LOAD_PLAN: plan_cases,
}


@dataclass(frozen=True)
class Target:
    """A backend on a device of this machine."""

    backend: str
    device: torch.device
    simulate: bool = False

    @property
    def id(self) -> str:
        return f"{self.backend}@{'simulator' if self.simulate else self.device.type}"


@dataclass(frozen=True)
class Outcome:
    """What one case gave.

    Attributes:
        case: its id.
        target: backend and device.
        digest: SHA-256 of every byte that the case defines (allocations and results); equal on every machine.
        problems: differences from the reference, and broken promises; none when the backend conforms.
        simulated: it ran through a functional simulator.
    """

    case: str
    target: str
    digest: str
    problems: tuple[Difference | str, ...]
    simulated: bool = False

    def check(self) -> None:
        """Raises ConformanceError when there are problems."""
        if self.problems:
            raise ConformanceError(report(f"{self.case} on {self.target}", self.problems))


class ConformanceError(Exception):
    """A backend left other bytes than the reference; the message lists them with coordinates."""


def cases(op: Op | None = None, layout: KVCacheFormat | None = None, profile: Profile = "quick") -> list[Case]:
    """The suite's cases, of one operation or one format where given.

    Args:
        op: the operation, None for all.
        layout: the record's format, built-in or not; None for `CONFORMANCE_FORMATS` and the index operations.
        profile: "quick" tries one or two block sizes a format, "full" all six.
    """
    layouts = list(CONFORMANCE_FORMATS.values()) if layout is None else [layout]
    found: list[Case] = []
    for wanted in Op if op is None else [op]:
        if wanted in FORMAT_OPS:
            found += [case for each in layouts for case in _FORMAT_CASES[wanted](each)]
        elif layout is None:
            found += _INDEX_CASES[wanted]()
    return [case for case in found if case.quick or profile == "full"]


def targets() -> list[Target]:
    """Every backend on every kind of device that this machine has, simulators included, where it serves anything."""
    kinds: dict[str, torch.device] = {}
    for device in available_devices():
        kinds.setdefault(device.type, device)
    found = [Target(name, device) for name in backends() for device in kinds.values()]
    found += [Target(name, kinds["cpu"], True) for name, backend in backends().items() if backend.simulator]
    return [target for target in found if any(not why_not(target, case) for case in cases())]


def why_not(target: Target, case: Case) -> tuple[Reason, ...]:
    """The backend's reasons against a case, by its own checks alone: a failure to bind is no reason, it fails the case."""
    platform = detect(target.device).with_simulation(target.simulate)
    return backends()[target.backend].why_not(Request(case.op, case.layout, platform, case.block_size, case.stages))


def supported_cases(target: Target, profile: Profile = "quick") -> list[Case]:
    """The cases that the backend does not refuse."""
    return [case for case in cases(profile=profile) if not why_not(target, case)]


def run_case(
    backend: str,
    case: Case,
    device: torch.device | str = "cpu",
    *,
    simulate: bool = False,
    expected: Expected | None = None,
) -> Outcome:
    """Runs a case on a backend and on what it is held to, each on its own copy of all allocations.

    Args:
        backend: its name; it is forced, so that nothing else can serve.
        case: from `cases`.
        device: where the backend's tensors live; the reference's live on the CPU.
        simulate: let a functional simulator serve.
        expected: performs a call in place and returns its result; the reference backend when None.

    Returns:
        The outcome; `Outcome.check` raises when bytes differ.

    Raises:
        ForcedBackendError: the backend refuses the case.
    """
    before, need, have = case.build("cpu"), case.build("cpu"), case.build(device)
    with use_backend(backend, simulate=simulate):
        result = have()
    perform = expected or run_reference
    wanted = perform(need)
    have_bytes = {name: buffer.bytes() for name, buffer in have.buffers.items()}
    need_bytes = {name: buffer.bytes() for name, buffer in need.buffers.items()}
    problems: list[Difference | str] = []
    if case.repeats:
        whole = torch.device(device).type == "cpu"  # on a GPU nothing orders two writers of one record
        problems += accept_any_writer(case, perform, have_bytes["kv_cache"], need_bytes["kv_cache"], whole=whole)
    problems += _compare_buffers(before, need, have_bytes, need_bytes)
    problems += _compare_results(have, result, wanted)
    where = f"{backend}@{'simulator' if simulate else torch.device(device).type}"
    return Outcome(case.id, where, _digest(have_bytes, result), tuple(problems), simulate)


def run_reference(call: Call) -> Any:
    """The call on the reference backend."""
    with use_backend(REFERENCE):
        return call()


def _compare_buffers(
    before: Call, need: Call, have_bytes: dict[str, np.ndarray], need_bytes: dict[str, np.ndarray]
) -> list[Difference | str]:
    found: list[Difference | None] = []
    for name, buffer in need.buffers.items():
        untouched = before.buffers[name].bytes()
        if buffer.written:
            outside = np.ones(untouched.size, bool)
            outside[buffer.begin : buffer.end] = False
            where = _at(buffer.where, outside)
            for who, values in (("", have_bytes), (" (of the reference)", need_bytes)):
                found.append(differ(f"guards of {name}{who}", values[name][outside], untouched[outside], where))
            found.append(differ(name, have_bytes[name], need_bytes[name], buffer.where))
        else:
            found.append(differ(f"{name}, an input", have_bytes[name], untouched, buffer.where))
            found.append(differ(f"{name}, an input (of the reference)", need_bytes[name], untouched, buffer.where))
    return [difference for difference in found if difference is not None]


def _at(where: Callable[[int], str], chosen: np.ndarray) -> Callable[[int], str]:
    places = np.flatnonzero(chosen)
    return lambda at: where(int(places[at]))


def _tensors(result: Any) -> list[torch.Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else [part for part in result if part is not None]


def _compare_results(have: Call, result: Any, wanted: Any) -> list[Difference | str]:
    found: list[Difference | str] = []
    results, needs = _tensors(result), _tensors(wanted)
    if len(results) != len(needs):
        return [f"the call returned {len(results)} tensors, needs {len(needs)}"]
    device = have.buffers[next(iter(have.buffers))].storage.device
    for number, (mine, yours) in enumerate(zip(results, needs, strict=True)):
        name = f"result {number}"
        facts = [(mine.dtype, tuple(mine.shape), mine.device), (yours.dtype, tuple(yours.shape), device)]
        if facts[0] != facts[1]:
            found.append(f"{name}: has {facts[0]}, needs {facts[1]}")
            continue
        where = partial(_row_of, yours)
        difference = differ(name, tensor_bytes(mine), tensor_bytes(yours), where)
        found += [difference] if difference else []
    out = have.arguments.get("out")
    if out is not None and [t.data_ptr() for t in _tensors(result)] != [t.data_ptr() for t in _tensors(out)]:
        found.append("the call returned other tensors than `out`")
    return found


def _row_of(tensor: torch.Tensor, at: int) -> str:
    row = tensor.element_size() * (tensor.shape[-1] if tensor.dim() > 1 else 1)
    return f"row {at // row} byte {at % row}"


def _digest(buffers: dict[str, np.ndarray], result: Any) -> str:
    state = hashlib.sha256()
    for name in sorted(buffers):
        state.update(name.encode() + b"\0" + buffers[name].tobytes())
    for tensor in _tensors(result):
        state.update(tensor_bytes(tensor).tobytes())
    return state.hexdigest()


def cell(case: Case, target: Target) -> tuple[str, str, str, str]:
    """(backend, operation, format, where it ran): the support matrix's cell that a case belongs to."""
    return target.backend, case.op.value, format_name(case.layout) if case.layout else "-", target.id.partition("@")[2]
