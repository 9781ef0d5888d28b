"""The kernels for few tokens in Triton's interpreter, which otherwise runs those for many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from kvhal import config
from kvhal.backends.portable_triton import fused, launch, load, store
from kvhal.backends.portable_triton.record import Record
from kvhal.formats import BUILTIN_FORMATS
from kvhal.interface import Op
from kvhal.platform import Platform
from kvhal.testing import Case, cases, run_case

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them in the conformance suite")
CPU = torch.device("cpu")
NAMES = {Op.STORE: "values", Op.LOAD: "hostile", Op.LOAD_SLOTS: "int64", Op.FUSED_STORE: "all-bf16"}
#: rows of adversarial values, segments and slots of every kind, and all stages where the format has them
CASES = [
    next(case for case in cases(op, layout) if case.name.rpartition("-b")[0] == name)
    for op, name in NAMES.items()
    for layout in BUILTIN_FORMATS.values()
]


@pytest.fixture(autouse=True)
def every_call_is_small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    few_shape = launch.few_shape

    def without_limit(kernel: str, record: Record, platform: Platform) -> tuple[int, int]:
        return 2**30, few_shape(kernel, record, platform)[1]

    for module in (fused, load, store):
        monkeypatch.setattr(module, "few_shape", without_limit)
    config.forget()
    yield
    config.forget()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_conforms(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With programs that find nothing to do, as a GPU adds them."""
    called: list[int] = []

    def with_idle(kernel: Any, programs: int, *args: Any) -> None:
        called.append(programs)
        call(kernel, programs + 3, *args)

    call = launch.Kernel.__call__
    monkeypatch.setattr(launch.Kernel, "__call__", with_idle)
    run_case("portable_triton", case, CPU).check()
    assert called
