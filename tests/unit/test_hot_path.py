"""The second call of a kind is a dictionary look-up: nothing is resolved, bound or validated again until something changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvhal
from kvhal.ops import repeated
from tests.unit.hot_calls import CALLS, LAYOUT, counted, fused, ints, new_cache, rows

__all__ = ["counted"]


@pytest.mark.parametrize("name", CALLS)
def test_the_second_call_decides_and_validates_nothing(name: str, counted: Counter[str]) -> None:
    first = CALLS[name]()
    assert counted["resolve"] == 1 and counted["check_tensor"] > 0
    counted.clear()
    second = CALLS[name]()
    assert counted == {}
    assert first is second is None or (torch.equal(first, second) and first.stride() == second.stride())


def test_what_changes_a_decision_makes_another_one(counted: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def decisions() -> int:
        before = counted["resolve"]
        CALLS["store"]()
        return counted["resolve"] - before

    assert [decisions(), decisions()] == [1, 0]
    kvhal.configure(backend="reference_torch")
    assert [decisions(), decisions()] == [1, 0]
    kvhal.configure()
    assert [decisions(), decisions()] == [1, 0]
    monkeypatch.setenv("KVHAL_BACKEND", "reference_torch")
    assert [decisions(), decisions()] == [1, 0]
    monkeypatch.delenv("KVHAL_BACKEND")
    assert decisions() == 0, "the configuration before is still known"
    for expected in (1, 0):
        with kvhal.use_backend("reference_torch"):
            assert decisions() == expected
    kvhal.store_kv_cache(rows(), new_cache(block_size=8), torch.arange(3), layout=LAYOUT)
    assert counted["resolve"] == 6, "another block size is another question"
    kvhal.store_kv_cache(rows(5), new_cache(block_size=8), torch.arange(5), layout=LAYOUT)
    assert counted["resolve"] == 6, "another token count is not"


#: calls that differ from a remembered one in a single fact, and what they are refused for
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: kvhal.store_kv_cache(rows().half(), new_cache(), torch.arange(3), layout=LAYOUT), "kv: has dtype"),
    "shape": (lambda: kvhal.store_kv_cache(rows(4), new_cache(), torch.arange(3), layout=LAYOUT), "kv: has 4 rows"),
    "stride": (
        lambda: kvhal.load_kv_slots(new_cache(), torch.arange(6)[::2], rows()),
        "slots: has strides",
    ),
    "overlap": (lambda: kvhal.load_kv_slots(new_cache(), torch.arange(3), rows(1).expand(3, 512)), "out: has strides"),
    "device": (lambda: kvhal.load_kv_slots(new_cache(), torch.arange(3), rows().to("meta")), "out: has device meta"),
    "layout": (
        lambda: kvhal.store_kv_cache(rows(), new_cache(), torch.arange(3), layout=kvhal.V41_FP4_FORMAT),
        "kv_cache: has dtype",
    ),
    "no layout": (lambda: kvhal.store_kv_cache(rows(), new_cache(), torch.arange(3), layout=[]), "layout: has"),  # type: ignore[arg-type]
    "address": (
        lambda: kvhal.load_kv_slots(
            torch.zeros(5000, dtype=torch.uint8)[16:].as_strided((2, 4, 1, 528), (2112, 528, 528, 1)), torch.arange(3), rows()
        ),
        "kv_cache: starts at an address",
    ),
    "int": (lambda: kvhal.load_paged_kv_cache(new_cache(), ints(1, 4), 4, rows()), "out: has 3 rows"),
    "float": (lambda: kvhal.load_paged_kv_cache(new_cache(), ints(1, 4), 3.0, rows()), "total_k: has 3.0"),  # type: ignore[arg-type]
    "bool": (lambda: kvhal.expand_swa_index(ints(1, 4), True, ints(1, 1)), "width: has True"),
    "list": (lambda: kvhal.load_kv_slots(new_cache(), [0, 1, 2], rows()), "slots: has a list"),  # type: ignore[arg-type]
    "weight": (lambda: fused(rows(), torch.ones(511)), "norm_args.weight: has 511"),
    "offset": (lambda: fused(rows(), torch.ones(512), offset=449), "rope_args.offset: has 449"),
    "arguments": (
        lambda: kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
            rows(),
            cast_args=kvhal.CastArgs.for_layout(LAYOUT),
            out_args=(new_cache(), torch.arange(3)),  # type: ignore[arg-type]
        ),
        "out_args: has a tuple",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_remembered_call_hides_no_refusal(name: str) -> None:
    for call in CALLS.values():
        call()
    kvhal.expand_swa_index(ints(1, 4), 1, ints(1, 1))
    call, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    assert str(raised.value).startswith(message)


def test_strict_mode_looks_at_the_values_of_every_call() -> None:
    kvhal.configure(strict=True)
    for _ in range(2):
        CALLS["store"]()
    with pytest.raises(kvhal.InvalidMetadata):
        kvhal.store_kv_cache(rows(), new_cache(), torch.tensor([0, 1, 8]), layout=LAYOUT)


def test_results_of_a_repeated_call_are_its_own() -> None:
    """Other values in equal tensors, one cast back and one without, and an offset that is written out or not."""
    outputs = [fused(value * rows(), torch.ones(512), offset) for value, offset in ((1, None), (1, 448), (-1, None), (-1, 448))]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[2], outputs[3])
    assert torch.equal(outputs[0], -outputs[2]) and len({output.data_ptr() for output in outputs}) == 4
    assert fused(rows(), torch.ones(512), back=False) is None


def test_only_so_many_calls_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "LIMIT", 4)
    kvhal.configure()
    for n in range(1, 10):
        kvhal.store_kv_cache(rows(n), kvhal.alloc_kv_cache(3, 4, LAYOUT, "cpu"), torch.arange(n))
    assert len(kvhal.config.current().calls) <= 4
