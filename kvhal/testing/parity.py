"""Parity: every backend that this machine can run gives the same bytes for the same cases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from kvhal.errors import KVHalError
from kvhal.formats import KVCacheFormat
from kvhal.interface import FORMAT_OPS, Op
from kvhal.testing.case import Case, format_name
from kvhal.testing.conformance import REFERENCE, Target, cases, run_case, why_not


@dataclass(frozen=True)
class Result:
    """One case on one target.

    Attributes:
        case: what ran; its id reproduces it.
        target: where.
        digest: the hash of every byte that the case defines, "" when the call failed.
        problem: what differs or what failed, "" when the bytes are the reference's.
    """

    case: Case
    target: Target
    digest: str
    problem: str = ""


def choose(
    ops: Iterable[Op], layouts: Iterable[KVCacheFormat], count: int | None = None, seed: int = 0, only: str | None = None
) -> list[Case]:
    """The cases of a run.

    Args:
        ops: operations.
        layouts: formats, for the operations that have one.
        count: cases an (operation, format) pair; beyond the suite's own they repeat with further seeds. None: each one once.
        seed: the first seed.
        only: the id of one case.

    Returns:
        Cases grouped by operation and format.
    """
    layouts = list(layouts)
    found: list[Case] = []
    for op in ops:
        for layout in layouts if op in FORMAT_OPS else [None]:
            pool = cases(op, layout, "full")
            wanted = len(pool) if count is None else count
            turns = (replace(pool[n % len(pool)], seed=seed + n // len(pool)) for n in range(wanted))
            found += [case for case in turns if only in (None, case.id)]
    return found


def run(chosen: Iterable[Case], targets: Iterable[Target]) -> Iterator[Result]:
    """Runs each case on each target that serves it. The reference on the CPU is what all are held to."""
    targets = list(targets)
    for case in chosen:
        for target in targets:
            if not why_not(target, case):
                yield _run(case, target)


def _run(case: Case, target: Target) -> Result:
    try:
        outcome = run_case(target.backend, case, target.device, simulate=target.simulate)
    except (KVHalError, ValueError, RuntimeError) as error:
        return Result(case, target, "", f"{type(error).__name__}: {error}")
    return Result(case, target, outcome.digest, "\n".join(map(str, outcome.problems)))


def fingerprint(results: Iterable[Result]) -> str | None:
    """The hash that all targets share for one case, None when they differ or one failed."""
    found = {result.digest if not result.problem else "" for result in results}
    return found.pop() if len(found) == 1 and "" not in found else None


def by_case(results: Iterable[Result]) -> list[tuple[Case, list[Result]]]:
    """Results grouped by case, in order."""
    return [(case, list(group)) for case, group in groupby(results, key=lambda result: result.case)]


def reproduce(result: Result) -> str:
    """The command that runs one result's case again."""
    layout = f" --formats {format_name(result.case.layout)}" if result.case.layout else ""
    backends = result.target.backend if result.target.backend == REFERENCE else f"{REFERENCE},{result.target.backend}"
    seed = f" --seed {result.case.seed}" if result.case.seed else ""
    return f"kvhal parity --ops {result.case.op}{layout} --backends {backends} --case '{result.case.id}'{seed}"
