"""The launch shapes of portable_triton. Tuning an architecture means editing this file only. Imports no kernel language.

store, fused, load, slots  (elements a program, tokens at least, warps): as many tokens as have so many elements, with padding;
                           a larger record gets a program of its own, with as many times the warps
store_pairs, fused_pairs   the same of kernels that quantise two elements a register: eight lanes a row (see packed)
raw                        (bytes of data a program, tokens at least, warps), likewise
*_few                      (elements a warp, tokens at most): calls of so few give each token a program of its own; 0: never
others                     (table entries a program, warps)
All are powers of two.
"""

from __future__ import annotations

from kvhal.tuning import Choice, Figure, Shape, Table

MAX_WARPS = 8  #: of a program, however large its record


def explored(shape: Shape, op: str, layout: str, share: float, against: int, timed: tuple[int, ...] = ()) -> Choice:
    """Chosen from tokens and warps a program that were timed; `timed` are those of the choice, none: as it was shipped then."""
    row = {"op": op, "format": layout, "tokens": 524288, "order": "pages", "block_size": 64, "packed": None}
    return Choice(shape, Figure("h200_portable_triton_shapes.json", row | {"shape": list(timed)}, share, against))


def measured(shape: Shape, op: str, layout: str, share: float) -> Choice:
    """No other shape's figure was kept: what `kvhal bench` found for this one."""
    row = {"backend": "portable_triton", "op": op, "format": layout, "tokens": 524288}
    row |= {} if layout == "-" else {"pattern": "pages"}
    return Choice(shape, Figure("h200_bench.json", row, share))


def few(shape: Shape, op: str, layout: str, share: float) -> Choice:
    """Chosen from elements a warp, and from the kernel for many tokens, at 256 tokens. A limit is the largest number of tokens
    at which no format of the data type loses a twentieth; index records, which are not all in the file, lose first."""
    row = {"backend": "portable_triton", "op": op, "format": layout, "tokens": 256, "shape": [shape[0], 1 << 30]}
    return Choice(shape, Figure("h200_few_tokens.json", row, share, 3))


STORE, LOAD, FUSED = "store_kv_cache", "load_paged_kv_cache", "fused_norm_rope_hadamard_cast_store_kvcache"
SLOTS = "load_kv_slots"

TABLE = Table(
    tuned={
        "sm_90": {
            ("store", None): explored((1024, 1, 1), STORE, "BF16_FORMAT", 0.9324, 0),
            ("store_pairs", "e4m3"): explored((1024, 4, 1), STORE, "V41_FORMAT", 0.9482, 8, (4, 1)),
            ("store_pairs", "e2m1"): explored((1024, 4, 1), STORE, "V41_FP4_FORMAT", 0.9450, 8, (4, 1)),
            ("fused", None): explored((1024, 1, 1), FUSED, "BF16_FORMAT", 0.9141, 0),
            ("fused_pairs", "e4m3"): explored((1024, 4, 1), FUSED, "V41_FORMAT", 0.8296, 0),
            ("fused_pairs", "e2m1"): explored((1024, 4, 1), FUSED, "V41_FP4_FORMAT", 0.7041, 0),
            ("load", "e4m3"): explored((2048, 1, 4), LOAD, "V41_FORMAT", 0.9127, 8, (4, 4)),
            ("load", "e2m1"): explored((2048, 1, 1), LOAD, "V41_FP4_FORMAT", 0.8694, 8, (4, 1)),
            ("load", None): explored((2048, 1, 1), LOAD, "BF16_FORMAT", 0.9520, 0),
            ("slots", "e4m3"): explored((2048, 1, 1), SLOTS, "V41_FORMAT", 0.8939, 0),
            ("slots", "e2m1"): explored((2048, 1, 1), SLOTS, "V41_FP4_FORMAT", 0.8713, 0),
            ("slots", None): explored((2048, 1, 1), SLOTS, "BF16_FORMAT", 0.9513, 0),
            ("store_few", "e4m3"): few((512, 256), STORE, "V41_FORMAT", 1.0361),
            ("store_few", "e2m1"): few((256, 1024), STORE, "V41_FP4_FORMAT", 1.0073),
            ("fused_few", "e4m3"): few((256, 2048), FUSED, "V41_FORMAT", 0.7704),
            ("fused_few", "e2m1"): few((256, 2048), FUSED, "V41_FP4_FORMAT", 0.7257),
            ("load_few", "e4m3"): few((256, 256), LOAD, "V41_FORMAT", 0.8964),
            ("load_few", "e2m1"): few((256, 1024), LOAD, "V41_FP4_FORMAT", 0.8966),
            ("load_few", None): few((256, 512), LOAD, "BF16_FORMAT", 0.9286),
            ("slots_few", "e4m3"): few((256, 512), SLOTS, "V41_FORMAT", 1.0110),
            ("slots_few", "e2m1"): few((256, 512), SLOTS, "V41_FP4_FORMAT", 1.0025),
            ("raw", "e4m3"): explored((4096, 1, 2), LOAD, "MXFP8_INDEX_KV_FORMAT", 0.8170, 7),
            ("raw", "e2m1"): explored((4096, 1, 2), LOAD, "FP4_INDEX_KV_FORMAT", 0.7099, 7),
            ("convert", None): measured((256, 4), "convert_kv_index", "-", 0.2526),
            ("cat", None): measured((256, 4), "kv_index_cat", "-", 0.3473),
        },
    },
    # At most 32 elements a lane where kernels quantise and 64 where they dequantise: they compile for every target of
    # tests/triton/aot.py without spilling on any that NVIDIA made.
    defaults={
        **{(kernel, dtype): (1024, 1, 1) for kernel in ("store", "fused") for dtype in ("e4m3", "e2m1", None)},
        **{(kernel, dtype): (2048, 1, 1) for kernel in ("load", "slots") for dtype in ("e4m3", "e2m1", None)},
        # eight lanes a row, so four rows a warp
        **{(kernel, dtype): (1024, 4, 1) for kernel in ("store_pairs", "fused_pairs") for dtype in ("e4m3", "e2m1")},
        **{("store_few", dtype): (256, most) for dtype, most in (("e4m3", 256), ("e2m1", 1024), (None, 0))},
        **{("fused_few", dtype): (256, 2048) for dtype in ("e4m3", "e2m1")},
        **{("slots_few", dtype): (256, 512) for dtype in ("e4m3", "e2m1")},
        ("fused_few", None): (512, 2048),
        ("slots_few", None): (512, 0),
        **{("load_few", dtype): (256, most) for dtype, most in (("e4m3", 256), ("e2m1", 1024), (None, 512))},
        **{("raw", dtype): (4096, 1, 2) for dtype in ("e4m3", "e2m1")},
        **{(kernel, None): (128, 4) for kernel in ("convert", "window")},
        **{(kernel, None): (1024, 4) for kernel in ("cat", "expand")},
        ("plan", None): (256, 4),
    },
    command="python benchmarks/gpu_triton.py OUT.json --variants",
)
shape_of = TABLE.shape_of
