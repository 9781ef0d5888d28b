"""`kvhal parity`: the same cases on every backend that this machine can run, whole allocations compared."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer

from kvhal.cli.console import EXIT_NO, CommandError, JsonOption, print_json, print_lines, print_table, progress
from kvhal.cli.explain import parse_op
from kvhal.config import check_name
from kvhal.formats import KVCacheFormat, format_from_text
from kvhal.interface import Op
from kvhal.testing import parity
from kvhal.testing.case import Case, format_name
from kvhal.testing.conformance import Target, targets
from kvhal.testing.formats import CONFORMANCE_FORMATS


def command(
    ops: Annotated[str | None, typer.Option(help="Operations, comma-separated; all when left out.")] = None,
    formats: Annotated[str | None, typer.Option(help="Formats, comma-separated; all of the suite's when left out.")] = None,
    backends: Annotated[str | None, typer.Option(help="Backends, comma-separated; all that can run when left out.")] = None,
    cases: Annotated[int | None, typer.Option(min=1, help="Cases an operation and format; each known one once.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="First seed of the random choices.")] = 0,
    case: Annotated[str | None, typer.Option(help="One case by its id, as a report names it.")] = None,
    json: JsonOption = False,
) -> None:
    """Random and adversarial cases on every backend here; exit code 1 when a byte differs."""
    where = choose_targets(backends)
    chosen = parity.choose(parse_ops(ops), parse_formats(formats), cases, seed, case)
    if not chosen:
        raise CommandError(f"--case: has {case!r}, which is not among the chosen operations and formats")
    results = run_with_progress(chosen, where)
    if json:
        print_json(facts(results))
    else:
        show(results, where)
    if not results or any(result.problem for result in results):
        raise typer.Exit(EXIT_NO)


def parse_ops(text: str | None) -> list[Op]:
    """Operations of a comma-separated list, all for None."""
    return list(Op) if text is None else [parse_op(name.strip(), "--ops") for name in text.split(",")]


def parse_formats(text: str | None) -> list[KVCacheFormat]:
    """Formats of a comma-separated list of names, those of the suite for None; one JSON object is a format too."""
    if text is None:
        return list(CONFORMANCE_FORMATS.values())
    names = [text] if text.lstrip().startswith("{") else [name.strip() for name in text.split(",")]
    try:
        return [CONFORMANCE_FORMATS.get(name) or format_from_text(name) for name in names]
    except ValueError as error:
        raise CommandError(f"--formats: {error}") from None


def choose_targets(text: str | None) -> list[Target]:
    """What can run here out of a comma-separated list of backends; every one named must be able to run something."""
    here = targets()
    if text is None:
        return here
    names = [check_name("--backends", name.strip()) for name in text.split(",")]
    for name in names:
        if not any(target.backend == name for target in here):
            raise CommandError(f"--backends: {name} can run nothing on this machine; `kvhal doctor` says why", EXIT_NO)
    return [target for target in here if target.backend in names]


def run_with_progress(chosen: list[Case], where: list[Target]) -> list[parity.Result]:
    """All results, behind a progress bar."""
    results: list[parity.Result] = []
    with progress() as bars:
        task = bars.add_task("parity", total=len(chosen))
        for one in chosen:
            results += parity.run([one], where)
            bars.advance(task)
    return results


def show(results: list[parity.Result], where: list[Target]) -> None:
    """A table of operations and formats by target, then the first mismatch and how to reproduce it."""
    ran: Counter[tuple[str, str, str]] = Counter()
    bad: Counter[tuple[str, str, str]] = Counter()
    for result in results:
        key = (str(result.case.op), _format(result), result.target.id)
        ran[key] += 1
        bad[key] += bool(result.problem)
    rows = list(dict.fromkeys((op, layout) for op, layout, _ in ran))
    columns = [target.id for target in where]

    def cell(op: str, layout: str, target: str) -> str:
        count, wrong = ran[op, layout, target], bad[op, layout, target]
        return f"{wrong} of {count} DIFFER" if wrong else f"{count} equal" if count else "-"

    cells = [(op, layout, *(cell(op, layout, target) for target in columns)) for op, layout in rows]
    print_table("Bytes compared with reference_torch on the CPU", ["operation", "format", *columns], cells)
    grouped = parity.by_case(results)
    shared = sum(parity.fingerprint(group) is not None for _, group in grouped)
    print_lines(f"{len(results)} runs of {len(grouped)} cases; {shared} cases have one hash on every backend that ran them")
    simulated = [target.id for target in where if target.simulate]
    if simulated:
        print_lines(f"simulated, no statement about hardware: {', '.join(simulated)}")
    first = next((result for result in results if result.problem), None)
    if first:
        print_lines("", f"first mismatch: {first.case.id} on {first.target.id}", first.problem, "", parity.reproduce(first))


def _format(result: parity.Result) -> str:
    return format_name(result.case.layout) if result.case.layout else "-"


def facts(results: list[parity.Result]) -> dict[str, Any]:
    """The run as JSON values: one hash a case, and every result that differs."""
    grouped = parity.by_case(results)
    return {
        "equal": bool(results) and not any(result.problem for result in results),
        "runs": len(results),
        "cases": [
            {
                "case": case.id,
                "op": str(case.op),
                "format": None if case.layout is None else format_name(case.layout),
                "hash": parity.fingerprint(group),
                "targets": [{"id": one.target.id, "simulated": one.target.simulate, "equal": not one.problem} for one in group],
            }
            for case, group in grouped
        ],
        "mismatches": [
            {"case": one.case.id, "target": one.target.id, "problem": one.problem, "command": parity.reproduce(one)}
            for one in results
            if one.problem
        ],
    }
