"""The last part of the demo: a few cases of the conformance suite on every backend of this machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvhal.demo_rows import REFERENCE
from kvhal.formats import V41_FORMAT
from kvhal.interface import Op
from kvhal.testing import parity
from kvhal.testing.conformance import Target, targets

#: what simulators run: they compile for seconds an operation
SIMULATED_OPS = (Op.STORE, Op.LOAD)


def parity_targets(backend: str | None) -> list[Target]:
    """The reference and every backend that can run here, or the one that is named."""
    return [target for target in targets() if backend is None or target.backend in (REFERENCE, backend)]


def run_parity(where: list[Target]) -> Iterator[parity.Result]:
    """A case of each operation on each target."""
    for case in parity.choose(Op, [V41_FORMAT], count=1):
        yield from parity.run([case], [one for one in where if not one.simulate or case.op in SIMULATED_OPS])


def parity_lines(results: list[parity.Result]) -> list[str]:
    """What ran, whether all targets of a case left the same bytes, and every difference."""
    count = Counter(result.target.id for result in results)
    if len(count) < 2:
        return [f"Parity: no other backend than {REFERENCE} can run here; `kvhal doctor` says why"]
    wrong = [result for result in results if result.problem]
    bytes_are = "DIFFERENT bytes" if wrong else "the same bytes"
    ran = ", ".join(f"{target} ({number} operations)" for target, number in count.items())
    return [
        f"Parity: {bytes_are} from {ran}",
        *(f"  {result.case.id} on {result.target.id}: {result.problem}" for result in wrong),
    ]
