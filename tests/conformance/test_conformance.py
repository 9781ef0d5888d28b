"""Every backend of the registry, on every device of this machine, over every (operation, format, case) it does not refuse."""

from __future__ import annotations

from typing import Any

import pytest

from kvhal.testing.case import Call, Case
from kvhal.testing.conformance import REFERENCE, Target, cell, run_case, supported_cases, targets
from tests.oracle.operations import ORACLE


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" not in metafunc.fixturenames:
        return
    wanted, profile = metafunc.config.getoption("backend"), metafunc.config.getoption("cases")
    parameters = [
        pytest.param(target, case, id=f"{target.id}-{case.id}", marks=_marks(target))
        for target in targets()
        if not wanted or target.backend in wanted
        for case in supported_cases(target, profile)
    ]
    metafunc.parametrize("target, case", parameters)


def _marks(target: Target) -> list[pytest.MarkDecorator]:
    return [pytest.mark.gpu] if target.device.type == "cuda" else []


def oracle(call: Call) -> Any:
    return ORACLE[call.op](**call.arguments)


def test_conforms(target: Target, case: Case, record_property: Any) -> None:
    record_property("cell", "/".join(cell(case, target)))
    own = target.backend == REFERENCE and target.device.type == "cpu"  # the reference cannot be held to itself
    outcome = run_case(target.backend, case, target.device, simulate=target.simulate, expected=oracle if own else None)
    outcome.check()
