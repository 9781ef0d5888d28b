"""Host time of the public functions: kvhal's own share of an eager call, and of a call through torch.ops.kvhal.

A backend whose launchers do nothing is registered as any third-party one; what remains of a call is kvhal. The launcher that a
call ends in is timed too: `own` is what kvhal adds to it. Times are the least of many rounds, as a busy machine only adds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import kvhal
from kvhal import binding, config, registry
from kvhal.interface import Backend, Launcher, Op, Request
from kvhal.layout import geometry_of

LAYOUT = kvhal.V41_FORMAT
TOKENS, BLOCK_SIZE, BLOCKS = 64, 64, 4


def check(request: Request) -> tuple[()]:
    """It serves everything."""
    return ()


def bind(request: Request) -> Launcher:
    """A launcher that takes what the operation's takes and does nothing."""
    if request.op in (Op.LOAD, Op.CONVERT_INDEX, Op.INDEX_CAT, Op.EXPAND_LOAD_PLAN):
        return (lambda a, b, c, d, e: None) if request.op == Op.LOAD else (lambda a, b, c, d: None)
    if request.op == Op.FUSED_STORE:
        return lambda a, b, c, d, e, f, g: None
    return (lambda a, b: None) if request.op == Op.EXPAND_SWA_INDEX else (lambda a, b, c: None)


BACKEND = Backend("null", "nothing: it measures the host", check, dict.fromkeys(Op, "bench_host:bind"))


class Call(NamedTuple):
    """A public call, the same through torch.ops.kvhal, and its bound launcher with the arguments that it gets."""

    name: str
    public: Callable[[], object]
    library: Callable[[], object]
    launch: Callable[[], object]


def register() -> tempfile.TemporaryDirectory[str]:
    """Makes this module's backend known through an entry point; it is until the folder is cleaned up."""
    folder = tempfile.TemporaryDirectory()
    metadata = Path(folder.name) / "null-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: null\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{registry.ENTRY_POINT_GROUP}]\nnull = bench_host:BACKEND\n")
    sys.path[:0] = [folder.name, str(Path(__file__).resolve().parent)]
    importlib.invalidate_caches()
    registry.reload()
    return folder


def launcher(op: Op, layout: kvhal.KVCacheFormat | None, *arguments: Any) -> Callable[[], object]:
    """The bound launcher of an operation with its arguments."""
    block_size = BLOCK_SIZE if layout else None
    bound = binding.launcher(config.current(), op, layout, block_size, arguments[0].device)
    return lambda: bound(*arguments)


def record_calls(device: str = "cpu", tokens: int = TOKENS) -> list[Call]:
    """One of each operation on records, outputs given, as an engine calls them; the loads without outputs too."""
    text, ops = kvhal.formats.format_to_text(LAYOUT), torch.ops.kvhal
    cache = kvhal.alloc_kv_cache(BLOCKS, BLOCK_SIZE, LAYOUT, device).zero_()
    kv = torch.zeros((tokens, LAYOUT.elements), dtype=torch.bfloat16, device=device)
    slots, out = torch.arange(tokens, device=device), torch.zeros_like(kv)
    segments = torch.tensor([[0, 0, tokens, 0]], dtype=torch.int32, device=device)
    norm, table = kvhal.NormArgs(torch.ones(512, device=device)), torch.ones((tokens, 64), device=device)
    rope = kvhal.RopeArgs(slots.clone(), table, 64, offset=448)
    cast, to = kvhal.CastArgs.for_layout(LAYOUT), kvhal.KVCacheOutArgs(cache, slots, LAYOUT)
    fused = (kv, norm.weight, norm.eps, slots, rope.cos_sin_cache, [64, 0, 448], False, "e4m3", 32, True, "ue8m0")
    return [
        Call(
            "store_kv_cache",
            lambda: kvhal.store_kv_cache(kv, cache, slots, layout=LAYOUT),
            lambda: ops.store_kv_cache(kv, cache, slots, text),
            launcher(Op.STORE, LAYOUT, kv, cache, slots),
        ),
        Call(
            "load_paged_kv_cache",
            lambda: kvhal.load_paged_kv_cache(cache, segments, tokens, out, layout=LAYOUT),
            lambda: ops.load_paged_kv_cache(cache, segments, tokens, out, None, text),
            launcher(Op.LOAD, LAYOUT, cache, segments, tokens, out, None),
        ),
        Call(
            "load_paged_kv_cache, new",
            lambda: kvhal.load_paged_kv_cache(cache, segments, tokens, layout=LAYOUT),
            lambda: ops.load_paged_kv_cache(cache, segments, tokens, torch.empty_like(out), None, text),
            launcher(Op.LOAD, LAYOUT, cache, segments, tokens, out, None),
        ),
        Call(
            "load_kv_slots",
            lambda: kvhal.load_kv_slots(cache, slots, out, layout=LAYOUT),
            lambda: ops.load_kv_slots(cache, slots, out, text),
            launcher(Op.LOAD_SLOTS, LAYOUT, cache, slots, out),
        ),
        Call(
            "load_kv_slots, new",
            lambda: kvhal.load_kv_slots(cache, slots, layout=LAYOUT),
            lambda: ops.load_kv_slots(cache, slots, torch.empty_like(out), text),
            launcher(Op.LOAD_SLOTS, LAYOUT, cache, slots, out),
        ),
        Call(
            "fused_..._store_kvcache",
            lambda: kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
                kv, norm_args=norm, rope_args=rope, cast_args=cast, out_args=to
            ),
            lambda: ops.fused_norm_rope_hadamard_cast_store_kvcache(*fused, cache, slots, text, None),
            launcher(Op.FUSED_STORE, LAYOUT, kv, norm, rope, None, cache, slots, None),
        ),
    ]


def index_calls(device: str = "cpu") -> list[Call]:
    """One of each operation on indices, outputs given."""
    ops, zeros = torch.ops.kvhal, partial(torch.zeros, dtype=torch.int32, device=device)
    topk, table, wide, wider = zeros((2, 1, 8)), zeros((2, BLOCKS)), zeros((2, 8)), zeros((2, 12))
    lens, four, two, spans = (zeros((2, n)) for n in (1, 4, 2, 5))
    return [
        Call(
            "convert_kv_index",
            lambda: kvhal.convert_kv_index(topk, table, lens, BLOCK_SIZE),
            lambda: ops.convert_kv_index(topk, table, lens, BLOCK_SIZE),
            launcher(Op.CONVERT_INDEX, None, topk, table, lens, BLOCK_SIZE),
        ),
        Call(
            "kv_index_cat",
            lambda: kvhal.kv_index_cat(wide, four, 3, 4, wider),
            lambda: ops.kv_index_cat(wide, four, 3, 4, wider),
            launcher(Op.INDEX_CAT, None, wide, four, 7, wider),
        ),
        Call(
            "expand_swa_index",
            lambda: kvhal.expand_swa_index(four, 8, wide),
            lambda: ops.expand_swa_index(four, wide),
            launcher(Op.EXPAND_SWA_INDEX, None, four, wide),
        ),
        Call(
            "get_kv_swa_index_decode",
            lambda: kvhal.get_kv_swa_index_decode(two, 8, 16, wide),
            lambda: ops.get_kv_swa_index_decode(two, 16, wide),
            launcher(Op.DECODE_SWA_INDEX, None, two, 16, wide),
        ),
        Call(
            "expand_load_plan",
            lambda: kvhal.expand_load_plan(spans, table, BLOCK_SIZE, 2, four),
            lambda: ops.expand_load_plan(spans, table, BLOCK_SIZE, four),
            launcher(Op.EXPAND_LOAD_PLAN, None, spans, table, BLOCK_SIZE, four),
        ),
    ]


def microseconds(call: Callable[[], Any], rounds: int, number: int = 200) -> float:
    """The least time of one call over many rounds."""
    timer = timeit.Timer(call)
    timer.timeit(number)
    return min(timer.repeat(rounds, number)) / number * 1e6


def measure(rounds: int) -> list[dict[str, Any]]:
    """Microseconds of every operation: the public function, kvhal's own share of it, the same through torch.ops."""
    found = []
    with register(), kvhal.use_backend("null"):
        for call in (*record_calls(), *index_calls()):
            public, library, launch = (microseconds(part, rounds) for part in call[1:])
            found.append({"op": call.name, "public": public, "own": public - launch, "torch.ops": library})
        geometry = kvhal.alloc_kv_cache(BLOCKS, BLOCK_SIZE, LAYOUT, "cpu")
        for name, part in (("(configuration)", config.current), ("(geometry)", lambda: geometry_of(geometry, LAYOUT))):
            found.append({"op": name, "public": None, "own": microseconds(part, rounds), "torch.ops": None})
    return found


def main() -> None:
    """Prints a line an operation, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON on stdout, and nothing else")
    parser.add_argument("--rounds", type=int, default=50, help="rounds of 200 calls; the best one counts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(arguments.rounds)
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "microseconds": results}, indent=2))
        return
    print(f"{'microseconds a call':28}{'public':>10}{'kvhal alone':>14}{'torch.ops':>12}")
    for row in results:
        cells = ["-" if row[key] is None else f"{row[key]:.2f}" for key in ("public", "own", "torch.ops")]
        print(f"{row['op']:28}{cells[0]:>10}{cells[1]:>14}{cells[2]:>12}")


if __name__ == "__main__":
    main()
