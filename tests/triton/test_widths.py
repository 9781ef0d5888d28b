"""No kernel stores wider than its format's addresses allow: hardware traps where the interpreter sees nothing."""

from __future__ import annotations

import math

from kvhal.layout import cache_geometry
from kvhal.testing.formats import CONFORMANCE_FORMATS
from tests.triton.widths import widest_stores


def test_stores_are_no_wider_than_records_are_aligned() -> None:
    for name, widths in widest_stores(list(CONFORMANCE_FORMATS)).items():
        geometry = cache_geometry(CONFORMANCE_FORMATS[name], 64)
        scales = geometry.sf_token_stride if geometry.layout.sf_bytes else 0
        allowed = max(geometry.token_alignment, math.gcd(32, geometry.sf_offset, scales) if scales else 1)
        assert set(widths) == {"store_kv_cache", "fused_norm_rope_hadamard_cast_store_kvcache"}
        assert max(widths.values()) <= allowed, (name, widths, allowed)
