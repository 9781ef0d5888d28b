"""A backend of another package: installed, found, listed, forced, refused, held to the suite; and packages that are broken."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kvhal
from kvhal import registry
from kvhal.cli import app
from kvhal.interface import Op
from kvhal.testing import run_case, supported_cases
from kvhal.testing.conformance import Target

EXAMPLE = Path(__file__).resolve().parents[1] / "example_backend"
TARGET = Target("numpy_rows", torch.device("cpu"))


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Packages of `folder` are installed, as far as Python knows."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    registry.reload()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        registry.reload()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The example package, installed as its users would."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for path in EXAMPLE.rglob("*"):  # a build leaves folders behind
        if path.suffix in (".py", ".toml"):
            copy = source / path.relative_to(EXAMPLE)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes())
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--target", str(target))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    with on_path(target):
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "numpy_rows"]:
        del sys.modules[name]


def doctor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `kvhal doctor --json` says, without trying to import every language."""
    monkeypatch.setattr("kvhal.cli.doctor.try_imports", tuple)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def served(report: Any) -> dict[str, int]:
    return {row["backend"]: row["served"] for row in report["devices"][0]["backends"]}


@pytest.mark.usefixtures("installed")
def test_it_is_found_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(registry.backends())[-1] == "numpy_rows"
    report = doctor(monkeypatch)
    assert served(report)["numpy_rows"] == 4  # three operations on one format, one index operation
    assert report["refused_backends"] == []


@pytest.mark.usefixtures("installed")
def test_nothing_changes_until_somebody_asks_for_it(tmp_path: Path) -> None:
    question: Any = {"op": "load_kv_slots", "layout": kvhal.BF16_FORMAT}
    assert kvhal.explain(**question).chosen == "reference_torch"
    file = tmp_path / "kvhal.toml"
    file.write_text('[backends]\nforce = "numpy_rows"\n')
    kvhal.configure(path=file)
    decision = kvhal.explain(**question)
    assert (decision.chosen, decision.forced_by) == ("numpy_rows", str(file))


@pytest.mark.usefixtures("installed")
def test_it_is_refused_for_what_it_does_not_do() -> None:
    cache = kvhal.alloc_kv_cache(1, 4, kvhal.V41_FORMAT, "cpu")
    with kvhal.use_backend("numpy_rows"):
        with pytest.raises(kvhal.ForcedBackendError, match=r"numpy_rows: record: has e4m3\[512\]/32:ue8m0, needs bf16 records"):
            kvhal.load_kv_slots(cache, torch.tensor([0]))
        with pytest.raises(kvhal.ForcedBackendError, match="operation: has expand_swa_index not built yet in numpy_rows"):
            kvhal.expand_swa_index(torch.zeros(1, 4, dtype=torch.int32), 4)


@pytest.mark.usefixtures("installed")
def test_it_passes_the_suite_for_what_it_does() -> None:
    cases = supported_cases(TARGET)
    assert {case.op for case in cases} == {Op.STORE, Op.LOAD, Op.LOAD_SLOTS, Op.INDEX_CAT}
    assert len(cases) >= 20
    for case in cases:
        run_case(TARGET.backend, case).check()


BROKEN = {
    "cannot_import": "no_such_library:BACKEND",
    "raises": "raises_on_import:BACKEND",
    "wrong_type": "json:dumps",
    "portable_triton": "json:dumps",
}


def test_broken_packages_break_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = served(doctor(monkeypatch))
    metadata = tmp_path / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    points = "\n".join(f"{name} = {value}" for name, value in BROKEN.items())
    (metadata / "entry_points.txt").write_text(f"[kvhal.backends]\n{points}\n")
    (tmp_path / "raises_on_import.py").write_text("raise RuntimeError('libbroken.so: version 3 is needed')\n")
    with on_path(tmp_path):
        report = doctor(monkeypatch)
        assert served(report) == healthy | dict.fromkeys(["cannot_import", "raises", "wrong_type"], 0)
        (refused,) = report["refused_backends"]
        assert refused["have"] == "portable_triton = json:dumps of broken 1.0"
        assert refused["hint"] == "the built-in backend serves"
        assert torch.equal(kvhal.expand_swa_index(torch.tensor([[3, 2, 0, 0]], dtype=torch.int32), 2), torch.tensor([[3, 4]]))
        for name, text in (
            ("cannot_import", "ModuleNotFoundError: No module named 'no_such_library'"),
            ("raises", "RuntimeError: libbroken.so: version 3 is needed"),
            ("wrong_type", "a function, needs a kvhal.interface.Backend called wrong_type"),
        ):
            with kvhal.use_backend(name), pytest.raises(kvhal.ForcedBackendError, match=text):
                kvhal.expand_swa_index(torch.zeros(1, 4, dtype=torch.int32), 4)
        shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"}).stdout
        assert "entry point: has portable_triton = json:dumps of broken 1.0, needs an identifier" in shown
