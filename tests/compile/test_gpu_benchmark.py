"""benchmarks/gpu_tilelang.py calls kernels itself, on a GPU only; here: it gives each as many arguments as it takes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tilelang")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("gpu_tilelang")
    monkeypatch.setattr(importlib.import_module("isolated"), "DEVICE", "cpu")
    monkeypatch.setattr(importlib.import_module("isolated"), "MAX_POSITION", 64)
    yield module
    for name in ("gpu_tilelang", "isolated"):
        sys.modules.pop(name, None)


def test_every_kernel_gets_its_arguments(benchmark_module: Any) -> None:
    jobs = {job.factory: job for job in benchmark_module.jobs(variants=False)}
    assert set(jobs) == set(benchmark_module.OPS)
    for factory, job in jobs.items():
        few = benchmark_module.Job(**{**vars(job), "tokens": 3})
        given: list[Any] = []
        launch, _ = benchmark_module.prepare(few, lambda *arguments, given=given: given.extend(arguments))
        launch()
        assert len(given) == len(factory(*few.key[1]).params), factory.__name__
