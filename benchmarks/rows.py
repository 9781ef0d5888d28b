"""What GPU benchmarks share whose result is one table: rows are printed as they come, and written with the run's facts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from kvhal.bench.timing import Clock, environment

DEVICE = torch.device("cuda", 0)


def write(rows: Callable[[Clock], Iterable[dict[str, Any]]]) -> None:
    """Makes the table, and writes it to the file that the command line names."""
    clock, found = Clock(DEVICE), []
    for row in rows(clock):
        found.append(row)
        print(*row.values(), flush=True)
    Path(sys.argv[1]).write_text(json.dumps({**environment(clock), "rows": found}, indent=1) + "\n")
