"""What every command shares: tables that fit any terminal, JSON, progress, and errors a script can tell apart."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvhal.platform import available_devices, usable_device

EXIT_NO = 1  #: the answer is no: nothing can serve, or bytes differ
EXIT_USAGE = 2  #: the question was wrong

#: columns of output that is no terminal: wide enough that nothing is folded, so that `grep` finds whole lines
PIPE_COLUMNS = 4096

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


class CommandError(Exception):
    """Ends a command with one message on stderr and an exit code."""

    def __init__(self, message: str, code: int = EXIT_USAGE) -> None:
        super().__init__(message)
        self.code = code


def report_error(message: str) -> None:
    """One message on stderr; stdout stays free for data."""
    typer.echo(f"kvhal: error: {message}", err=True)


def print_json(value: Any) -> None:
    """Strict JSON on stdout: a NaN or an infinity in `value` is a bug and raises."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def stdout() -> Console:
    """The console of results, as wide as the terminal, or as the longest line when there is none."""
    return Console(width=shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns, highlight=False, markup=False)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()) -> None:
    """A table, or one `name: value` record a row where the terminal is narrower than the table.

    Args:
        title: printed above.
        columns: headings.
        rows: cells, shown with str().
        right: headings of the columns that are aligned to the right.
    """
    console = stdout()
    cells = [[str(cell) for cell in row] for row in rows]
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(Text(title, style="bold"))
    if console.measure(table, options=console.options.update(width=PIPE_COLUMNS)).maximum <= console.width:
        console.print(table)
    else:
        for row in cells:
            _print_record(console, columns, row)
    console.print()


def _print_record(console: Console, columns: Sequence[str], row: Sequence[str]) -> None:
    console.print(Text(row[0], style="bold"))
    for column, cell in zip(columns[1:], row[1:], strict=True):
        if cell:
            console.print(Text(f"  {column}: {cell}"))


def print_lines(*lines: str) -> None:
    """Text as it is; a terminal wraps it without breaking the commands in it when they are copied."""
    for line in lines:
        typer.echo(line)


@contextmanager
def progress() -> Iterator[Progress]:
    """Progress bars on stderr, gone when done; silent where stderr is no terminal.

    What libraries print meanwhile (TileLang says what it compiles) goes to stderr too: stdout is for results.
    """
    console = Console(stderr=True)
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with redirect_stdout(sys.stderr), bars:
        yield bars


def parse_device(text: str) -> torch.device:
    """A device that this machine has.

    Raises:
        CommandError: not a device, or not one of this machine's.
    """
    here = available_devices()
    try:
        device = usable_device(text)
        known = device.type in {other.type for other in here}
    except ValueError:
        known = False
    if not known:
        raise CommandError(
            f"--device: has {text!r}, needs a torch device; this machine has {', '.join(map(str, here))}; "
            "`kvhal explain --platform KIND --arch ARCH` describes another machine"
        )
    return device
