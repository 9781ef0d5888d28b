"""doctor, formats, explain: output for people and for scripts, exit codes, and what bad input says."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from kvhal.cli import COMMANDS, app, doctor
from kvhal.cli.console import print_table
from kvhal.formats import BUILTIN_FORMATS
from kvhal.interface import Op
from kvhal.layout import alloc_kv_cache
from kvhal.platform import Module
from kvhal.registry import BUILTIN_BACKENDS


def run(*arguments: str, columns: str = "200", **environment: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": columns, **environment})


def run_json(*arguments: str, code: int = 0, **environment: str) -> Any:
    result = run(*arguments, "--json", **environment)
    assert result.exit_code == code, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def refused(*arguments: str, **environment: str) -> str:
    """The one line on stderr of a wrong question; stdout stays empty."""
    result = run(*arguments, **environment)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("kvhal: error: ") and result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def quick_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """doctor without the seconds that importing the languages takes; test_try_imports covers them."""
    monkeypatch.setattr(doctor, "try_imports", tuple)


def test_every_command_has_help() -> None:
    for name in COMMANDS:
        result = run(name, "--help")
        assert result.exit_code == 0
        assert "--json" in result.stdout


def test_no_command_is_wrong_usage() -> None:
    assert run().exit_code == 2
    assert run("nonsense").exit_code == 2
    assert run("formats", "--nonsense").exit_code == 2


@pytest.mark.parametrize("block_size", [1, 64, 133])
def test_formats_agree_with_an_allocation(block_size: int) -> None:
    facts = run_json("formats", "--block-size", str(block_size))
    assert [row["name"] for row in facts["formats"]] == list(BUILTIN_FORMATS)
    for row, layout in zip(facts["formats"], BUILTIN_FORMATS.values(), strict=True):
        cache = alloc_kv_cache(2, block_size, layout, "cpu")
        assert row["block_stride"] == cache.stride(0) * cache.element_size()
        assert row["data_bytes"] + row["scale_bytes"] == row["bytes_per_token"]
        assert row["block_padding"] == row["block_stride"] - block_size * row["bytes_per_token"] >= 0


def test_formats_as_a_table() -> None:
    text = run("formats").stdout
    (line,) = [line for line in text.splitlines() if line.startswith("V41_FP4_FORMAT")]
    assert [word for word in line.split() if word.isdecimal()] == ["512", "16", "288", "18432", "0", "256"]


def test_a_narrow_terminal_gets_records_and_loses_nothing() -> None:
    result = run("formats", columns="40")
    assert result.exit_code == 0
    *table, _ = result.stdout.splitlines()  # the last line is prose, which a terminal wraps
    assert max(map(len, table)) <= 40
    assert "  bytes/token: 288" in result.stdout
    for name in BUILTIN_FORMATS:
        assert name in result.stdout


def test_a_pipe_gets_whole_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("shutil.get_terminal_size", os.terminal_size)
    print_table("Title", ("a", "b"), [("x" * 300, "y")])
    assert f"{'x' * 300}   y" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["0", "-1", "x"])
def test_formats_refuses_a_block_size(size: str) -> None:
    result = run("formats", "--block-size", size)
    assert result.exit_code == 2
    assert "--block-size" in result.stderr


def test_explain_says_who_serves() -> None:
    facts = run_json("explain", "store_kv_cache", "--format", "V41_FORMAT", "--device", "cpu", "--block-size", "64")
    assert facts["chosen"] == "reference_torch"
    assert (facts["op"], facts["format"], facts["block_size"]) == ("store_kv_cache", "V41_FORMAT", 64)
    assert {entry["backend"] for entry in facts["candidates"]} >= set(BUILTIN_BACKENDS)
    for entry in facts["candidates"]:
        assert entry["supported"] != bool(entry["reasons"])
    assert "reference_torch: chosen" in run("explain", "store_kv_cache", "--format", "V41_FORMAT").stdout


def test_explain_takes_a_format_as_json() -> None:
    fields = {"quantized_dtype": "e2m1", "quantized_elements": 384, "elements_per_sf": 16, "bf16_elements": 0}
    fields |= {"do_cast": True, "sf_format": "e4m3", "note": "", "token_interleaved": True}
    assert run_json("explain", "load_kv_slots", "--format", json.dumps(fields))["format"] == "e2m1[384]/16:e4m3"


@pytest.mark.parametrize("op", list(Op))
def test_explain_describes_a_machine_that_is_not_here(op: Op) -> None:
    layout = ["--format", "V41_FORMAT"] if op in ("store_kv_cache", "load_paged_kv_cache", "load_kv_slots") else []
    layout = ["--format", "V41_FORMAT"] if op.startswith("fused") else layout
    facts = run_json("explain", op, *layout, "--platform", "cuda", "--arch", "sm_90")
    assert facts["platform"] == {"kind": "cuda", "arch": "sm_90", "name": "described by --platform"}
    assert facts["chosen"] is not None


def test_explain_knows_what_the_other_machine_lacks() -> None:
    where = ("explain", "kv_index_cat", "--platform", "cuda", "--arch", "sm_90", "--backend", "cuda_tilelang")
    facts = run_json(*where, "--missing", "tilelang", code=1)
    assert facts["chosen"] is None
    assert facts["forced_by"] == "--backend"
    (entry,) = facts["candidates"]
    assert "tilelang" in [reason["what"] for reason in entry["reasons"]]


def test_explain_exits_with_1_when_nothing_serves() -> None:
    result = run("explain", "kv_index_cat", "--backend", "cuda_tilelang")
    assert result.exit_code == 1
    assert "no backend can serve it, forced by --backend" in result.stdout


def test_explain_goes_by_the_configuration(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[backends]\nforce = "cuda_tilelang"\n')
    facts = run_json("explain", "kv_index_cat", KVHAL_CONFIG=str(config), code=1)
    assert facts["forced_by"] == str(config)


def test_explain_knows_torchs_other_devices() -> None:
    assert run_json("explain", "kv_index_cat", "--platform", "xpu", "--arch", "pvc")["chosen"] == "reference_torch"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such_op"], "OP: has 'no_such_op', needs one of store_kv_cache"),
        (["store_kv_cache"], "--format: is missing"),
        (["store_kv_cache", "--format", "V42"], "has 'V42', needs one of V41_FORMAT"),
        (["store_kv_cache", "--format", '{"quantized_dtype": "e4m3"}'], "--format: "),
        (["kv_index_cat", "--format", "V41_FORMAT"], "kv_index_cat handles no records"),
        (["kv_index_cat", "--device", "toaster"], "has 'toaster', needs a torch device; this machine has cpu"),
        (["kv_index_cat", "--device", "xpu:7"], "has 'xpu:7', needs a torch device; this machine has cpu"),
        (["kv_index_cat", "--backend", "nobody"], "has 'nobody', needs one of cuda_tilelang"),
        (["kv_index_cat", "--arch", "sm_90"], "need --platform as well"),
        (["kv_index_cat", "--platform", "cuda"], "needs --arch as well"),
        (["kv_index_cat", "--platform", "nvidia", "--arch", "sm_90"], "--platform: has 'nvidia', needs one of cuda, rocm, npu"),
        (["kv_index_cat", "--platform", "cuda", "--arch", "sm_90", "--device", "cpu"], "leave --device out"),
        (["kv_index_cat", "--platform", "cuda", "--arch", "sm_90", "--missing", "luck"], "has 'luck', needs one of"),
    ],
)
def test_explain_refuses(arguments: list[str], words: str) -> None:
    assert words in refused("explain", *arguments)


@pytest.mark.parametrize("command", [("explain", "kv_index_cat"), ("doctor",)])
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"KVHAL_CONFIG": "/nowhere/config.toml"}, "cannot read /nowhere/config.toml"),
        ({"KVHAL_BACKEND": "nobody"}, "KVHAL_BACKEND: backend has 'nobody'"),
        ({"KVHAL_STRICT": "perhaps"}, "KVHAL_STRICT: has 'perhaps'"),
    ],
)
@pytest.mark.usefixtures("quick_imports")
def test_a_bad_configuration_is_one_line(command: tuple[str, ...], environment: dict[str, str], words: str) -> None:
    assert words in refused(*command, **environment)


@pytest.mark.usefixtures("quick_imports")
def test_doctor_reports_this_machine() -> None:
    facts = run_json("doctor")
    (torch_facts,) = [module for module in facts["modules"] if module["name"] == "torch"]
    assert torch_facts["version"] == torch.__version__
    assert {tool["name"] for tool in facts["tools"]} == {"nvcc", "bisheng", "g++"}
    cpu = facts["devices"][0]
    assert cpu["device"] == "cpu"
    assert cpu["unserved"] == []
    assert {row["backend"] for row in cpu["backends"]} >= set(BUILTIN_BACKENDS)
    for row in cpu["backends"]:
        assert (row["served"] == row["asked"]) == (row["reasons"] == [])
    (reference,) = [row for row in cpu["backends"] if row["backend"] == "reference_torch"]
    assert reference["served"] == reference["asked"]
    (cuda,) = [row for row in cpu["backends"] if row["backend"] == "cuda_tilelang"]
    assert cuda["served"] == 0
    assert len(cuda["reasons"][0]["against"]) == cuda["asked"]


@pytest.mark.parametrize("columns", [40, 200])
@pytest.mark.usefixtures("quick_imports")
def test_doctor_for_people(columns: int) -> None:
    result = run("doctor", columns=str(columns))
    assert result.exit_code == 0
    tables, _, rest = result.stdout.partition("\ncpu: cpu")
    assert max(map(len, tables.splitlines()[1:])) <= columns
    assert "cuda_tilelang cannot serve anything" in rest
    assert "a call is served by: reference_torch" in rest


@pytest.mark.usefixtures("quick_imports")
def test_doctor_says_no_when_a_forced_backend_serves_nothing() -> None:
    facts = run_json("doctor", KVHAL_BACKEND="cuda_tilelang", code=1)
    assert len(facts["devices"][0]["unserved"]) == facts["devices"][0]["backends"][0]["asked"]
    assert {entry["by"] for entry in facts["config"]["forced"]} == {"KVHAL_BACKEND"}
    text = run("doctor", KVHAL_BACKEND="cuda_tilelang").stdout
    assert "a call is served by: nothing" in text
    assert "cuda_tilelang is forced by KVHAL_BACKEND for store_kv_cache" in text


def test_try_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_that_is_fine.py").write_text("")
    (tmp_path / "module_that_fails.py").write_text("raise ImportError('libmissing.so: not there')")
    (tmp_path / "module_that_aborts.py").write_text("import os\nos._exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    absent = Module("module_that_is_absent", None, "not installed")
    names = ("module_that_is_fine", "module_that_fails", "module_that_aborts")
    fine, fails, aborts, same = doctor.try_imports([*(Module(name, "1.0") for name in names), absent])
    assert (fine.version, fine.error) == ("1.0", None)
    assert fails.version is None
    assert fails.error == "1.0 is installed: ImportError: libmissing.so: not there"
    assert aborts.error == "1.0 is installed: importing it ends the process with exit code 7"
    assert same == absent
    assert "module_that_is_fine" not in sys.modules


def test_try_imports_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_that_hangs.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "IMPORT_SECONDS", 0.1)
    (hangs,) = doctor.try_imports([Module("module_that_hangs", "1.0")])
    assert "takes longer than 0.1 s" in str(hangs.error)


def test_a_bug_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhal.cli.formats.describe_format", lambda *arguments: 1 / 0)
    assert isinstance(run("formats").exception, ZeroDivisionError)
