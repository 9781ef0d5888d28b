"""The kernels do nothing that C++ leaves undefined: no signed overflow, no shift by too much, no invalid conversion."""

import pytest

pytest.importorskip("tilelang")

from kvhal import config
from kvhal.backends.ascend_tilelang import compiling, simulator
from kvhal.formats import V41_FORMAT, V41_FP4_FORMAT
from kvhal.interface import FORMAT_OPS, Op
from kvhal.testing.conformance import cases, run_case

if (reason := simulator.why_unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

CASES = [
    case for case in cases() if case.layout in (None, V41_FORMAT) or (case.layout == V41_FP4_FORMAT and case.op == Op.STORE)
]


@pytest.fixture
def sanitized(monkeypatch):
    def build(prim_func):
        return simulator.build(prim_func, pass_configs=compiling.PASS_CONFIGS, sanitize=True)

    monkeypatch.setattr(compiling, "_simulated", build)
    config.forget()  # launchers that are bound already keep their kernels
    yield
    config.forget()


@pytest.mark.parametrize("op", [*FORMAT_OPS, *(op for op in Op if op not in FORMAT_OPS)])
def test_no_undefined_behaviour(op, sanitized):
    tried = [case for case in CASES if case.op == op]
    assert tried
    for case in tried:
        run_case("ascend_tilelang", case, simulate=True).check()
