"""Reasons that every backend has alike: what the specification does not define."""

from __future__ import annotations

from kvhal.formats import SPECIFIED_CODECS, KVCacheFormat
from kvhal.interface import Reason, Request


def codec_reasons(layout: KVCacheFormat | None) -> tuple[Reason, ...]:
    """A pair of data and scale that has no defined numbers; nothing against None or bf16 records."""
    if layout is None or layout.quantized_dtype is None or (layout.quantized_dtype, layout.sf_format) in SPECIFIED_CODECS:
        return ()
    known = ", ".join(sorted(f"{data} with {scale}" for data, scale in SPECIFIED_CODECS))
    have = f"{layout.quantized_dtype} data with {layout.sf_format} scales"
    return (Reason("codec", have, f"one of {known}", "docs/numerics.md defines no other pair"),)


def hadamard_reasons(request: Request) -> tuple[Reason, ...]:
    """A Hadamard stage on a record whose element count is no power of two."""
    elements = request.layout.elements if request.layout else 0
    if "hadamard" not in request.stages or elements & (elements - 1) == 0:
        return ()
    return (Reason("hadamard", f"{elements} elements", "a power of two"),)
