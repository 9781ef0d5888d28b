"""`kvhal parity`: equal bytes give one hash and exit 0, a planted wrong byte gives a reproducer and exit 1."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvhal.backends.reference_torch import store
from kvhal.cli import app
from kvhal.testing import conformance

RUN = ["parity", "--ops", "store_kv_cache", "--formats", "V41_FORMAT", "--backends", "reference_torch"]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_equal_bytes_give_one_hash_a_case() -> None:
    result = invoke(*RUN, "--cases", "3", "--json")
    facts = json.loads(result.stdout)
    assert result.exit_code == 0 and facts["equal"] and facts["runs"] == 3 and not facts["mismatches"]
    assert all(len(case["hash"]) == 64 for case in facts["cases"])


def test_seeds_make_other_cases_and_repeat() -> None:
    hashes = [
        [case["hash"] for case in json.loads(invoke(*RUN, "--cases", "2", "--json", "--seed", seed).stdout)["cases"]]
        for seed in ("1", "1", "2")
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_more_cases_than_the_suite_has_take_further_seeds() -> None:
    known = len(conformance.cases(conformance.Op.STORE, conformance.CONFORMANCE_FORMATS["V41_FORMAT"], "full"))
    facts = json.loads(invoke(*RUN, "--cases", str(known + 2), "--json").stdout)
    names = [case["case"] for case in facts["cases"]]
    assert len(set(names)) == known + 2 and sum("#1" in name for name in names) == 2


def test_a_wrong_byte_is_reported_with_a_command_that_reproduces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = store.scatter_records

    def wrong(cache: torch.Tensor, *arguments: Any) -> None:
        right(cache, *arguments)
        cache.view(-1)[:1] ^= 1

    # only the backend under test writes the wrong byte; what it is held to stays right
    expected = conformance.run_reference

    def reference(call: Any) -> Any:
        monkeypatch.setattr(store, "scatter_records", right)
        return expected(call)

    run_case = conformance.run_case

    def planted(backend: str, case: Any, device: Any, *, simulate: bool = False) -> Any:
        monkeypatch.setattr(store, "scatter_records", wrong)
        return run_case(backend, case, device, simulate=simulate, expected=reference)

    monkeypatch.setattr("kvhal.testing.parity.run_case", planted)
    result = invoke(*RUN, "--cases", "2")
    assert result.exit_code == 1
    assert "first mismatch" in result.stdout and "kvhal parity --ops store_kv_cache" in result.stdout
    command = next(line for line in result.stdout.splitlines() if line.startswith("kvhal parity"))
    again = invoke(*command.replace("'", "").split()[1:])
    assert again.exit_code == 1 and "runs of 1 cases" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--ops", "store"], 2, "needs one of store_kv_cache"),
        (["--formats", "V42"], 2, "needs one of V41_FORMAT"),
        (["--backends", "cuda"], 2, "needs one of"),
        (["--ops", "kv_index_cat", "--case", "nothing"], 2, "--case"),
    ],
)
def test_bad_arguments_are_one_message(arguments: list[str], code: int, message: str) -> None:
    result = invoke("parity", *arguments)
    assert result.exit_code == code and message in result.output and "Traceback" not in result.output
