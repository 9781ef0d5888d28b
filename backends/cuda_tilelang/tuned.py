"""The launch shapes of cuda_tilelang. Tuning an architecture means editing this file only. Imports no kernel language.

load, slots         (rounds of tokens that a warp reads before it uses the first, warps of a thread block)
store, store_index  (the same two, tokens up to which a warp takes one round only, thread blocks that a multiprocessor must
                    hold), of main and of index layouts
load_bulk           (tokens that a thread block copies, its threads, tokens up to which `load` is sooner)
raw                 (rows of an index layout that a thread block copies, its threads)
fused, fused_index  (warps of a thread block, tokens that a lane takes one after another where they more than fill the device,
                    thread blocks that a multiprocessor must hold, octets of a token that a lane holds, tokens up to which few
                    are taken otherwise), of main and of index layouts
chunk, chunk_index  the same for a prefill chunk, in the end the tokens up to which it is sooner than the other; where a lane
                    takes one token only, none waits in registers, and 64 a thread do for as many as fill a multiprocessor:
                    V41_FORMAT took 5.14 us at 8,192 tokens so, and 5.89 with half as many at a time, one after another
                    (fused.one_token_kernel; with one octet a lane as well it is the kernel of few tokens, fused.FEW)
convert, cat,       (threads of a thread block, entries that each takes, thread blocks up to which each takes one only)
expand, window
plan                (threads of a thread block,), one a segment
"""

from __future__ import annotations

from kvhal.tuning import Choice, Figure, Shape, Table


def explored(shape: Shape, kernel: str, layout: str, share: float, against: int) -> Choice:
    """Among the launch shapes that were timed one launch at a time, with the load hint that kernels have since."""
    row = {"kernel": kernel, "format": layout, "order": "pages", "shape": list(shape), "load_hint": "L2::256B"}
    return Choice(shape, Figure("h200_cuda_tilelang.json", row, share, against))


def streamed(shape: Shape, kernel: str, layout: str, share: float, against: int, more: Shape = ()) -> Choice:
    """Among the launch shapes that were timed in a stream; `more` are numbers of the shape that the file does not have."""
    row = {"kernel": kernel, "format": layout, "shape": list(shape)}
    return Choice(shape + more, Figure("h200_cuda_tilelang_shapes.json", row, share, against))


def measured(shape: Shape, op: str, layout: str, share: float, tokens: int = 524288) -> Choice:
    """No other shape's figure was kept: what `kvhal bench` found for this one."""
    row = {"backend": "cuda_tilelang", "op": op, "format": layout, "tokens": tokens}
    row |= {} if layout == "-" else {"pattern": "pages"}
    return Choice(shape, Figure("h200_bench.json", row, share))


FUSED = "fused_norm_rope_hadamard_cast_store_kvcache"
#: rounds and warps where tokens are too few to fill the device, and on an architecture that was not measured
ONE_ROUND = (1, 4)
#: V41_FP4_FORMAT's store took 4.13 us at 8,192 tokens so and 7.09 at 16,384, with four rounds 5.13 and 6.57
FEW = 8192
#: V41_FP4_FORMAT's fused store took 2.24 us at 1,536 tokens and 2.89 at 2,048 so, as chunks 2.48 and 2.70;
#: FP4_INDEX_KV_FORMAT's 2.61 at 6,144 and 3.41 at 8,192, as chunks 2.96 and 3.12
FEW_FUSED, FEW_FUSED_INDEX = 1536, 6144
ONE_WAVE = 8448  #: tokens, two a warp of eight in four thread blocks a multiprocessor
NO_CHUNK = 0  #: the kernel for many tokens takes what are not few
FEW_TABLE = 1056  #: kv_index_cat took 0.83 us for 8,192 entries so and 1.42 with four a thread, for 8 million 79.8 and 24.5
#: V41_FORMAT's load took 7.36 us at 16,384 tokens by bulk copies, 7.79 without, and at 8,192 4.38 and 4.31
FEW_LOAD = 8192
#: of layouts, and their data types
KINDS = (("", "e4m3"), ("", "e2m1"), ("", None), ("_index", "e4m3"), ("_index", "e2m1"))
TUNED_ROUNDS = 2  #: octets of a lane in the records that this was measured with

TABLE = Table(
    tuned={
        "sm_90": {
            ("store", "e4m3"): measured((1, 4, 0, 1), "store_kv_cache", "V41_FORMAT", 0.9834),
            ("store", "e2m1"): streamed((4, 2), "store", "V41_FP4_FORMAT", 0.9534, 5, more=(FEW, 16)),
            ("store_index", "e4m3"): measured((1, 4, 0, 1), "store_kv_cache", "MXFP8_INDEX_KV_FORMAT", 0.9806),
            ("store_index", "e2m1"): measured((2, 2, FEW, 1), "store_kv_cache", "FP4_INDEX_KV_FORMAT", 0.9828),
            ("store", None): measured((2, 2, 0, 1), "store_kv_cache", "BF16_FORMAT", 0.9498),
            ("load", "e4m3"): explored((2, 2), "load", "V41_FORMAT", 0.9221, 2),
            ("load", "e2m1"): explored((2, 4), "load", "V41_FP4_FORMAT", 0.9164, 2),
            ("load", None): measured((1, 4), "load_paged_kv_cache", "BF16_FORMAT", 0.9792),
            ("load_bulk", "e4m3"): measured((8, 128, FEW_LOAD), "load_paged_kv_cache", "V41_FORMAT", 0.9433),
            ("load_bulk", "e2m1"): measured((8, 128, FEW_LOAD), "load_paged_kv_cache", "V41_FP4_FORMAT", 0.9324),
            ("slots", "e4m3"): measured((1, 4), "load_kv_slots", "V41_FORMAT", 0.9384),
            ("slots", "e2m1"): measured((1, 4), "load_kv_slots", "V41_FP4_FORMAT", 0.9270),
            ("slots", None): measured((1, 4), "load_kv_slots", "BF16_FORMAT", 0.9788),
            ("raw", "e4m3"): streamed((64, 128), "load", "MXFP8_INDEX_KV_FORMAT", 0.9025, 2),
            ("raw", "e2m1"): streamed((64, 128), "load", "FP4_INDEX_KV_FORMAT", 0.8586, 2),
            ("fused", "e4m3"): measured((4, 16, 5, 4, FEW_FUSED), FUSED, "V41_FORMAT", 0.9680),
            ("fused", "e2m1"): measured((4, 16, 5, 4, FEW_FUSED), FUSED, "V41_FP4_FORMAT", 0.9276),
            ("fused", None): measured((4, 8, 8, 2, FEW_FUSED), FUSED, "BF16_FORMAT", 0.9610),
            ("fused_index", "e4m3"): measured((8, 8, 4, 2, FEW_FUSED_INDEX), FUSED, "MXFP8_INDEX_KV_FORMAT", 0.9356),
            ("fused_index", "e2m1"): measured((4, 16, 5, 4, FEW_FUSED_INDEX), FUSED, "FP4_INDEX_KV_FORMAT", 0.9150),
            ("chunk", "e4m3"): measured((8, 1, 4, 4, ONE_WAVE), FUSED, "V41_FORMAT", 0.6842, 8192),
            ("chunk", "e2m1"): measured((8, 1, 4, 4, ONE_WAVE), FUSED, "V41_FP4_FORMAT", 0.5696, 8192),
            ("chunk", None): measured((8, 1, 4, 4, ONE_WAVE), FUSED, "BF16_FORMAT", 0.7575, 8192),
            ("chunk_index", "e4m3"): measured((8, 8, 4, 2, NO_CHUNK), FUSED, "MXFP8_INDEX_KV_FORMAT", 0.3878, 8192),
            ("chunk_index", "e2m1"): measured((8, 8, 4, 2, 32768), FUSED, "FP4_INDEX_KV_FORMAT", 0.3481, 8192),
            ("convert", None): measured((128, 4, FEW_TABLE), "convert_kv_index", "-", 0.1981),
            ("cat", None): measured((128, 4, FEW_TABLE), "kv_index_cat", "-", 0.2763),
            ("expand", None): measured((128, 4, FEW_TABLE), "expand_swa_index", "-", 0.2229),
            ("window", None): measured((128, 4, FEW_TABLE), "get_kv_swa_index_decode", "-", 0.1949),
        },
    },
    # One round of a token a lane, four warps: fewer registers than any shape above, and few threads.
    defaults={
        **{("store", dtype): (*ONE_ROUND, 0, 1) for dtype in ("e4m3", "e2m1", None)},
        **{("store_index", dtype): (*ONE_ROUND, 0, 1) for dtype in ("e4m3", "e2m1")},
        **{(kernel, dtype): ONE_ROUND for kernel in ("load", "slots") for dtype in ("e4m3", "e2m1", None)},
        **{("load_bulk", dtype): (8, 128, FEW_LOAD) for dtype in ("e4m3", "e2m1")},
        **{("raw", dtype): (32, 128) for dtype in ("e4m3", "e2m1")},
        **{(f"fused{kind}", dtype): (4, 8, 4, 2, FEW_FUSED) for kind, dtype in KINDS},
        **{(f"chunk{kind}", dtype): (4, 8, 4, 2, NO_CHUNK) for kind, dtype in KINDS},
        **{(kernel, None): (128, 4, FEW_TABLE) for kernel in ("convert", "cat", "expand", "window")},
        ("plan", None): (128,),
    },
    command="python benchmarks/gpu_tilelang.py OUT.json --variants",
)
shape_of = TABLE.shape_of
