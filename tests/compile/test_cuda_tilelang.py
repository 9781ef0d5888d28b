"""cuda_tilelang without a GPU: every kernel and format becomes a cubin for sm_90a, and its code is what was meant."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvhal.formats import BUILTIN_FORMATS, V41_FORMAT, V41_FP4_FORMAT, KVCacheFormat
from kvhal.testing.formats import USER_FORMATS

pytest.importorskip("tilelang")
pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")

from kvhal.backends.cuda_tilelang import fused, index, load, plan, store  # noqa: E402
from tests.compile.cuda_sources import Compiled, compile_sources, source_of  # noqa: E402

FORMATS = {**BUILTIN_FORMATS, "MAIN_384": USER_FORMATS["MAIN_384"]}
PLAIN = fused.Stages("bfloat16", "bfloat16", fused.Rope(448, 64, False, "int64"), False, "int64", False, 16)
EVERYTHING = fused.Stages("float32", "float32", fused.Rope(32, 64, True, "int32"), True, "int32", True, 2)
BACK_ONLY = fused.Stages("bfloat16", None, None, False, None, True, 16)


def _stores() -> dict[str, tuple[Any, ...]]:
    found = {f"store_{name}": (store.store_kernel, layout, 64, "int64", 16) for name, layout in FORMATS.items()}
    return found | {"store_narrow": (store.store_kernel, V41_FORMAT, 133, "int32", 2)}


def _loads() -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for name, layout in FORMATS.items():
        factory = load.raw_kernel if layout.is_index else load.load_kernel
        found[f"load_{name}"] = (factory, layout, 64, 16)
    return found | {"load_narrow": (load.load_kernel, V41_FP4_FORMAT, 133, 2)}


def _slots_and_indices() -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {
        f"slots_{name}": (load.slots_kernel, layout, 64, "int64", 16) for name, layout in BUILTIN_FORMATS.items()
    }
    for factory in (index.convert_kernel, index.cat_kernel, index.expand_kernel, index.window_kernel):
        found[factory.__name__.removesuffix("_kernel")] = (factory,)
    return found | {"plan": (plan.plan_kernel, 4), "plan_narrow": (plan.plan_kernel, 1)}


def _fused() -> dict[str, tuple[Any, ...]]:
    stages = {
        "V41_FORMAT": PLAIN,
        "V41_FP4_FORMAT": PLAIN,
        "FP4_INDEX_KV_FORMAT": EVERYTHING,
        "FP8_FLOAT32_SF_INDEX_KV_FORMAT": EVERYTHING,
        "MXFP8_INDEX_KV_FORMAT": EVERYTHING,
        "BF16_FORMAT": BACK_ONLY,
    }
    return {f"fused_{name}": (fused.fused_kernel, BUILTIN_FORMATS[name], 3, on) for name, on in stages.items()}


GROUPS = {"stores": _stores, "loads": _loads, "slots and indices": _slots_and_indices, "fused": _fused}


def _compiled(group: str, folder: Path) -> tuple[dict[str, str], Compiled]:
    sources = {name: source_of(*key) for name, key in GROUPS[group]().items()}
    return sources, compile_sources(sources, folder)


@pytest.mark.parametrize("group", GROUPS)
def test_kernels_compile(group: str, tmp_path: Path) -> None:
    sources, compiled = _compiled(group, tmp_path)
    assert set(compiled.ptx) == set(sources)
    assert not re.findall(r"[1-9]\d* bytes (?:spill|stack frame)", compiled.report), compiled.report
    for name, ptx in compiled.ptx.items():
        waits = [match.start() for match in re.finditer(r"griddepcontrol\.wait", ptx)]
        reads = [match.start() for match in re.finditer(r"\b(?:ld|st)\.global", ptx)]
        assert len(waits) == 1 and waits[0] < min(reads), f"{name} touches memory before its inputs are there"
        assert "fma.rn.f32" not in ptx or EVERYTHING in GROUPS[group]()[name], f"{name}: a product was not rounded"
        triggers = [match.start() for match in re.finditer(r"griddepcontrol\.launch_dependents", ptx)]
        assert bool(triggers) == (name == "cat")
        if triggers:
            assert triggers[0] > max(reads)
    if group == "loads":
        _check_fp8_load(compiled.ptx["load_V41_FORMAT"])
    if group == "slots and indices":
        stores = [re.findall(r"st\.global\.\S+", compiled.ptx[name]) for name in ("plan", "plan_narrow")]
        assert [len(found) for found in stores] == [1, 4] and "v4" in stores[0][0], f"a segment is one access: {stores}"
    if group in ("stores", "loads"):
        _check_no_format_branch({name: text for name, text in sources.items() if name.endswith("_FORMAT")})


def _check_fp8_load(ptx: str) -> None:
    """Rows go out in 16-byte accesses and come in in 8-byte ones; block ids are multiplied in 64 bits."""
    assert re.search(r"st\.global\.v4\.(?:b|u)32", ptx)
    assert not re.search(r"st\.global\.(?!v4)", ptx)
    assert re.search(r"ld\.global\.L2::256B\.v2\.u32", ptx)
    assert re.search(r"(?:mul\.lo|mad\.lo)\.s64", ptx)
    assert not re.search(r"(?:cvta|add)\S* .*%r\d+, %rd", ptx), "an address is computed in 32 bits"


def _check_no_format_branch(sources: dict[str, str]) -> None:
    """Each kernel holds one codec, and takes nothing at run time that could choose among several."""
    marks = {"e4m3": "scaled_pair", "e2m1": "ABOVE_TIES"}
    for name, text in sources.items():
        layout: KVCacheFormat = FORMATS[name.partition("_")[2]]
        for dtype, mark in marks.items():
            assert (mark in text) == (layout.quantized_dtype == dtype), f"{name} and the codec of {dtype}"
        parameters = text[text.index('extern "C"') :].split("(", 2)[1].split(")")[0]
        known = "cache|kv|slots|out|out_sf|segments|block_stride|blocks|kv_stride|n|out_stride|segment_count|sf_stride|total_k"
        assert set(re.findall(r"(\w+)(?:,|$)", parameters)) <= {*known.split("|"), "sf_rows", "rows"}


def test_a_block_size_is_part_of_the_code() -> None:
    whole, odd = (source_of(store.store_kernel, V41_FORMAT, size, "int64", 16) for size in (64, 133))
    assert "(uint64_t)64" in whole and "(uint64_t)133" in odd


def test_fp4_addresses_are_bytes() -> None:
    """288 bytes a token and 4 an octet: a stride in elements would be off by two."""
    text = source_of(load.load_kernel, V41_FP4_FORMAT, 64, 16)
    assert "(((int64_t)first_1) * (int64_t)288)" in text
    assert re.search(r"\(int64_t\)31\) \* \(int64_t\)4\)", text)
