"""The kernels for many tokens, and for large tables of indices, over the conformance suite's cases, which are all of a few."""

from __future__ import annotations

import pytest

from kvhal.testing.case import Case
from kvhal.testing.conformance import Target, run_case, supported_cases, targets
from tests.gpu.small_calls import OPS, no_call_is_small

pytestmark = pytest.mark.gpu
CASES = [
    pytest.param(target, case, id=f"{target.id}-{case.id}")
    for target in targets()
    if target.device.type == "cuda"
    for case in supported_cases(target)
    if case.op in OPS.get(target.backend, ())
]


@pytest.mark.parametrize(("target", "case"), CASES)
def test_conforms(target: Target, case: Case) -> None:
    with no_call_is_small(target.backend):
        run_case(target.backend, case, target.device).check()
