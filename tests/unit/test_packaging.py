"""What a user installs: everything is in the wheel, nothing else is, and an editable checkout has the same names."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_INPUTS = ("kvhal", "backends", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build in: setuptools leaves folders behind, and files of an earlier build would hide a missing one."""
    tree = tmp_path_factory.mktemp("tree")
    for name in BUILD_INPUTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    return tree


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(tree))
    (path,) = folder.glob("*.whl")
    return path


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


def _run(code: str, *, path: Path) -> str:
    """Runs code with `path` in front of what can be imported, outside the checkout."""
    environment = {"PYTHONPATH": str(path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=path, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_has_every_source_file_once(wheel: Path, tree: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    packaged = {name for name in names if ".dist-info/" not in name}
    sources = {str(path.relative_to(tree)) for path in (tree / "kvhal").rglob("*") if path.is_file()}
    sources |= {f"kvhal/{path.relative_to(tree)}" for path in (tree / "backends").rglob("*") if path.is_file()}
    assert packaged == {name for name in sources if not name.endswith(".md") or "/data/" in name}
    assert "kvhal/data/real_rows.npz" in packaged
    assert "kvhal/py.typed" in packaged
    assert any(name.startswith("kvhal/backends/ascend_tilelang/simulator/include/") for name in packaged)


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "kvhal = kvhal.cli:main" in texts["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert texts["LICENSE"] == (ROOT / "LICENSE").read_text()
    assert texts["METADATA"].endswith((ROOT / "README.md").read_text(encoding="utf-8"))
    for extra in ("triton", "cuda", "ascend", "test"):
        assert f"Provides-Extra: {extra}\n" in texts["METADATA"]


def test_the_unpacked_wheel_works(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import kvhal, pathlib; from kvhal.registry import backends; from kvhal.demo_engine import readme;"
        "from kvhal.demo_rows import real_cases; print(pathlib.Path(kvhal.__file__).parent.parent);"
        "print(*backends()); print(len(real_cases())); print(readme()[:7].decode())"
    )
    root, names, cases, title = _run(code, path=tmp_path).splitlines()
    assert Path(root) == tmp_path
    assert names.split() == ["cuda_tilelang", "ascend_tilelang", "portable_triton", "reference_torch"]
    assert int(cases) == 8
    assert title == "# kvhal"  # out of the package's metadata: there is no README.md beside it


def test_an_editable_install_has_the_backends(tree: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    _pip("install", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target), "-e", str(tree))
    code = (
        f"import site; site.addsitedir({str(target)!r});"
        "from kvhal.backends.reference_torch import manifest; print(manifest.__file__)"
    )
    assert Path(_run(code, path=target).strip()).is_relative_to(tree)


def test_imports_are_light() -> None:
    """`import kvhal` brings torch, numpy and itself; the command line brings its own libraries and no language."""
    code = "import sys, kvhal; print(*sys.modules); import kvhal.cli; print(*sys.modules)"
    library, command_line = (set(line.split()) for line in _run(code, path=ROOT).splitlines())
    languages = {"triton", "tilelang", "tvm", "torch_npu"}
    assert library & {*languages, "typer", "rich", "pydantic", "kvhal.cli", "kvhal.engine", "kvhal.testing"} == set()
    assert command_line & {*languages, "kvhal.engine"} == set()
