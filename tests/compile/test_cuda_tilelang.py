"""cuda_tilelang without a GPU: every kernel and format becomes a cubin for sm_90a, and its code is what was meant."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

import pytest

from kvhal.formats import FP8_FLOAT32_SF_INDEX_KV_FORMAT, V41_FORMAT, V41_FP4_FORMAT

pytest.importorskip("tilelang")
pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")

from kvhal.backends.cuda_tilelang import load, store  # noqa: E402
from tests.compile.cuda_kernels import EVERYTHING, GROUPS, job, layout_of  # noqa: E402
from tests.compile.cuda_sources import Compiled, compile_group, limit_registers, source_of, versions  # noqa: E402
from tests.compile.resources import Baseline  # noqa: E402
from tests.gpu.test_cuda_root import root_kernel  # noqa: E402

#: multiply-adds that are meant: Newton's steps to a root and its reciprocal, and to a reciprocal; correction of an fp32 scale
ROOT_STEPS, RECIPROCAL_STEPS, QUOTIENT_STEPS = 4, 2, 2


@pytest.mark.parametrize("group", GROUPS)
def test_kernels_compile(group: str, tmp_path: Path) -> None:
    jobs = GROUPS[group]()
    sources, compiled = compile_group(jobs, tmp_path)
    assert set(compiled.ptx) == set(sources)
    assert not re.findall(r"[1-9]\d* bytes (?:spill|stack frame)", compiled.report), compiled.report
    for name, ptx in compiled.ptx.items():
        waits = [match.start() for match in re.finditer(r"griddepcontrol\.wait", ptx)]
        reads = [match.start() for match in re.finditer(r"\b(?:ld|st)\.global", ptx)]
        assert len(waits) == 1 and waits[0] < min(reads), f"{name} touches memory before its inputs are there"
        roots = ptx.count("rsqrt.approx")
        scales = ptx.count("rcp.approx") - roots
        quotients = scales if FP8_FLOAT32_SF_INDEX_KV_FORMAT in jobs[name] else 0
        wanted = ROOT_STEPS * roots + RECIPROCAL_STEPS * scales + QUOTIENT_STEPS * quotients
        assert ptx.count("fma.rn.f32") == wanted or EVERYTHING in jobs[name], f"{name}: a product was not rounded"
        triggers = [match.start() for match in re.finditer(r"griddepcontrol\.launch_dependents", ptx)]
        assert triggers, f"{name} never lets the next kernel start early"
        # kv_index_cat lets the next kernel start when it has written; others, before they wait: that one waits as well
        assert all(place > max(reads) if name.startswith("cat") else place < waits[0] for place in triggers)
    if group == "loads":
        _check_fp8_load(compiled.ptx["load_V41_FORMAT"])
    if group == "slots and indices":
        stores = [re.findall(r"st\.global\.\S+", compiled.ptx[name]) for name in ("plan", "plan_narrow")]
        assert [len(found) for found in stores] == [1, 4] and "v4" in stores[0][0], f"a segment is one access: {stores}"
    if group in ("stores", "loads"):
        _check_no_format_branch({name: text for name, text in sources.items() if name.endswith("_FORMAT")})
    _check_resources(compiled)
    if group == "stores":
        _check_planted_regressions(compiled, tmp_path)


def test_the_kernel_of_a_gpu_test_compiles(tmp_path: Path) -> None:
    """Made of device functions that change; where it runs, nobody looks every day."""
    assert compile_group({"compare": (root_kernel,)}, tmp_path)[1].ptx["compare"].count("rsqrt.approx")


def _check_resources(compiled: Compiled) -> None:
    failures, remarks = Baseline().compare("cuda_tilelang", compiled.resources, versions())
    for remark in remarks:
        warnings.warn(remark, stacklevel=1)
    assert not failures, "\n".join(failures)


def _check_planted_regressions(compiled: Compiled, folder: Path) -> None:
    """Accesses of two bytes, and a register limit that spills, in kernels that have just passed."""
    found = compiled.resources
    narrow, _ = Baseline().compare("cuda_tilelang", {"store_V41_FORMAT": found["store_narrow"]}, versions())
    assert any(re.search(r"store_V41_FORMAT +load +16 -> 4 +worse", line) for line in narrow), narrow
    spilled = limit_registers(compiled, 24, folder)
    assert set(spilled) == set(found)
    failures, _ = Baseline().compare("cuda_tilelang", spilled, versions())
    for what in ("spill_stores", "spill_loads", "stack"):
        assert any(re.search(rf"store_V41_FP4_FORMAT +{what} +0 -> [1-9]\d* +worse", line) for line in failures), failures


def test_every_kernel_has_a_baseline_and_every_baseline_a_kernel() -> None:
    assert Baseline().keys("cuda_tilelang") == {name for group in GROUPS.values() for name in group()}


def _check_fp8_load(ptx: str) -> None:
    """Rows go out in 16-byte accesses and come in in 8-byte ones; block ids are multiplied in 64 bits."""
    assert re.search(r"st\.global\.v4\.(?:b|u)32", ptx)
    assert not re.search(r"st\.global\.(?!v4)", ptx)
    assert re.search(r"ld\.global\.L2::256B\.v2\.u32", ptx)
    assert re.search(r"(?:mul\.lo|mad\.lo)\.s64", ptx)
    assert not re.search(r"(?:cvta|add)\S* .*%r\d+, %rd", ptx), "an address is computed in 32 bits"


def _check_no_format_branch(sources: dict[str, str]) -> None:
    """Each kernel holds one codec, and takes nothing at run time that could choose among several."""
    marks = {"e4m3": "scaled_pair", "e2m1": "0x1.006p-14f"}
    for name, text in sources.items():
        layout = layout_of(name)
        for dtype, mark in marks.items():
            assert (mark in text) == (layout.quantized_dtype == dtype), f"{name} and the codec of {dtype}"
        parameters = text[text.index('extern "C"') :].split("(", 2)[1].split(")")[0]
        known = "cache|kv|slots|out|out_sf|segments|block_stride|blocks|kv_stride|n|out_stride|segment_count|sf_stride|total_k"
        assert set(re.findall(r"(\w+)(?:,|$)", parameters)) <= {*known.split("|"), "sf_rows", "rows"}


def test_a_block_size_is_part_of_the_code() -> None:
    whole, odd = (source_of(*job(store.store_kernel, V41_FORMAT, size, "int64", 16)) for size in (64, 133))
    assert "(uint64_t)64" in whole and "(uint64_t)133" in odd


def test_fp4_addresses_are_bytes() -> None:
    """288 bytes a token and 4 an octet: a stride in elements would be off by two."""
    text = source_of(*job(load.load_kernel, V41_FP4_FORMAT, 64, 16))
    assert "(((int64_t)first_1) * (int64_t)288)" in text
    assert re.search(r"\(int64_t\)31\) \* \(int64_t\)4\)", text)
