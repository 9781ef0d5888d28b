"""Launch shapes: every figure beside one is in its file, defaults serve other architectures, and doctor says which it is."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kvhal.cli import doctor
from kvhal.config import current_policy
from kvhal.interface import Backend
from kvhal.registry import BUILTIN_BACKENDS, backends
from kvhal.testing.platforms import PLATFORMS
from kvhal.tuning import Choice, Figure, Key, Table
from kvhal.warm import CHUNK, MANY
from tests.gpu.small_calls import PLACES

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
#: what the files call the share of the copy's bandwidth, or of the smallest kernel's speed
SHARES = ("share_of_copy", "share", "ratio", "share_of_smallest")
SHAPES = ("shape", "tokens_a_program", "warps")
TUNED = {name: backends()[name].tuned for name in BUILTIN_BACKENDS if backends()[name].tuned is not None}
CHOICES = [
    pytest.param(choice, id=f"{name}-{arch}-{key[0]}-{key[1]}")
    for name, table in TUNED.items()
    if table is not None
    for arch, choices in table.tuned.items()
    for key, choice in choices.items()
]
FIGURE = Figure("file.json", {}, 0.5)


@cache
def rows(file: str) -> list[dict[str, Any]]:
    """Every row of every list of a result file."""
    document = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    lists = [value for value in document.values() if isinstance(value, list)]
    return [row for value in lists for row in value if isinstance(row, dict)]


def matching(file: str, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in rows(file) if all(row.get(name) == value for name, value in wanted.items())]


def test_the_gpu_backends_have_tables() -> None:
    assert set(TUNED) == {"cuda_tilelang", "portable_triton"}


@pytest.mark.parametrize("choice", CHOICES)
def test_figures_are_in_their_files(choice: Choice) -> None:
    figure = choice.figure
    (row,) = matching(figure.file, dict(figure.row))
    (share,) = [row[name] for name in SHARES if name in row]
    assert figure.share == pytest.approx(share, abs=5e-5)
    without_shape = {name: value for name, value in figure.row.items() if name not in SHAPES}
    others = {str([row.get(name) for name in SHAPES]) for row in matching(figure.file, without_shape)}
    assert figure.against == len(others) - 1, "the number of other shapes in the file"


@pytest.mark.parametrize("choice", CHOICES)
def test_nothing_much_better_was_passed_over(choice: Choice) -> None:
    """Within the run's noise the choice is the best of those that it was chosen from."""
    without_shape = {name: value for name, value in choice.figure.row.items() if name not in SHAPES}
    shares = [row[name] for row in matching(choice.figure.file, without_shape) for name in SHARES if name in row]
    assert choice.figure.share >= 0.99 * max(shares)


@pytest.mark.parametrize("name", TUNED)
def test_defaults_serve_every_other_architecture(name: str) -> None:
    table = TUNED[name]
    assert table is not None
    for kernel, dtype in table.defaults:
        assert table.shape_of("sm_12345", kernel, dtype) == table.defaults[kernel, dtype]
    with pytest.raises(KeyError):
        table.shape_of("sm_90", "no such kernel", None)


def test_defaults_are_small() -> None:
    """At most 256 threads a thread block: with 255 registers each, what any multiprocessor has (65,536)."""
    tilelang, triton = TUNED["cuda_tilelang"], TUNED["portable_triton"]
    assert tilelang is not None and triton is not None
    for (kernel, _), shape in tilelang.defaults.items():
        plain = kernel in ("convert", "cat", "expand", "window", "plan")
        threads = (
            shape[0]
            if plain
            else shape[1]
            if kernel in ("raw", "load_bulk")
            else 32 * shape[0 if kernel.startswith(("fused", "chunk")) else 1]
        )
        assert threads <= 256
    for (kernel, _), shape in triton.defaults.items():
        if kernel.endswith("_few"):
            assert shape[0] // 32 <= 64
            continue
        size, warps = shape[0], shape[-1]
        assert all(number.bit_count() == 1 for number in shape) and 64 * warps <= 256  # 64 lanes a warp on CDNA
        assert size // (32 * warps) <= 64


def test_a_warmup_reaches_the_kernels_for_many_tokens() -> None:
    """Where a shape says how many tokens are few, the calls of `kvhal.warmup` have more."""
    few = []
    for name, table in TUNED.items():
        assert table is not None
        shapes = [
            *table.defaults.items(),
            *((key, choice.shape) for row in table.tuned.values() for key, choice in row.items()),
        ]
        few += [shape[PLACES[name][kernel]] for (kernel, _), shape in shapes if kernel in PLACES[name]]
    assert len(few) > 20 and max(few) < MANY


def test_a_warmup_reaches_the_kernels_for_chunks() -> None:
    table = TUNED["cuda_tilelang"]
    assert table is not None
    found = 0
    for kernel, dtype in table.defaults:
        if kernel.startswith("chunk"):
            few, most = (table.shape_of("sm_90", name, dtype)[-1] for name in (kernel.replace("chunk", "fused"), kernel))
            found += few < most
            assert most <= few or few < CHUNK <= most, kernel
    assert found == 4


def test_a_table_refuses_what_no_default_has() -> None:
    key: Key = ("store", "e4m3")
    with pytest.raises(ValueError, match=r"sm_90.*store.*needs a shape as in defaults: None"):
        Table({"sm_90": {key: Choice((1, 4), FIGURE)}}, {}, "")
    with pytest.raises(ValueError, match=r"has \(1, 4, 1\), needs a shape as in defaults: \(1, 4\)"):
        Table({"sm_90": {key: Choice((1, 4, 1), FIGURE)}}, {key: (1, 4)}, "")


def facts(arch: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What doctor says of a made-up device."""
    monkeypatch.setattr(doctor, "detect", lambda device: PLATFORMS[arch])
    return doctor._device_facts(torch.device("cpu"), PLATFORMS[arch].modules, current_policy())


def said(device: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    doctor._show_device(device)
    return capsys.readouterr().out


def test_doctor_names_the_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    device = facts("sm_90", monkeypatch)
    tuning = {row["backend"]: row["tuning"] for row in device["backends"]}
    assert tuning["reference_torch"] is None
    assert tuning["cuda_tilelang"]["tuned"] and "h200_cuda_tilelang.json" in tuning["cuda_tilelang"]["files"]
    assert tuning["cuda_tilelang"]["safe_defaults"] == ["plan"]
    assert json.loads(json.dumps(tuning)) == tuning
    text = said(device, capsys)
    assert f"cuda_tilelang is tuned on sm_90 by {', '.join(tuning['cuda_tilelang']['files'])} in benchmarks/results" in text
    assert "safe defaults for plan" in text


@pytest.mark.parametrize("arch", ["sm_100", "gfx942"])
def test_doctor_says_untuned(arch: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    device = facts(arch, monkeypatch)
    (triton,) = [row["tuning"] for row in device["backends"] if row["backend"] == "portable_triton"]
    assert not triton["tuned"] and triton["files"] == []
    text = said(device, capsys)
    assert f"portable_triton is untuned on {arch}: safe defaults; run {triton['run']} to tune" in text
    assert ("cuda_tilelang is untuned" in text) == (arch == "sm_100")


def test_doctor_says_nothing_of_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    device = facts("cpu+interpreter", monkeypatch)
    assert all(row["tuning"] is None for row in device["backends"])
    assert "tuned" not in said(device, capsys)


def test_the_field_is_optional() -> None:
    assert Backend("mine", "anything", lambda request: ()).tuned is None
