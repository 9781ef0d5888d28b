"""The kernels give the same bytes in whatever order the simulator runs blocks and threads."""

import pytest

pytest.importorskip("tilelang")

from kvhal.backends.ascend_tilelang import simulator
from kvhal.formats import BF16_FORMAT, V41_FORMAT, V41_FP4_FORMAT
from kvhal.interface import Op
from kvhal.testing.conformance import cases, run_case

if (reason := simulator.why_unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

# Fused stores have barriers; of the others, whose threads share nothing, one format shows that nothing was overlooked.
# Tokens that share a slot are left out: in the order that the device happens to take, the threads of two such tokens may
# interleave, and no kernel here waits for another's record.
CASES = [
    case
    for case in cases()
    if not case.repeats
    and (case.layout in (None, V41_FORMAT) or (case.op == Op.FUSED_STORE and case.layout in (V41_FP4_FORMAT, BF16_FORMAT)))
]


@pytest.mark.parametrize("order", ["reverse", "shuffle"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_order_does_not_matter(case, order):
    with simulator.schedule(order, seed=7):
        run_case("ascend_tilelang", case, simulate=True).check()
