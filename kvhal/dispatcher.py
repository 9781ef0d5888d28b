"""Which backend serves a request: a pure function of frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvhal.interface import Backend, Decision, Op, Reason, Request, Verdict

#: order of preference by platform kind; backends that are not named come last
PREFERENCE: dict[str, tuple[str, ...]] = {
    "cuda": ("cuda_tilelang", "portable_triton", "reference_torch"),
    "rocm": ("portable_triton", "reference_torch"),
    "npu": ("ascend_tilelang", "reference_torch"),
    "cpu": ("reference_torch", "portable_triton", "ascend_tilelang"),
}
DEFAULT_PREFERENCE = ("portable_triton", "reference_torch")


@dataclass(frozen=True)
class Policy:
    """What configuration asks for.

    Attributes:
        forced: (operation, backend, who forced it), at most one entry an operation.
        preference: the only backends to consider, in this order; None for the platform's own order.
        strict: check metadata values before every launch.
        simulate: functional simulators may serve CPU tensors.
    """

    forced: tuple[tuple[Op, str, str], ...] = ()
    preference: tuple[str, ...] | None = None
    strict: bool = False
    simulate: bool = False

    def forced_for(self, op: Op) -> tuple[str, str] | None:
        """(backend, who forced it) for an operation, None when it is free."""
        return next(((name, source) for forced_op, name, source in self.forced if forced_op == op), None)


def resolve(request: Request, policy: Policy, backends: Mapping[str, Backend]) -> Decision:
    """The decision for a request under a policy.

    Args:
        request: the question; its platform's `simulate` is overruled by the policy's.
        policy: the configuration.
        backends: name -> manifest, from `registry.backends()`.

    Returns:
        A Decision with one verdict a backend, in order of preference. `chosen` is None when the forced backend, or every
        considered one, has reasons against it.
    """
    request = replace(request, platform=request.platform.with_simulation(policy.simulate))
    order = _order(request, policy, backends)
    trace = tuple(_verdict(backends[name], request, policy) for name in order)
    forced = policy.forced_for(request.op)
    if forced:
        name, source = forced
        trace = tuple(verdict for verdict in trace if verdict.backend == name)
        return Decision(request, name if trace and trace[0].supported else None, trace, forced_by=source)
    chosen = next((verdict.backend for verdict in trace if verdict.supported), None)
    return Decision(request, chosen, trace)


def _order(request: Request, policy: Policy, backends: Mapping[str, Backend]) -> list[str]:
    wanted = policy.preference or PREFERENCE.get(request.platform.kind, DEFAULT_PREFERENCE)
    first = [name for name in wanted if name in backends]
    return first + [name for name in backends if name not in first]


def _verdict(backend: Backend, request: Request, policy: Policy) -> Verdict:
    reasons = backend.why_not(request)
    if policy.preference and backend.name not in policy.preference and not policy.forced_for(request.op):
        reasons += (
            Reason(
                "preference", f"only {', '.join(policy.preference)}", f"{backend.name} in it", "add it to [backends] preference"
            ),
        )
    return Verdict(backend.name, reasons, simulated=backend.simulates(request))
