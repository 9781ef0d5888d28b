"""The command line: one module a command, each with a `command` function and one line in `COMMANDS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from kvhal.cli import bench, demo, doctor, explain, formats, generate, parity, perplexity
from kvhal.cli.console import EXIT_NO, EXIT_USAGE, CommandError, report_error
from kvhal.errors import KVHalError, UnsupportedError

COMMANDS: dict[str, Callable[..., None]] = {
    "doctor": doctor.command,
    "formats": formats.command,
    "explain": explain.command,
    "demo": demo.command,
    "parity": parity.command,
    "bench": bench.command,
    "generate": generate.command,
    "perplexity": perplexity.command,
}


class _Commands(TyperGroup):
    """Turns kvhal's own errors into one message on stderr and an exit code; a bug still shows its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CommandError as error:
            report_error(str(error))
            raise typer.Exit(error.code) from error
        except KVHalError as error:
            report_error(str(error))
            raise typer.Exit(EXIT_NO if isinstance(error, UnsupportedError) else EXIT_USAGE) from error


app = typer.Typer(
    name="kvhal",
    cls=_Commands,
    help="Quantised paged KV caches: what this machine can serve, and proof that it does.",
    epilog="Exit codes: 0 fine; 1 the answer is no (nothing can serve, bytes differ); 2 wrong usage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help and usage errors: they are read in pipes as well
)
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)


def main() -> None:
    """The `kvhal` program."""
    app()
