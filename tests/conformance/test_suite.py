"""The suite itself: it is deterministic, it reaches every cell, and it finds each kind of wrong byte and says where."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvhal
from kvhal import Op, Request
from kvhal.interface import FORMAT_OPS, Backend
from kvhal.platform import available_devices
from kvhal.registry import backends
from kvhal.testing import CONFORMANCE_FORMATS, Case, allocate, cases, poison, run_case
from kvhal.testing.buffers import GUARD_BYTES, locate_in_rows
from kvhal.testing.cache_cases import TOKENS
from kvhal.testing.compare import SHOWN
from kvhal.testing.matrix import promised_cells, render, rows_of
from kvhal.testing.values import PATTERNS, adversarial_rows

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = backends()["reference_torch"]


def test_the_committed_support_matrix_is_what_the_checks_say() -> None:
    text = (ROOT / "docs" / "support_matrix.md").read_text(encoding="utf-8")
    assert text == render(), "regenerate it: python -m kvhal.testing.matrix > docs/support_matrix.md"


def test_the_matrix_can_be_read_back() -> None:
    rows = list(rows_of(render()))
    cells = {(backend, op, layout): row for backend, op, layout, row in rows}
    assert len(cells) == len(rows) == 4 * (4 * len(CONFORMANCE_FORMATS) + 5)
    assert cells["reference_torch", "store_kv_cache", "V41_FORMAT"]["ascend910b"] == "yes"
    promised = promised_cells(render())
    assert "reference_torch/load_kv_slots/MXFP8_INDEX_KV_FORMAT/cpu" in promised
    assert not any(cell.startswith("cuda_tilelang") and cell.endswith("/cpu") for cell in promised)


@pytest.mark.skipif(any(device.type == "cuda" for device in available_devices()), reason="needs a backend that cannot run here")
def test_a_session_without_a_conformance_test_fails() -> None:
    arguments = ["-q", "-p", "no:cacheprovider", "tests/conformance/test_conformance.py", "--backend", "cuda_tilelang"]
    done = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    assert "ERROR: no conformance test ran" in done.stdout
    assert "NO GPU TESTS RAN" in done.stdout


def test_every_cell_has_cases() -> None:
    for op in Op:
        for layout in CONFORMANCE_FORMATS.values() if op in FORMAT_OPS else [None]:
            assert len(cases(op, layout)) >= 5
    ids = [case.id for case in cases(profile="full")]
    assert len(ids) == len(set(ids))


def test_all_block_sizes_are_tried() -> None:
    for op in (Op.STORE, Op.LOAD, Op.LOAD_SLOTS):
        assert {case.block_size for case in cases(op)} == {1, 3, 16, 48, 64, 133}
        for layout in CONFORMANCE_FORMATS.values():
            assert {case.block_size for case in cases(op, layout, "full")} == {1, 3, 16, 48, 64, 133}


@pytest.mark.parametrize("op", [Op.STORE, Op.LOAD, Op.CONVERT_INDEX, Op.DECODE_SWA_INDEX, Op.FUSED_STORE])
def test_builds_of_a_case_have_the_same_bytes(op: Op) -> None:
    case = cases(op)[0]
    first, second = case.build(), case.build()
    assert first.buffers.keys() == second.buffers.keys()
    for name, buffer in first.buffers.items():
        assert np.array_equal(buffer.bytes(), second.buffers[name].bytes())
        assert buffer.storage.data_ptr() % 64 == 0
    assert any(buffer.written for other in cases(op)[:2] for buffer in other.build().buffers.values())


def test_poison_depends_on_the_address() -> None:
    values = poison(1 << 16, 3)
    assert np.bincount(values, minlength=256).min() > 150
    for distance in (1, 4, 16, 32, 528, 4096):
        assert (values[distance:] == values[:-distance]).mean() < 0.01
    assert (values == poison(1 << 16, 4)).mean() < 0.01


def test_every_pattern_meets_every_group() -> None:
    layout = kvhal.V41_FORMAT
    met = {(row + group) % len(PATTERNS) for row in range(TOKENS) for group in [5]}
    assert met == set(range(len(PATTERNS)))
    rows = adversarial_rows(np.random.default_rng(0), TOKENS, layout)
    magnitude = rows & 0x7FFF
    assert (magnitude > 0x7F80).any() and (magnitude == 0x7F80).any() and (rows == 0x8000).any()
    assert ((magnitude > 0) & (magnitude < 0x80)).any()


def test_coordinates_of_strided_tensors() -> None:
    where = [locate_in_rows((3, 2, 4), (20, 4, 1), 2, at, first=2) for at in (1, 2, 3, 2 + 2 * 27, 2 + 2 * 9)]
    assert where == [
        "byte 1 of the buffer, outside of the tensor's elements",
        "element [0, 0, 0] byte 0",
        "element [0, 0, 0] byte 1",
        "element [1, 1, 3] byte 0",
        "byte 20 of the buffer, outside of the tensor's elements",
    ]


def test_guards_surround_the_body() -> None:
    buffer = allocate("x", 100)
    assert buffer.storage.numel() == 100 + 2 * GUARD_BYTES
    assert buffer.where(GUARD_BYTES - 1) == "x: guard, 1 bytes before the first"
    assert buffer.where(GUARD_BYTES) == "x: byte 0"
    assert buffer.where(GUARD_BYTES + 100) == "x: guard, 0 bytes after the last"


Fault = Callable[..., None]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Fault], None]]:
    """Installs a backend "faulty": the reference, and then something it should not have done."""

    def install(fault: Fault) -> None:
        class Faulty(Backend):
            def bind(self, request: Request) -> Any:
                launch = REFERENCE.bind(request)

                def wrong(*arguments: Any) -> None:
                    launch(*arguments)
                    fault(*arguments)

                return wrong

        backend = Faulty("faulty", "a test", REFERENCE.check, REFERENCE.binders)
        table = {**backends(), "faulty": backend}
        for module in ("binding", "config"):
            monkeypatch.setattr(f"kvhal.{module}.backends", lambda: table)
        kvhal.configure()

    return install


def one(op: Op, layout: kvhal.KVCacheFormat | None, start: str) -> Case:
    return next(case for case in cases(op, layout) if case.name.startswith(start))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's allocation."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def flip(tensor: torch.Tensor, at: int) -> None:
    """Changes the byte `at` bytes from the tensor's first one."""
    flat(tensor)[tensor.storage_offset() * tensor.element_size() + at] ^= 0x80


STORE_FAULTS: dict[str, tuple[Fault, str]] = {
    "data": (lambda kv, cache, slots: flip(cache, 528 + 17), "kv_cache: block 0 token 1 data byte 17: has 0x"),
    "scale": (lambda kv, cache, slots: flip(cache, 2 * 528 + 515), "kv_cache: block 0 token 2 scale byte 3: has 0x"),
    "before": (lambda kv, cache, slots: flip(cache, -1), "kv_cache: guard, 1 bytes before the first: has 0x"),
    "input": (lambda kv, cache, slots: flip(kv, 1026), "kv: element [1, 1] byte 0: has 0x"),
    "slots": (lambda kv, cache, slots: flip(slots, 3), "slot_mapping: element [0] byte 3: has 0x"),
    "behind": (
        lambda kv, cache, slots: flip(cache, cache.shape[0] * cache.stride(0)),
        "kv_cache: guard, 0 bytes after the last: has 0x",
    ),
}


@pytest.mark.parametrize("what", STORE_FAULTS)
def test_a_wrong_byte_of_a_store_is_found_and_placed(what: str, faulty: Callable[[Fault], None]) -> None:
    fault, text = STORE_FAULTS[what]
    faulty(fault)
    outcome = run_case("faulty", one(Op.STORE, kvhal.V41_FORMAT, "values"))
    assert text in "\n".join(map(str, outcome.problems))
    with pytest.raises(kvhal.testing.ConformanceError, match=r"1 of .* bytes differ"):
        outcome.check()


def test_a_wrong_byte_of_the_padding_is_found(faulty: Callable[[Fault], None]) -> None:
    case = one(Op.STORE, kvhal.V41_FORMAT, "subcache")
    used = (case.block_size or 0) * 528
    faulty(lambda kv, cache, slots: flip(cache, used))
    assert f"kv_cache: block 0 padding at byte {used} of the block: has 0x" in str(run_case("faulty", case).problems[0])


def test_a_wrong_byte_between_rows_of_an_output_is_found(faulty: Callable[[Fault], None]) -> None:
    faulty(lambda cache, segments, total_k, out, out_sf: flip(out, 2 * 512))
    problems = run_case("faulty", one(Op.LOAD, kvhal.V41_FORMAT, "hostile-b")).problems
    assert "out: byte 1056 of the buffer, outside of the tensor's elements: has 0x" in str(problems[0])


def test_an_uncovered_row_is_found(faulty: Callable[[Fault], None]) -> None:
    faulty(lambda cache, segments, total_k, out, out_sf: out[total_k:].zero_())
    assert run_case("faulty", one(Op.LOAD, kvhal.V41_FORMAT, "hostile-b")).problems


def test_a_wrong_result_is_found(faulty: Callable[[Fault], None]) -> None:
    faulty(lambda cache, segments, total_k, out, out_sf: flip(out, 3))
    problems = run_case("faulty", one(Op.LOAD, kvhal.V41_FORMAT, "plan")).problems
    assert "result 0: 1 of" in str(problems[0]) and "row 0 byte 3: has 0x" in str(problems[0])


def test_a_foreign_byte_in_a_record_of_duplicate_writers_is_found(faulty: Callable[[Fault], None]) -> None:
    faulty(lambda kv, cache, slots: flip(cache, 528 + 5))
    problems = run_case("faulty", one(Op.STORE, kvhal.V41_FORMAT, "duplicates")).problems
    assert [str(problem) for problem in problems] == ["slot 1: the record is not one of its writers', [0, 3, 6, 10]"]


def test_a_record_of_several_writers_is_found(faulty: Callable[[Fault], None]) -> None:
    launch = REFERENCE.bind(Request(Op.STORE, kvhal.V41_FORMAT, kvhal.detect(), 64))

    def mix(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        scales = cache[0, 1, 0, 512:].clone()
        launch(kv[:1], cache, slots[:1])
        cache[0, 1, 0, 512:] = scales

    faulty(mix)
    problems = run_case("faulty", one(Op.STORE, kvhal.V41_FORMAT, "duplicates")).problems
    assert [str(problem) for problem in problems] == ["slot 1: the record is not one of its writers', [0, 3, 6, 10]"]


def test_another_winner_of_duplicates_is_accepted(faulty: Callable[[Fault], None]) -> None:
    launch = REFERENCE.bind(Request(Op.STORE, kvhal.V41_FORMAT, kvhal.detect(), 64))
    faulty(lambda kv, cache, slots: launch(kv.flip(0), cache, slots.flip(0)))
    outcome = run_case("faulty", one(Op.STORE, kvhal.V41_FORMAT, "duplicates"))
    assert not outcome.problems
    assert outcome.digest == run_case("reference_torch", one(Op.STORE, kvhal.V41_FORMAT, "duplicates")).digest


def test_a_report_lists_some_bytes_and_counts_the_rest(faulty: Callable[[Fault], None]) -> None:
    faulty(lambda kv, cache, slots: cache.zero_())
    outcome = run_case("faulty", one(Op.STORE, kvhal.V41_FORMAT, "values"))
    with pytest.raises(kvhal.testing.ConformanceError) as raised:
        outcome.check()
    assert len(str(raised.value).splitlines()) == SHOWN + 3
    assert "more" in str(raised.value).splitlines()[-1]


def test_digests_tell_bytes_apart(faulty: Callable[[Fault], None]) -> None:
    case = one(Op.STORE, kvhal.V41_FORMAT, "values")
    faulty(lambda kv, cache, slots: None)
    assert run_case("faulty", case).digest == run_case("reference_torch", case).digest
    faulty(lambda kv, cache, slots: flip(cache, 0))
    assert run_case("faulty", case).digest != run_case("reference_torch", case).digest
