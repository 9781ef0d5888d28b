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
from tests.triton import kernels, stand_ins

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them in the conformance suite")
LINE_ELEMENTS = 64  #: bf16 in 128 bytes
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


@pytest.mark.parametrize(("elements", "width"), [(512, 512), (128, 128), (64, 64), (20, 32), (576, 1024), (600, 1024)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_every_line_of_the_rows_that_exist_is_prefetched(
    elements: int, width: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With programs that find nothing to do. A grid larger than `early`, or an `early` of 0, prefetches nothing."""
    monkeypatch.setattr(launch, "prefetch", stand_ins.prefetch)
    n, programs = 7, 12 // tokens
    rows = torch.zeros((n + 5, elements + 3), dtype=torch.bfloat16)
    for early in (0, programs - 1):
        kernels.prefetch_and_no_more[(programs,)](rows, elements + 3, n, tokens, width, elements, early)
        assert not rows.any()
    kernels.prefetch_and_no_more[(programs,)](rows, elements + 3, n, tokens, width, elements, programs)
    need = torch.zeros_like(rows)
    need[:n, :elements:LINE_ELEMENTS] = 1
    rows[:, elements - 1] = need[:, elements - 1]  # may be asked for as well: a tile has addresses left
    assert torch.equal(rows, need)
