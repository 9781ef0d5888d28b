"""Options, the GPU rule, and two promises of a session: the conformance suite really ran, and missing GPU tests are said.

--backend NAME   conformance tests of this backend only (may be repeated)
--cases full     all six block sizes instead of one or two a format
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from kvhal.platform import available_devices

ROOT = Path(__file__).resolve().parent.parent
SUITE = Path(__file__).resolve().parent / "conformance" / "test_conformance.py"
torch.set_num_threads(1)  # the cases are small, and workers share the cores
HAS_GPU = any(device.type == "cuda" for device in available_devices())
RAN: Counter[str] = Counter()  #: conformance cells that ran
GPU: Counter[str] = Counter()  #: outcomes of tests marked gpu

if not HAS_GPU:  # Triton decides on its import; with a GPU, the interpreter is a session of its own
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", action="append", default=[], help="conformance tests of this backend only; may be repeated")
    parser.addoption("--cases", choices=("quick", "full"), default="quick", help="how many block sizes a format")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            item.user_properties.append(("gpu", "1"))
            if not HAS_GPU:
                item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """No test sees the developer's configuration, or leaves its own behind; conformance cases share what they bound."""
    from kvhal import configure

    for name in ("KVHAL_CONFIG", "KVHAL_BACKEND", "KVHAL_STRICT"):
        monkeypatch.delenv(name, raising=False)
    yield
    if request.node.path != SUITE:
        configure()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    properties = dict(report.user_properties)
    if "gpu" in properties and (report.when == "call" or report.skipped):
        GPU[report.outcome] += 1
    if report.when == "call" and not report.skipped and "cell" in properties:
        RAN[str(properties["cell"])] += 1


def _asked_for_suite(config: pytest.Config) -> bool:
    """The session was asked for tests/conformance, if only for one backend."""
    options = config.option
    narrowed = (options.keyword, options.collectonly, options.deselect, options.ignore, options.ignore_glob)
    marks = ("",) if HAS_GPU else ("", "not gpu")
    if any(narrowed) or options.markexpr not in marks or getattr(options, "lf", False):
        return False
    paths = [(Path(config.invocation_params.dir) / argument.partition("::")[0]).resolve() for argument in config.args]
    return any("::" not in argument and SUITE.is_relative_to(path) for argument, path in zip(config.args, paths, strict=True))


def _missing_cells() -> list[str]:
    from kvhal.testing.matrix import promised_cells

    text = (ROOT / "docs" / "support_matrix.md").read_text(encoding="utf-8")
    return sorted(cell for cell in promised_cells(text) if not RAN[cell])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if hasattr(config, "workerinput") or exitstatus != pytest.ExitCode.OK or not _asked_for_suite(config):
        return
    missing = [] if config.option.backend else _missing_cells()
    config.stash[MISSING] = missing
    if missing or not RAN:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


MISSING = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    write = terminalreporter.write_line
    if RAN:
        where = Counter(f"{cell.split('/')[0]} on {cell.split('/')[3]}" for cell in RAN.elements())
        write("conformance cases: " + ", ".join(f"{name} {count}" for name, count in sorted(where.items())))
    for cell in config.stash.get(MISSING, []):
        write(f"ERROR: the support matrix promises {cell}, but no conformance test ran for it", red=True)
    if MISSING in config.stash and not RAN:
        write("ERROR: no conformance test ran", red=True)
    if not HAS_GPU:
        skipped = f" ({GPU['skipped']} skipped)" if GPU["skipped"] else ""
        write(f"NO GPU TESTS RAN: this machine has no CUDA device{skipped}", yellow=True)
    elif GPU:
        write("GPU tests: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(GPU.items())))
