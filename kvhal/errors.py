"""The exceptions, and the one formatter that turns a Decision into text."""

from __future__ import annotations

from kvhal.interface import Decision, Reason, Verdict


class KVHalError(Exception):
    """Base of all errors that are kvhal's own; argument errors are plain ValueError or TypeError."""


class ConfigError(KVHalError, ValueError):
    """A configuration file, variable or call has an unknown key, name or value."""


class InvalidMetadata(KVHalError, ValueError):
    """Strict mode found an index tensor whose values are out of range; names the first bad index."""


class CaptureError(KVHalError, RuntimeError):
    """A kernel would have to be compiled while a graph is being captured; call `kvhal.warmup` before."""


class BackendFailure(KVHalError):
    """A backend found while building a kernel that it cannot serve; carries the Reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return describe_reason(self.reason)


class UnsupportedError(KVHalError, RuntimeError):
    """No backend serves the request; carries the Decision with every candidate's reasons."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision)  # the arguments are what pickling gives back to __init__
        self.decision = decision

    def __str__(self) -> str:
        return describe(self.decision)


class ForcedBackendError(UnsupportedError):
    """The forced backend cannot serve the request; kvhal never falls back from a forced choice."""


def refusal(decision: Decision) -> UnsupportedError:
    """The error of a decision that chose nothing."""
    return ForcedBackendError(decision) if decision.forced_by else UnsupportedError(decision)


def describe(decision: Decision) -> str:
    """A decision as text: the question, the answer, and one line a reason."""
    request = decision.request
    layout = f" of {request.layout}" if request.layout else ""
    where = f"{request.platform.kind} ({request.platform.arch})"
    forced = f", forced by {decision.forced_by}" if decision.forced_by else ""
    if decision.chosen:
        simulated = " (simulated)" if decision.simulated else ""
        head = f"{request.op}{layout} on {where}: {decision.chosen}{simulated}{forced}"
    else:
        head = f"{request.op}{layout} on {where}: no backend can serve it{forced}"
    return "\n".join([head, *(line for verdict in decision.trace for line in _describe_verdict(verdict, decision.chosen))])


def _describe_verdict(verdict: Verdict, chosen: str | None) -> list[str]:
    if verdict.supported:
        simulated = " (simulated)" if verdict.simulated else ""
        return [f"  {verdict.backend}: {'chosen' if verdict.backend == chosen else 'could serve'}{simulated}"]
    return [f"  {verdict.backend}: {describe_reason(reason)}" for reason in verdict.reasons]


def describe_reason(reason: Reason) -> str:
    """One reason as a sentence."""
    return f"{reason.what}: has {reason.have}, needs {reason.need}" + (f" ({reason.hint})" if reason.hint else "")
