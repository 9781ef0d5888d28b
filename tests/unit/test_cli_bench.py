"""`kvhal bench`: bytes are checked before anything is timed, sizes are counted right, two runs can be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kvhal
from kvhal import bench
from kvhal.bench import timing
from kvhal.bench.plot import draw
from kvhal.cli import app
from kvhal.interface import Op
from kvhal.ops import cache_calls as cache_ops

SMALL = ["bench", "--ops", "store_kv_cache", "--formats", "V41_FORMAT", "--backends", "reference_torch", "--tokens", "70"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "CPU_SECONDS", 0.0)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_a_cell_has_its_bytes_time_and_ratio() -> None:
    result = invoke(*SMALL, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (cell,) = document["cells"]
    assert cell["bytes"] == 70 * (1024 + 528 + 4) and cell["host_us"] is None and not cell["simulated"]
    assert cell["gbs"] == pytest.approx(cell["bytes"] / cell["median_us"] / 1e3)
    assert cell["ratio"] == pytest.approx(cell["gbs"] / document["copy_gbs"])
    assert document["versions"]["torch"] and document["empty_us"] > 0


def test_every_operation_and_format_is_measured() -> None:
    result = invoke("bench", "--backends", "reference_torch", "--tokens", "33", "--block-size", "16", "--json")
    assert result.exit_code == 0, result.output
    cells = json.loads(result.stdout)["cells"]
    assert {cell["op"] for cell in cells} == set(Op)
    assert {cell["format"] for cell in cells} == {*kvhal.formats.BUILTIN_FORMATS, "-"}


@pytest.mark.parametrize("pattern", bench.PATTERNS)
@pytest.mark.parametrize("tokens", [1, 16, 50])
def test_patterns_address_each_token_once(pattern: str, tokens: int) -> None:
    for op, layout in ((Op.STORE, kvhal.V41_FORMAT), (Op.LOAD, kvhal.MXFP8_INDEX_KV_FORMAT), (Op.LOAD, kvhal.BF16_FORMAT)):
        work, same = (bench.make_work(op, layout, tokens, 16, pattern, torch.device("cpu"), 3) for _ in range(2))
        for tensor in work.written:
            tensor.view(torch.uint8).fill_(0xA5)
        timing.verify(work, same, "reference_torch")
        if op == Op.STORE:
            records = work.written[0].reshape(-1, layout.bytes_per_token)
            assert int((records != 0xA5).any(1).sum()) == tokens
        else:
            assert bool((work.written[0].view(torch.uint8) != 0xA5).any(1).all())


def test_wrong_bytes_are_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = cache_ops.bound, []

    def bound(*arguments: Any) -> Any:
        launch = right(*arguments)

        def wrong(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
            launch(kv, cache, slots)
            if not calls:
                cache.view(-1)[slots[0] * 528] ^= 1
            calls.append(1)

        return wrong

    monkeypatch.setattr(cache_ops, "bound", bound)
    result = invoke(*SMALL)
    assert result.exit_code == 1 and "1 bytes differ from reference_torch's" in result.output and len(calls) == 2


def test_comparison_fails_over_the_threshold(tmp_path: Path) -> None:
    document = json.loads(invoke(*SMALL, "--json").stdout)
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text(json.dumps(document))
    document["cells"][0]["ratio"] *= 0.9
    after.write_text(json.dumps(document))
    assert invoke("bench", "--compare", str(before), str(before)).exit_code == 0
    assert invoke("bench", "--compare", str(before), str(after), "--threshold", "0.2").exit_code == 0
    slower = invoke("bench", "--compare", str(before), str(after), "--json")
    assert slower.exit_code == 1 and json.loads(slower.stdout)[0]["factor"] == pytest.approx(0.9)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    assert invoke(*SMALL, "--plot", str(path)).exit_code == 0
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_the_picture_has_copies_where_they_were_measured(tmp_path: Path) -> None:
    document = json.loads(invoke(*SMALL, "--json").stdout)
    assert document["copies"] == []  # of a CPU
    document["copies"] = [{"bytes": 16, "us": 1.0}, {"bytes": 1 << 26, "us": 40.0}]
    draw(document, tmp_path / "run.svg")
    assert "reads and writes as much" in (tmp_path / "run.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--tokens", "many"], 2, "needs counts in 1.."),
        (["--tokens", "0"], 2, "needs counts in 1.."),
        (["--pattern", "spiral"], 2, "needs one of consecutive, pages, random"),
        (["--backends", "nobody"], 2, "needs one of"),
        (["--backends", "cuda_tilelang", "--tokens", "8"], 1, "device"),
        (["--device", "cuda:7"], 2, "--device"),
        (["--compare", "nowhere.json", "nowhere.json"], 2, "cannot read nowhere.json"),
        (["--compare", "a.json", "b.json", "--ops", "store_kv_cache"], 2, "has --ops too"),
        (["--tokens", "99999999999999"], 2, "needs counts in 1.."),
        (["--ops", "nothing"], 2, "--ops: has 'nothing'"),
        (["--plot", "nowhere/run.png"], 2, "a folder that exists"),
        (["--plot", "run.nope"], 2, "needs a name that ends in"),
        (["--plot", "."], 2, "--plot"),
    ],
)
def test_bad_questions_are_one_message(arguments: list[str], code: int, message: str) -> None:
    result = invoke("bench", *arguments)
    assert result.exit_code == code and message in result.output and "Traceback" not in result.output


CELL = {"backend": "b", "op": "o", "format": "f", "tokens": 1, "block_size": 1, "pattern": "p", "ratio": 0.5}


def test_a_cell_that_is_gone_is_no_success(tmp_path: Path) -> None:
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    before.write_text(json.dumps({"cells": [CELL, {**CELL, "tokens": 2}]}))
    after.write_text(json.dumps({"cells": [CELL]}))
    result = invoke("bench", "--compare", str(before), str(after))
    assert result.exit_code == 2 and "lacks 1 of 2 cells" in result.output
    assert invoke("bench", "--compare", str(after), str(before)).exit_code == 0


def test_files_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    wrong = [{"ratio": value} for value in (float("nan"), 0, -1, "fast", None)] + [{"op": ["a"]}]
    cells = [json.dumps({"cells": [{**CELL, **change}]}) for change in wrong]
    for text in ("{}", "[]", "not json", '{"cells": []}', *cells):
        path.write_text(text)
        result = invoke("bench", "--compare", str(path), str(path))
        assert result.exit_code == 2 and "Traceback" not in result.output
