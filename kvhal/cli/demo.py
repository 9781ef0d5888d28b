"""`kvhal demo`: the main job on real data, checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.progress import Progress, TaskID

from kvhal.cli.console import (
    EXIT_NO,
    CommandError,
    JsonOption,
    parse_device,
    print_json,
    print_lines,
    print_table,
    progress,
)
from kvhal.config import check_name
from kvhal.demo_rows import REFERENCE, RowsResult, Test, real_cases, run_case

if TYPE_CHECKING:
    from kvhal.demo_engine import EngineResult
    from kvhal.testing.parity import Result

# Twice as many bytes of text are prefilled, a sixteenth is decoded, four at least.
MANY_TOKENS = 512  #: all rows of the data
FEW_TOKENS = 16  #: on the CPU, every backend but the reference is interpreted or simulated: seconds a call


def command(
    backend: Annotated[str | None, typer.Option(help="Test this backend.  [default: whichever a call gets]")] = None,
    device: Annotated[str, typer.Option(help="Where it works.")] = "cpu",
    simulate: Annotated[bool, typer.Option("--simulate", help="It may use its functional simulator.")] = False,
    block_size: Annotated[int, typer.Option(min=1, max=4096, help="Tokens a block.")] = 64,
    tokens: Annotated[
        int | None, typer.Option(min=1, max=512, help="Rows a sequence.  [default: 512; 16 in simulators]")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="A text for the engine.  [default: kvhal's README]")] = None,
    json: JsonOption = False,
) -> None:
    """A real model's rows through every format, an engine on a real text, parity; exit code 1 when anything differs."""
    start = time.perf_counter()
    torch.set_num_threads(1)  # the tensors are small: on a busy machine threads that wait for each other take minutes
    where = parse_device(device)
    if backend is not None:
        check_name("--backend", backend)
    elif simulate:
        raise CommandError("--simulate: needs --backend, the backend whose simulator to use")
    if tokens is None:
        tokens = FEW_TOKENS if where.type == "cpu" and backend not in (None, REFERENCE) else MANY_TOKENS
    prompt = _read(text)[: 2 * tokens]
    test = Test(where, block_size, backend, simulate)
    with progress() as bars:
        rows = _run_rows(test, tokens, bars)
        engine = _run_engine(test, prompt, max(4, tokens // 16), bars)
        parity = _run_parity(backend, bars)
    report = _Report(test, rows, engine, parity, time.perf_counter() - start)
    if json:
        print_json(_facts(report))
    else:
        _show(report)
    if not report.passed:
        raise typer.Exit(EXIT_NO)


@dataclass(frozen=True)
class _Report:
    test: Test
    rows: list[RowsResult]
    engine: EngineResult
    parity: list[Result]
    seconds: float

    @property
    def passed(self) -> bool:
        """Something ran, and all that ran is right; a format that the backend refuses is no failure."""
        ran = [row for row in self.rows if row.refused is None]
        parity = not any(result.problem for result in self.parity)
        return bool(ran) and all(row.bytes_equal for row in ran) and bool(self.engine.logits_equal) and parity


def _read(path: Path | None) -> bytes:
    from kvhal.demo_engine import readme

    try:
        return readme() if path is None else path.read_bytes()
    except OSError as error:
        raise CommandError(f"--text: {error.strerror or error}" + (f": {path}" if path else "")) from error


def _run_rows(test: Test, tokens: int, bars: Progress) -> list[RowsResult]:
    cases = real_cases(tokens)
    task = bars.add_task("rows", total=len(cases))
    results = []
    for case in cases:
        bars.update(task, description=f"rows: {case.name}")
        results.append(run_case(case, test))
        bars.advance(task)
    return results


def _run_engine(test: Test, prompt: bytes, new_tokens: int, bars: Progress) -> EngineResult:
    from kvhal.demo_engine import run_engine

    return run_engine(test, prompt, new_tokens, _reporter(bars))


def _run_parity(backend: str | None, bars: Progress) -> list[Result]:
    from kvhal.demo_parity import parity_targets, run_parity

    bars.add_task("parity", total=None)
    return list(run_parity(parity_targets(backend)))


def _reporter(bars: Progress) -> Callable[[str, int, int], None]:
    """Turns (what, done, of how many) into one bar for each thing that is done."""
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(f"engine: {what}", total=total)
        bars.update(tasks[what], completed=done)

    return report


def _facts(report: _Report) -> dict[str, Any]:
    return {
        "passed": report.passed,
        "device": str(report.test.device),
        "block_size": report.test.block_size,
        "seconds": round(report.seconds, 3),
        "rows": [asdict(row) for row in report.rows],
        "engine": {**asdict(report.engine), "output": report.engine.output.hex()},
        "parity": [
            {"case": result.case.id, "target": result.target.id, "hash": result.digest, "problem": result.problem}
            for result in report.parity
        ],
    }


def _show(report: _Report) -> None:
    from kvhal.demo_parity import parity_lines

    test = report.test
    print_table(
        f"Rows of a real model, stored in shuffled blocks of {test.block_size} on {test.device}, loaded by plan",
        ("format", "rows", "bytes/token", "of bf16", "SNR", "backend", "bytes as the reference's"),
        [_cells(row) for row in report.rows],
        right=("bytes/token", "of bf16", "SNR"),
    )
    refused = [row.refused.splitlines() for row in report.rows if row.refused]
    print_lines(*dict.fromkeys(reason for _, *reasons in refused for reason in reasons))
    if any(row.backend == REFERENCE for row in report.rows):
        print_lines(f"{REFERENCE} is the reference: here it was compared with itself.", "")
    _show_engine(report.engine)
    print_lines("", *parity_lines(report.parity))
    print_lines("", f"{'passed' if report.passed else 'FAILED'} in {report.seconds:.1f} s")


def _cells(row: RowsResult) -> tuple[str, ...]:
    facts = (row.name, f"{row.tokens} x {row.source}", str(row.bytes_per_token), f"{1 / row.compression:.1%}")
    if row.refused is not None:
        return (*facts, "", "refused", "")
    snr = "exact" if row.snr_db is None else f"{row.snr_db:.1f} dB"
    backend = f"{row.backend} (simulated)" if row.simulated else str(row.backend)
    return (*facts, snr, backend, "yes, all" if row.bytes_equal else "NO")


def _show_engine(engine: EngineResult) -> None:
    formats = ", ".join(f"{name} in {value}" for name, value in engine.formats.items())
    print_lines(
        f"Engine: {engine.prompt_tokens} tokens of text prefilled in chunks of {engine.chunk_size}, "
        f"then {engine.new_tokens} decoded",
        f"  records: {formats}",
    )
    if engine.refused is not None:
        print_lines(*(f"  {line}" for line in engine.refused.splitlines()))
        return
    equal = "equal, bit for bit" if engine.logits_equal else "DIFFERENT"
    print_lines(
        f"  logits of the {engine.new_tokens} tokens, with caches and recomputed without any: {equal}",
        f"  next byte as with unquantised records: {engine.same_choice_unquantised} of {engine.new_tokens} "
        f"(logits up to {engine.max_logit:.2f} differ by at most {engine.max_logit_error:.2f})",
        f"  decoded (weights are from a seed, the bytes mean nothing): {engine.output.hex()}",
    )
