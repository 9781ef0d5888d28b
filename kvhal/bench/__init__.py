"""Measuring the operations: what must move, how long it takes, and how that compares with a plain copy on the same device."""

from kvhal.bench.compare import Change, compare, regressions
from kvhal.bench.timing import Clock, Result, environment, measure
from kvhal.bench.work import PATTERNS, Work, make_work

__all__ = [
    "PATTERNS",
    "Change",
    "Clock",
    "Result",
    "Work",
    "compare",
    "environment",
    "make_work",
    "measure",
    "regressions",
]
