"""The gate on machine code: what it refuses, what it only says, and how it reads a disassembly. Nothing is compiled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.compile import update
from tests.compile.resources import (
    BASELINE,
    INSTRUCTION,
    UPDATE,
    Baseline,
    Resources,
    changes_of,
    count_accesses,
    stray_merges,
    write,
)

KERNEL = Resources(64, 40, 0, 0, 0, 0, load=16, store=8, loads=8, stores=4, instructions=200, stray_merges=0)
COMPILERS = {"nvcc": "13.0.88"}
SASS = """
    .headerflags @"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                           /* 0x00000a00ff017b82 */
                                                                                    /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDG.E.LTC256B.128.CONSTANT R4, desc[UR4][R2.64] ;  /* 0x0000000000097919 */
        /*0020*/               @P1 LDG.E.U8 R9, desc[UR4][R2.64+0x40] ;             /* 0x0000000000097919 */
        /*0030*/                   STL.64 [R1+0x8], R4 ;                            /* 0x0000000000097919 */
        /*0040*/                   LDL R4, [R1] ;                                   /* 0x0000000000097919 */
        /*0050*/             @!UP0 UIADD3 UR4, UR4, 0x1, URZ ;                      /* 0x0000000000097919 */
        /*0060*/                   LDS.128 R4, [R5] ;                               /* 0x0000000000097919 */
        /*0070*/                   STG.E R4, desc[UR4][R2.64] ;                     /* 0x0000000000097919 */
        /*0080*/                   NOP;                                             /* 0x0000000000097919 */
"""


def worse(now: Resources, same_compilers: bool = True) -> set[str]:
    return {change.what for change in changes_of("k", KERNEL, now, same_compilers) if change.verdict == "worse"}


def better(now: Resources) -> set[str]:
    return {change.what for change in changes_of("k", KERNEL, now) if change.verdict == "better"}


def test_reading_a_disassembly() -> None:
    need = {"spill_stores": 8, "spill_loads": 4, "load": 16, "store": 4, "loads": 2, "stores": 1, "instructions": 8}
    assert count_accesses(INSTRUCTION.findall(SASS)) == need


def test_merges_of_registers_that_nothing_wrote() -> None:
    def line(at: int, text: str) -> str:
        return f"        /*{at:04x}*/                   {text} ;"

    cast = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"
    head = [line(0, "LDG.E.128 R4, desc[UR4][R2.64]"), line(16, "@P0 SHFL.BFLY PT, R9, R4, 0x1, 0x1f")]
    good = [
        line(32, f"{cast} R16, R4, R5, R1"),
        line(48, f"{cast} R17, R6, R7, R16"),
        line(64, f"{cast} R18, R4, R9, R9.reuse"),
    ]
    assert stray_merges(head + good) == []
    (found,) = stray_merges([*head, *good, line(80, f"{cast} R20, R4, R5, R20")])
    assert found.endswith("R5, R20 ;")
    stores = ("STG.E desc[UR4][R2.64]", "STG.E.64 desc[UR4][R2.64+0x8]", "STS [R12]")
    for at, store in enumerate(stores):
        (found,) = stray_merges([*head, *good, line(80 + at, f"{store}, R16")])
        assert store in found
    assert stray_merges([*head, *good, line(80, "STG.E.U16 desc[UR4][R2.64], R16"), line(96, "STS [R16], R17")]) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"spill_stores": 4}, {"spill_stores"}),
        ({"spill_loads": 4}, {"spill_loads"}),
        ({"stack": 8}, {"stack"}),
        ({"stray_merges": 1}, {"stray_merges"}),
        ({"load": 8}, {"load"}),
        ({"store": 4}, {"store"}),
        ({"registers": 49}, {"registers", "resident_warps"}),
        ({"registers": 41}, {"registers", "resident_warps"}),  # 50 warps with 40, 42 with 41
        ({"shared": 16 * 1024}, {"resident_warps"}),
        ({"loads": 11}, {"loads"}),
        ({"stores": 6}, {"stores"}),
    ],
)
def test_what_fails(change: dict[str, int], what: set[str]) -> None:
    assert worse(replace(KERNEL, **change)) == what


@pytest.mark.parametrize(
    "change",
    [{}, {"registers": 32}, {"load": 32}, {"store": 16}, {"instructions": 400}, {"loads": 10}, {"shared": 256}],
)
def test_what_passes(change: dict[str, int]) -> None:
    assert worse(replace(KERNEL, **change)) == set()


def test_registers_may_grow_within_the_slack_and_an_occupancy_step() -> None:
    few = replace(KERNEL, registers=16)
    assert few.resident_warps == 64
    assert not [change for change in changes_of("k", few, replace(few, registers=24)) if change.verdict == "worse"]
    assert [c.what for c in changes_of("k", few, replace(few, registers=25)) if c.verdict == "worse"] == ["registers"]


def test_what_becomes_better_is_said() -> None:
    assert better(replace(KERNEL, registers=30, store=16)) == {"registers", "store"}
    assert better(replace(KERNEL, load=32)) == {"load"}


def test_other_compilers_compare_widths_and_spills_only() -> None:
    assert worse(replace(KERNEL, registers=200), same_compilers=False) == set()
    assert worse(replace(KERNEL, registers=200, load=4, spill_loads=4), same_compilers=False) == {"load", "spill_loads"}


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "warps"),
    [(32, 64, 0, 64), (40, 64, 0, 50), (255, 128, 0, 8), (16, 32, 0, 32), (16, 128, 100_000, 8)],
)
def test_resident_warps(registers: int, threads: int, shared: int, warps: int) -> None:
    """By hand: 65,536 registers in lots of 256 a warp, 64 warps, 32 thread blocks, 228 KiB of shared memory."""
    assert replace(KERNEL, registers=registers, threads=threads, shared=shared).resident_warps == warps


@pytest.fixture
def baseline(tmp_path: Path) -> Baseline:
    write({"cuda/a": KERNEL, "cuda/b": KERNEL}, {"cuda": COMPILERS}, tmp_path / "resources.json")
    return Baseline(tmp_path / "resources.json")


def test_a_comparison_in_words(baseline: Baseline) -> None:
    found = {"a": replace(KERNEL, load=4), "b": replace(KERNEL, store=16), "new": KERNEL}
    failures, remarks = baseline.compare("cuda", found, COMPILERS)
    assert failures[0] == f"cuda/new: has no baseline; `{UPDATE}` adds it"
    assert failures[1].split() == ["cuda/a", "load", "16", "->", "4", "worse"]
    assert UPDATE in failures[2] and len(failures) == 3
    assert UPDATE in remarks[0] and remarks[1].split() == ["cuda/b", "store", "8", "->", "16", "better"]
    assert baseline.compare("cuda", {"a": KERNEL}, COMPILERS) == ([], [])
    assert baseline.keys("cuda") == {"a", "b"} and baseline.keys("other") == set()


@pytest.mark.parametrize(("load", "code"), [(16, 0), (8, 1)])
def test_the_command(
    load: int, code: int, baseline: Baseline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernel b of the baseline is gone when a is worse."""
    found = {"a": replace(KERNEL, load=load)} | ({} if code else {"b": KERNEL})
    monkeypatch.setattr("sys.argv", ["resources"])
    monkeypatch.setattr(update.shutil, "which", lambda name: name)
    monkeypatch.setattr(update, "Baseline", lambda: baseline)
    monkeypatch.setattr(update, "BACKENDS", {"cuda": lambda: (found, COMPILERS)})
    assert update.main() == code
    said = capsys.readouterr().out
    assert ("cuda/b: is in the baseline, and no kernel has this name" in said) == bool(code)
    assert ("16 -> 8" in said) == bool(code)


def test_other_versions_are_said(baseline: Baseline) -> None:
    failures, remarks = baseline.compare("cuda", {"a": replace(KERNEL, registers=99)}, {"nvcc": "14.0"})
    assert failures == []
    assert "'14.0'" in remarks[0] and "'13.0.88'" in remarks[0] and "only widths and spills" in remarks[0]


def test_the_committed_file_is_as_it_is_written(tmp_path: Path) -> None:
    committed = Baseline()
    write(committed.kernels, committed.compilers, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == BASELINE.read_text()
    rows: dict[str, Any] = json.loads(BASELINE.read_text())["kernels"]
    assert all(row["spill_stores"] == row["spill_loads"] == 0 for row in rows.values())
