"""The launch shapes of cuda_tilelang. Tuning an architecture means editing this file only. Imports no kernel language.

store, load, slots  (rounds of tokens that a warp reads before it uses the first, warps of a thread block)
raw                 (rows of an index layout that a thread block copies, its threads)
fused               (warps of a thread block, thread blocks at most, thread blocks that a multiprocessor must hold)
others              (threads of a thread block,), one a table entry
"""

from __future__ import annotations

from kvhal.tuning import Choice, Figure, Shape, Table


def explored(shape: Shape, kernel: str, layout: str, share: float, against: int) -> Choice:
    """Among the launch shapes that were timed one launch at a time, with the load hint that kernels have since."""
    row = {"kernel": kernel, "format": layout, "order": "pages", "shape": list(shape), "load_hint": "L2::256B"}
    return Choice(shape, Figure("h200_cuda_tilelang.json", row, share, against))


def measured(shape: Shape, op: str, layout: str, share: float) -> Choice:
    """No other shape's figure was kept: what `kvhal bench` found for this one."""
    row = {"backend": "cuda_tilelang", "op": op, "format": layout, "tokens": 524288}
    row |= {} if layout == "-" else {"pattern": "pages"}
    return Choice(shape, Figure("h200_bench.json", row, share))


FUSED = "fused_norm_rope_hadamard_cast_store_kvcache"

TABLE = Table(
    tuned={
        "sm_90": {
            ("store", "e4m3"): explored((2, 2), "store", "V41_FORMAT", 0.9342, 0),
            ("store", "e2m1"): explored((4, 2), "store", "V41_FP4_FORMAT", 0.9089, 0),
            ("store", None): measured((2, 2), "store_kv_cache", "BF16_FORMAT", 0.8524),
            ("load", "e4m3"): explored((2, 2), "load", "V41_FORMAT", 0.9221, 2),
            ("load", "e2m1"): explored((2, 4), "load", "V41_FP4_FORMAT", 0.9164, 2),
            ("load", None): measured((1, 4), "load_paged_kv_cache", "BF16_FORMAT", 0.8726),
            ("slots", "e4m3"): measured((1, 4), "load_kv_slots", "V41_FORMAT", 0.8431),
            ("slots", "e2m1"): measured((1, 4), "load_kv_slots", "V41_FP4_FORMAT", 0.8296),
            ("slots", None): measured((1, 4), "load_kv_slots", "BF16_FORMAT", 0.8715),
            ("raw", "e4m3"): measured((64, 128), "load_paged_kv_cache", "MXFP8_INDEX_KV_FORMAT", 0.7955),
            ("raw", "e2m1"): measured((64, 128), "load_paged_kv_cache", "FP4_INDEX_KV_FORMAT", 0.8487),
            # the file's shapes have no third number, as only one token was on its way then; 792 thread blocks are what the
            # 132 multiprocessors of an H200 hold at a time
            ("fused", "e4m3"): Choice(
                (4, 1056, 8),
                Figure(
                    "h200_cuda_tilelang.json",
                    {"kernel": "fused", "format": "V41_FORMAT", "shape": [4, 792], "load_hint": "", "max_registers": None},
                    0.8552,
                    6,
                ),
            ),
            ("fused", "e2m1"): measured((4, 1056, 8), FUSED, "V41_FP4_FORMAT", 0.6374),
            ("fused", None): measured((4, 1056, 8), FUSED, "BF16_FORMAT", 0.8082),
            ("convert", None): measured((128,), "convert_kv_index", "-", 0.1770),
            ("cat", None): measured((128,), "kv_index_cat", "-", 0.1666),
        },
    },
    # One round of a token a lane, four warps: fewer registers than any shape above, and few threads.
    defaults={
        **{(kernel, dtype): (1, 4) for kernel in ("store", "load", "slots") for dtype in ("e4m3", "e2m1", None)},
        **{("raw", dtype): (32, 128) for dtype in ("e4m3", "e2m1")},
        **{("fused", dtype): (4, 1056, 4) for dtype in ("e4m3", "e2m1", None)},
        **{(kernel, None): (128,) for kernel in ("convert", "cat", "expand", "window", "plan")},
    },
    command="python benchmarks/gpu_tilelang.py OUT.json --variants",
)
shape_of = TABLE.shape_of
