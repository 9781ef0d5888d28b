"""Tests for backends, built in or not: guarded buffers, deterministic cases, bitwise comparison, the conformance suite."""

from kvhal.testing.buffers import Buffer, allocate, poison
from kvhal.testing.case import Call, Case
from kvhal.testing.compare import Difference, Mismatch, differ
from kvhal.testing.conformance import (
    ConformanceError,
    Outcome,
    Target,
    cases,
    run_case,
    run_reference,
    supported_cases,
    targets,
    why_not,
)
from kvhal.testing.formats import CONFORMANCE_FORMATS, ODD_FORMATS, USER_FORMATS
from kvhal.testing.maker import Maker

__all__ = [
    "CONFORMANCE_FORMATS",
    "ODD_FORMATS",
    "USER_FORMATS",
    "Buffer",
    "Call",
    "Case",
    "ConformanceError",
    "Difference",
    "Maker",
    "Mismatch",
    "Outcome",
    "Target",
    "allocate",
    "cases",
    "differ",
    "poison",
    "run_case",
    "run_reference",
    "supported_cases",
    "targets",
    "why_not",
]
