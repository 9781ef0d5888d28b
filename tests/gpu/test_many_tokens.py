"""The kernels for many tokens, and for large tables of indices, over the conformance suite's cases, which are all of a few."""

from __future__ import annotations

import pytest

from kvhal.formats import FP4_INDEX_KV_FORMAT, V41_FORMAT, V41_FP4_FORMAT
from kvhal.interface import Op
from kvhal.testing.case import Case
from kvhal.testing.conformance import Target, run_case, supported_cases, targets
from tests.gpu.small_calls import OPS, every_fused_store_is_a_chunk, no_call_is_small

pytestmark = pytest.mark.gpu
CASES = [
    pytest.param(target, case, id=f"{target.id}-{case.id}")
    for target in targets()
    if target.device.type == "cuda"
    for case in supported_cases(target)
    if case.op in OPS.get(target.backend, ())
]

CHUNKS = [
    pytest.param(target, case, id=f"{target.id}-{case.id}")
    for target in targets()
    if target.device.type == "cuda" and target.backend == "cuda_tilelang"
    for case in supported_cases(target)
    if case.op == Op.FUSED_STORE and case.layout in (V41_FORMAT, V41_FP4_FORMAT, FP4_INDEX_KV_FORMAT)
]


@pytest.mark.parametrize(("target", "case"), CASES)
def test_conforms(target: Target, case: Case) -> None:
    with no_call_is_small(target.backend):
        run_case(target.backend, case, target.device).check()


@pytest.mark.parametrize(("target", "case"), CHUNKS)
def test_chunks_conform(target: Target, case: Case) -> None:
    """The formats whose prefill chunks have a kernel of their own."""
    with every_fused_store_is_a_chunk():
        run_case(target.backend, case, target.device).check()
