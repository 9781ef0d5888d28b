"""Runs tests on a GPU machine and keeps what passed, so that results of machines that CI has not can be committed.

python benchmarks/gpu_tests.py OUT.json [arguments of pytest]
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

from kvhal.bench.timing import Clock, environment


class Outcomes:
    """Counts the outcomes of each test function; with pytest-xdist the workers' reports arrive here too."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.skipped or report.failed:
            self.counts[report.nodeid.partition("[")[0]][report.outcome] += 1


def main() -> int:
    out, arguments, outcomes = Path(sys.argv[1]), sys.argv[2:], Outcomes()
    code = pytest.main(arguments, plugins=[outcomes])
    facts = environment(Clock(torch.device("cuda", 0)))
    facts |= {"gpus": torch.cuda.device_count(), "arguments": arguments, "exit_code": int(code)}
    total = sum(outcomes.counts.values(), Counter())
    tests = {name: dict(counts) for name, counts in sorted(outcomes.counts.items())}
    out.write_text(json.dumps({**facts, "total": total, "tests": tests}, indent=1) + "\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
