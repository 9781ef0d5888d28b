"""The demo: what it claims is recomputed here, and a wrong byte makes it fail."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from kvhal import demo_rows
from kvhal.cli import app
from kvhal.demo_engine import EngineResult, readme
from kvhal.formats import BF16_FORMAT, V41_FORMAT
from kvhal.interface import Op

TEST = demo_rows.Test(torch.device("cpu"), block_size=133)
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["demo", *arguments], env={"COLUMNS": "200", **environment})


@pytest.fixture(scope="module")
def short_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("demo") / "text.txt"
    path.write_bytes(b"A text of a few bytes.")
    return str(path)


@pytest.fixture(scope="module")
def report(short_text: str) -> Any:
    result = run("--json", "--text", short_text, "--block-size", "48")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_all_formats_pass(report: Any) -> None:
    assert report["passed"] is True
    assert [row["name"] for row in report["rows"]] == [case.name for case in demo_rows.real_cases()]
    assert all(row["bytes_equal"] and row["backend"] == "reference_torch" for row in report["rows"])
    assert report["engine"]["logits_equal"] is True
    assert report["engine"]["prompt_tokens"] == 23
    assert len(bytes.fromhex(report["engine"]["output"])) == 32


def test_it_ends_with_every_operation_on_every_backend(report: Any) -> None:
    """The tests' Triton runs through its interpreter, so there is always a backend to hold to the reference."""
    assert not [result["problem"] for result in report["parity"] if result["problem"]]
    hashes: dict[str, set[str]] = {}
    for result in report["parity"]:
        hashes.setdefault(result["case"], set()).add(result["hash"])
    assert len(hashes) == len(Op) and all(len(found) == 1 for found in hashes.values())
    assert len({result["target"] for result in report["parity"]}) >= 2


def test_signal_to_noise_against_an_independent_codec(report: Any) -> None:
    """e4m3 in groups of 32 with power-of-two scales, written with ml_dtypes alone."""
    (case,) = [case for case in demo_rows.real_cases() if case.layout == V41_FORMAT]
    groups = case.rows.double().numpy().reshape(-1, 32)
    scale = 2.0 ** np.ceil(np.log2(np.maximum(np.abs(groups).max(1, keepdims=True), 1e-4) / 448))
    restored = (groups / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    restored = restored.astype(ml_dtypes.bfloat16).astype(np.float64)
    expected = 10 * math.log10((groups**2).sum() / ((groups - restored) ** 2).sum())
    (row,) = [row for row in report["rows"] if row["name"] == "V41_FORMAT"]
    assert row["snr_db"] == pytest.approx(expected, abs=1e-9)
    assert row["bytes_per_token"] == 528
    assert row["compression"] == pytest.approx(1024 / 528)


def test_real_rows_are_what_their_description_says() -> None:
    cases = {case.name: case for case in demo_rows.real_cases()}
    assert cases["V41_FORMAT"].rows.shape == (2, 512, 512)
    assert cases["KV384_FORMAT"].rows.shape == (2, 512, 384)
    assert torch.equal(cases["MXFP8_INDEX_KV_FORMAT"].rows, cases["KV384_FORMAT"].rows[..., :128])
    for case in cases.values():
        assert case.rows.dtype == torch.bfloat16
        assert bool(case.rows.isfinite().all())
        assert case.layout.elements == case.rows.shape[2]


def test_signal_to_noise() -> None:
    signal = torch.tensor([3.0, 4.0])
    assert demo_rows.signal_to_noise(signal, signal) is None
    assert demo_rows.signal_to_noise(signal, torch.tensor([3.0, 3.5])) == pytest.approx(20.0)


@pytest.mark.parametrize("position", [0, -1], ids=["first byte", "padding of the last block"])
def test_one_wrong_byte_is_found(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    original = demo_rows._write_and_read
    calls: list[int] = []

    def spoiled(*arguments: Any) -> list[torch.Tensor]:
        result = original(*arguments)
        if not calls:
            result[0].view(-1)[position] ^= 1
        calls.append(1)
        return result

    (case,) = [case for case in demo_rows.real_cases() if case.layout == BF16_FORMAT]
    assert demo_rows.run_case(case, TEST).bytes_equal is True
    monkeypatch.setattr(demo_rows, "_write_and_read", spoiled)
    assert demo_rows.run_case(case, TEST).bytes_equal is False


def test_a_wrong_byte_fails_the_command(monkeypatch: pytest.MonkeyPatch, short_text: str) -> None:
    wrong = demo_rows.RowsResult("V41_FORMAT", "rows", 1, 528, 2.0, "reference_torch", bytes_equal=False)
    right = EngineResult(1, 32, 256, {}, bytes(32), True, 32, 0.0, 1.0)
    monkeypatch.setattr("kvhal.cli.demo.run_case", lambda *arguments: wrong)
    monkeypatch.setattr("kvhal.demo_engine.run_engine", lambda *arguments: right)
    result = run("--text", short_text, "--backend", "reference_torch")
    assert result.exit_code == 1
    assert "Parity: no other backend than reference_torch can run here" in result.stdout
    assert "NO" in result.stdout and "FAILED in" in result.stdout


def test_a_backend_that_cannot_serve(short_text: str) -> None:
    result = run("--backend", "cuda_tilelang", "--text", short_text)
    assert result.exit_code == 1
    assert "refused" in result.stdout
    assert result.stdout.count("cuda_tilelang: device: has cpu") == 2  # once for all rows, once for the engine
    facts = json.loads(run("--backend", "cuda_tilelang", "--text", short_text, "--json").stdout)
    assert facts["passed"] is False
    assert all(row["backend"] is None and "cuda_tilelang" in row["refused"] for row in facts["rows"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "nobody"], "has 'nobody', needs one of cuda_tilelang"),
        (["--device", "toaster"], "has 'toaster', needs a torch device"),
        (["--simulate"], "--simulate: needs --backend"),
        (["--text", "/nowhere/text"], "No such file or directory: /nowhere/text"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_readme_shows_what_the_demo_prints() -> None:
    """Regenerate with `python scripts/update_readme.py demo`."""
    result = run()
    assert result.exit_code == 0, result.output
    printed = [line.rstrip() for line in result.stdout.splitlines()]
    shown = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    own = ("passed in ", "Parity: ")  # how fast, and what a machine has, is its own
    missing = [line for line in printed if line not in shown and not line.startswith(own)]
    assert missing == []


def test_the_default_text_is_the_readme() -> None:
    assert readme() == (ROOT / "README.md").read_bytes()
