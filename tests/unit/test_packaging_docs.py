"""What the documents say is true: their code runs, their tables are those of the package, their files exist."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import kvhal
from kvhal import registry
from kvhal.config import file_layer, merge
from kvhal.config_file import Ascend, Backends, ConfigFile
from kvhal.dispatcher import resolve
from kvhal.interface import Op, Request
from kvhal.platform import Platform
from kvhal.testing import run_case, supported_cases, targets

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")))]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", ["README.md", "docs/adding_a_format.md"])
def test_python_in_a_document_runs(document: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks(document, "python")
    exec(compile(code, document, "exec"), {"__name__": "document"})
    printed = capsys.readouterr().out
    assert "reference_torch: chosen" in printed
    if document == "README.md":
        assert printed.startswith("400 rows, 528 bytes each instead of 1024, relative error 0.0")
    else:
        assert printed.startswith("396\n")


def test_the_example_backend_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its page says: found through its entry point, forced by name, and put through the suite."""
    for code in blocks("docs/adding_a_backend.md", "python"):
        path = tmp_path / code.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("my_backend", "my_backend.manifest:BACKEND", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    registry.reload()
    try:
        assert kvhal.explain("kv_index_cat").chosen == "reference_torch"
        with kvhal.use_backend("my_backend"):
            assert kvhal.explain("kv_index_cat").chosen == "my_backend"
            with pytest.raises(kvhal.ForcedBackendError, match="not built yet in my_backend"):
                kvhal.expand_swa_index(torch.zeros((1, 4), dtype=torch.int32), 4)
        ran = 0
        for target in targets():
            if target.backend == "my_backend":
                for case in supported_cases(target, "quick"):
                    run_case(target.backend, case, target.device, simulate=target.simulate).check()
                    ran += 1
        assert ran > 0
    finally:
        monkeypatch.undo()
        registry.reload()
        for name in [name for name in sys.modules if name.partition(".")[0] == "my_backend"]:
            del sys.modules[name]


def test_the_example_entry_point_is_the_registry_s() -> None:
    (text,) = blocks("docs/adding_a_backend.md", "toml")
    assert f'[project.entry-points."{registry.ENTRY_POINT_GROUP}"]' in text


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / document).parent / target).exists(), f"{document} links to {target}"


def test_generated_sections_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regenerate with `python scripts/update_readme.py`; the demo's own test looks at the demo."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    sections, update_readme = importlib.import_module("sections"), importlib.import_module("update_readme")
    for name, (path, make) in update_readme.SECTIONS.items():
        text = path.read_text(encoding="utf-8")
        body = sections.section(text, name)
        assert sections.with_section(text, name, body.rstrip("\n")) == text
        if name != "demo":
            assert body.strip() == make().strip(), name


def test_there_is_a_file_for_each_common_machine() -> None:
    assert {path.stem for path in CONFIGS} >= {"auto", "h100", "ascend", "triton", "reference"}


@pytest.mark.parametrize(
    ("name", "kind", "arch", "chosen"),
    [
        ("auto", "cpu", "x86_64", "reference_torch"),
        ("reference", "cuda", "sm_90", "reference_torch"),
        ("ascend", "npu", "ascend310p", "reference_torch"),
        ("h100", "cpu", "x86_64", None),
        ("triton", "cpu", "x86_64", None),
    ],
)
def test_config_files_mean_what_they_say(name: str, kind: str, arch: str, chosen: str | None) -> None:
    """Nothing is installed on these machines, so only the reference, where it is allowed, can serve."""
    policy = merge([file_layer(ROOT / "configs" / f"{name}.toml", "test")])
    decision = resolve(Request(Op.STORE, kvhal.V41_FORMAT, Platform(kind, arch)), policy, registry.backends())
    assert decision.chosen == chosen
    assert policy.strict == (name == "reference")
    assert policy.simulate is False


def test_the_config_section_of_the_readme_is_valid(tmp_path: Path) -> None:
    (text,) = blocks("README.md", "toml")
    path = tmp_path / "readme.toml"
    path.write_text(text)
    policy = merge([file_layer(path, "test")])
    assert policy.strict is True
    assert policy.preference == ("cuda_tilelang", "portable_triton")
    assert policy.forced == ((Op.CONVERT_INDEX, "reference_torch", str(path)),)


def test_auto_toml_names_every_key() -> None:
    text = (ROOT / "configs" / "auto.toml").read_text()
    sections = {name for name in ConfigFile.model_fields if name != "strict"}
    keys = {"strict", *Backends.model_fields, *Ascend.model_fields} - {"ops"}
    assert all(f"[{name}]" in text for name in sections | {"backends.ops"})
    assert all(re.search(rf"^(# )?{key} = ", text, re.MULTILINE) for key in keys)


@pytest.mark.parametrize(
    "name", ["scripts/demo", "scripts/test", "scripts/bench", "scripts/resources", "scripts/venv.sh", ".ci/run"]
)
def test_scripts_are_well_formed(name: str) -> None:
    path = ROOT / name
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert name.endswith(".sh") or path.stat().st_mode & 0o111
