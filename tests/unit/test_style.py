"""The rules of style that a test can hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = [
    path
    for folder in ("kvhal", "backends")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "__pycache__" not in path.parts
]
SOURCE = [path for path in SOURCE if not path.is_relative_to(ROOT / "kvhal" / "backends")]  # the link: the same files once more
EVERYTHING = [*SOURCE, *(p for f in ("tests", "benchmarks", "scripts") for p in sorted((ROOT / f).rglob("*.py")))]
MAX_LINES, MAX_FUNCTION = 300, 60
VARIABLES = {"KVHAL_CONFIG", "KVHAL_BACKEND", "KVHAL_STRICT"}
PARTS = ("manifest", "store", "load", "index", "fused", "plan", "codec")
LANGUAGES = ("triton", "tilelang", "torch_npu", "tvm", "pydantic", "typer", "rich")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_sizes() -> None:
    found = []
    for path in EVERYTHING:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_LINES:
            found.append(f"{path.relative_to(ROOT)}: {lines} lines, at most {MAX_LINES}")
        for node in functions(path):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > MAX_FUNCTION:
                found.append(f"{path.relative_to(ROOT)}: {node.name} has {count} lines, at most {MAX_FUNCTION}")
    assert not found, "\n".join(found)


def test_no_shortcuts() -> None:
    found = []
    for path in SOURCE:
        for node in ast.walk(tree(path)):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Assert):
                found.append(f"{where}: assert")
            if isinstance(node, ast.ExceptHandler) and _is_broad(node.type):
                found.append(f"{where}: bare or broad except")
            if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
                found.append(f"{where}: star import")
        if path.stem in ("utils", "util", "helpers", "common", "misc"):
            found.append(f"{path.relative_to(ROOT)}: the name says nothing")
    assert not found, "\n".join(found)


def _is_broad(caught: ast.expr | None) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in kinds)


def test_three_environment_variables() -> None:
    found: dict[str, list[str]] = {}
    for path in SOURCE:
        for name in re.findall(r"\bKVHAL_[A-Z_]+\b", path.read_text(encoding="utf-8")):
            found.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert set(found) == VARIABLES, {name: found[name] for name in set(found) ^ VARIABLES if name in found}


def test_devices_are_named_in_one_file() -> None:
    named = re.compile(r"\btorch\.(cuda|npu|xpu|mps)\b")
    for path in SOURCE:
        if path.is_relative_to(ROOT / "kvhal") and path.name != "platform.py":
            code = ast.unparse(_without_docstrings(deepcopy(tree(path))))
            assert not named.search(code), (
                f"{path.relative_to(ROOT)} names {named.search(code)}; kvhal/platform.py is the place"
            )


def _without_docstrings(module: ast.Module) -> ast.Module:
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body[0].value = ast.Constant("")
    return module


def test_importing_kvhal_imports_no_language_and_touches_no_device() -> None:
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import kvhal\n"
        f"late = [name for name in {LANGUAGES!r} if name in set(sys.modules) - before]\n"
        "assert not late, late\n"
        "assert not torch.cuda.is_initialized()\n"
        "kvhal.explain('kv_index_cat'), kvhal.registry.backends()\n"
        f"late = [name for name in {LANGUAGES!r} if name in set(sys.modules) - before]\n"
        "assert not late, f'after a decision: {late}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_have_docstrings() -> None:
    import kvhal

    for name in kvhal.__all__:
        value = getattr(kvhal, name)
        if callable(value):
            assert value.__doc__, f"kvhal.{name} has no docstring"
    assert sorted(kvhal.__all__, key=str) == sorted(set(kvhal.__all__), key=str)


def test_backends_have_the_same_files() -> None:
    from kvhal.registry import BUILTIN_BACKENDS, backends

    folders = {path.name for path in (ROOT / "backends").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(BUILTIN_BACKENDS)
    for name, backend in backends().items():
        if name in folders and backend.binders:
            missing = [part for part in PARTS if not (ROOT / "backends" / name / f"{part}.py").is_file()]
            assert not missing, f"backends/{name} has no {missing}"


def test_no_folder_shadows_a_package() -> None:
    folders = {path.name for path in (ROOT / "backends").iterdir()}
    assert not folders & {"triton", "tilelang", "torch", "numpy", "tvm"}


def test_the_oracle_of_numbers_imports_no_backend() -> None:
    for name in ("numerics.py", "stages.py"):
        imported = {node.module for node in ast.walk(tree(ROOT / "kvhal" / name)) if isinstance(node, ast.ImportFrom)}
        assert not {module for module in imported if module and "backends" in module}


def test_files_end_with_one_newline_and_have_no_tabs() -> None:
    for path in EVERYTHING:
        text = path.read_text(encoding="utf-8")
        assert "\t" not in text, path
        assert not text or (text.endswith("\n") and not text.endswith("\n\n")), path
