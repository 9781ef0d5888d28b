"""The launch shapes of portable_triton. Tuning an architecture means editing this file only. Imports no kernel language.

store, fused, load, slots  (elements a program, tokens at least, warps): as many tokens as have so many elements, with padding;
                           a larger record gets a program of its own, with as many times the warps
store_pairs, fused_pairs   the same of kernels that quantise two elements a register: eight lanes a row (see packed)
raw                        (bytes of data a program, tokens at least, warps), likewise
others                     (table entries a program, warps)
All are powers of two.
"""

from __future__ import annotations

from kvhal.tuning import Choice, Figure, Shape, Table

MAX_WARPS = 8  #: of a program, however large its record


def explored(shape: Shape, op: str, layout: str, tokens: int, share: float, against: int, **row: object) -> Choice:
    """Chosen from tokens and warps a program that were timed for one format."""
    row = {"op": op, "format": layout, "tokens_a_program": tokens, "warps": shape[-1], "order": "pages", "narrow": None, **row}
    return Choice(shape, Figure("h200_portable_triton_shapes.json", row, share, against))


def measured(shape: Shape, op: str, layout: str, share: float) -> Choice:
    """No other shape's figure was kept: what `kvhal bench` found for this one."""
    row = {"backend": "portable_triton", "op": op, "format": layout, "tokens": 524288}
    row |= {} if layout == "-" else {"pattern": "pages"}
    return Choice(shape, Figure("h200_bench.json", row, share))


FUSED = "fused_norm_rope_hadamard_cast_store_kvcache"

TABLE = Table(
    tuned={
        "sm_90": {
            ("store", "e4m3"): explored((1024, 1, 1), "store", "V41_FORMAT", 2, 0.9554, 4),
            ("store", "e2m1"): explored((1024, 1, 1), "store", "V41_FP4_FORMAT", 2, 0.7717, 4),
            ("store", None): measured((1024, 1, 1), "store_kv_cache", "BF16_FORMAT", 0.8532),
            ("fused", "e4m3"): explored((1024, 1, 1), "fused", "V41_FORMAT", 2, 0.6456, 5, narrow=True),
            ("fused", "e2m1"): measured((1024, 1, 1), FUSED, "V41_FP4_FORMAT", 0.5640),
            ("fused", None): measured((1024, 1, 1), FUSED, "BF16_FORMAT", 0.8644),
            ("load", "e4m3"): explored((2048, 1, 1), "load", "V41_FORMAT", 4, 0.9004, 4),
            ("load", "e2m1"): explored((2048, 1, 1), "load", "V41_FP4_FORMAT", 4, 0.8706, 4),
            ("load", None): explored((2048, 1, 1), "load", "BF16_FORMAT", 4, 0.9630, 3),
            ("slots", "e4m3"): measured((2048, 1, 1), "load_kv_slots", "V41_FORMAT", 0.8142),
            ("slots", "e2m1"): measured((2048, 1, 1), "load_kv_slots", "V41_FP4_FORMAT", 0.7911),
            ("slots", None): measured((2048, 1, 1), "load_kv_slots", "BF16_FORMAT", 0.8681),
            ("raw", "e4m3"): explored((4096, 1, 2), "load", "MXFP8_INDEX_KV_FORMAT", 32, 0.7661, 4),
            # the exploration preceded today's kernel, and had this shape behind another one
            ("raw", "e2m1"): measured((4096, 1, 2), "load_paged_kv_cache", "FP4_INDEX_KV_FORMAT", 0.7927),
            ("convert", None): measured((1024, 4), "convert_kv_index", "-", 0.1638),
            ("cat", None): measured((1024, 4), "kv_index_cat", "-", 0.2666),
        },
    },
    # At most 32 elements a lane where kernels quantise and 64 where they dequantise: they compile for every target of
    # tests/triton/aot.py without spilling on any that NVIDIA made.
    defaults={
        **{(kernel, dtype): (1024, 1, 1) for kernel in ("store", "fused") for dtype in ("e4m3", "e2m1", None)},
        **{(kernel, dtype): (2048, 1, 1) for kernel in ("load", "slots") for dtype in ("e4m3", "e2m1", None)},
        # eight lanes a row, so four rows a warp
        **{(kernel, dtype): (1024, 4, 1) for kernel in ("store_pairs", "fused_pairs") for dtype in ("e4m3", "e2m1")},
        **{("raw", dtype): (4096, 1, 2) for dtype in ("e4m3", "e2m1")},
        **{(kernel, None): (1024, 4) for kernel in ("convert", "cat", "expand", "window")},
        ("plan", None): (256, 4),
    },
    command="python benchmarks/gpu_triton.py OUT.json --variants",
)
shape_of = TABLE.shape_of
