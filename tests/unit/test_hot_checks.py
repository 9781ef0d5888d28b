"""Launchers with `checks`: what they prepare is tried first, and what it does not take is validated, or launched as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kvhal
from tests.unit.hot_calls import LAYOUT, RAW, ints, new_cache, rows
from tests.unit.hot_launchers import use_preparing


def raiser(kind: type[Exception]) -> Callable[[], Any]:
    def refuse() -> Any:
        raise kind("unlike")

    return refuse


#: how a prepared launcher says that it did not launch
REFUSALS: dict[str, Callable[[], Any]] = {
    "one": lambda: 1,
    "false": lambda: False,
    **{kind.__name__: raiser(kind) for kind in (RuntimeError, ValueError, TypeError, BufferError, AttributeError)},
}


class Held:
    """A cache, and calls on it of as many tokens as one likes."""

    def __init__(self) -> None:
        self.cache = new_cache()
        self.weight, self.turns = torch.ones(512), torch.ones(8, 64)
        self.segments = torch.tensor([[0, 0, 3, 0]], dtype=torch.int32)

    def store(self, n: int = 3, kv: Any = None, slots: Any = None) -> None:
        kvhal.store_kv_cache(rows(n) if kv is None else kv, self.cache, torch.arange(n) if slots is None else slots)

    def fused(self, n: int = 3, kv: Any = None, back: bool = False) -> Any:
        return kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
            rows(n) if kv is None else kv,
            norm_args=kvhal.NormArgs(self.weight),
            rope_args=kvhal.RopeArgs(torch.arange(n), self.turns, 64),
            cast_args=kvhal.CastArgs.for_layout(LAYOUT, cast_back=back),
            out_args=kvhal.KVCacheOutArgs(self.cache, torch.arange(n)),
        )

    def load(self, n: int = 3, out: Any = None) -> None:
        kvhal.load_paged_kv_cache(self.cache, self.segments.repeat(n, 1), 3, rows(3) if out is None else out)

    def load_new(self, n: int = 3) -> kvhal.KVCacheTensors:
        return kvhal.load_paged_kv_cache(self.cache, self.segments.repeat(n, 1), 3)

    def load_slots(self, n: int = 3, out: Any = None) -> None:
        kvhal.load_kv_slots(self.cache, torch.arange(n), rows(n) if out is None else out)


TRIED = ("store", "fused", "load", "load_new", "load_slots")


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    kvhal.configure()
    yield
    kvhal.configure()


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("name", TRIED)
def test_what_is_not_taken_goes_the_long_way(name: str, refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = use_preparing(monkeypatch, checks=True, refuse=REFUSALS[refusal])
    kvhal.configure()
    held = Held()
    call = getattr(held, name)
    for n in (3, 3, 2, 2, 3):
        call(n)
    others = ["refused", "launch"]
    assert log == ["launch", "prepare", "prepared", *others, "prepare", "prepared", *others]


@pytest.mark.parametrize("name", TRIED)
def test_what_is_wrong_is_refused_by_validation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is the one of a first call, and nothing is launched."""
    log = use_preparing(monkeypatch, checks=True)
    kvhal.configure()
    held = Held()
    getattr(held, name)()
    before, count = held.cache.clone(), len(log)
    wrong: dict[str, tuple[Callable[[], Any], str]] = {
        "store": (lambda: held.store(kv=rows(4)), "kv: has 4 rows"),
        "fused": (lambda: held.fused(kv=rows(4)), r"rope_args\.positions: has 3 entries"),
        "load": (lambda: held.load(out=rows(2)), "out: has 2 rows"),
        "load_new": (lambda: setattr(held, "segments", held.segments.long()) or held.load_new(), "load_segments: has dtype"),
        "load_slots": (lambda: held.load_slots(out=rows(4)), "out: has shape"),
    }
    call, message = wrong[name]
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            call()
    assert log[count:] == ["refused", "refused"] and torch.equal(held.cache, before)


class Sub(Tensor):
    pass


@pytest.mark.parametrize(
    "kind", [lambda kv: kv.as_subclass(Sub), torch.nn.Parameter, lambda kv: kv.tolist(), lambda kv: kv.numpy()]
)
@pytest.mark.parametrize("name", ["store", "fused", "load", "load_slots"])
def test_only_plain_tensors_are_tried(name: str, kind: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in fails when it sees another; a kernel might take whatever has memory on its device."""
    log = use_preparing(monkeypatch, checks=True)
    kvhal.configure()
    held = Held()
    call = getattr(held, name)
    call()
    odd = kind(rows().float() if name == "fused" else torch.zeros(3, 512)) if kind is not torch.nn.Parameter else kind(rows())
    count = len(log)
    try:
        call(**{"kv" if name in ("store", "fused") else "out": odd})
    except (TypeError, ValueError):
        assert len(log) == count
    assert not {"prepared", "refused"} & set(log[count:])


def test_another_number_of_rows_is_tried_where_the_output_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in refuses it; a kernel takes any that the output holds."""
    log = use_preparing(monkeypatch, checks=True)
    kvhal.configure()
    held, out = Held(), rows()
    for total in (3, 3, 2, True):
        try:
            kvhal.load_paged_kv_cache(held.cache, held.segments, total, out)
        except TypeError:
            assert total is True
    assert log == ["launch", "prepare", "prepared", "refused", "launch", "prepare"]
    log.clear()
    for total in (3, 3, 2):
        assert kvhal.load_paged_kv_cache(held.cache, held.segments, total).kv.shape == (total, 512)
    assert log == ["launch", "prepare", "prepared", "launch", "prepare"], "a new one is as large as the earlier one"


def test_what_makes_its_output_by_its_tensors_is_compared_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that go back, and those of slots, are as many as there were: for others they would be made in vain."""
    log = use_preparing(monkeypatch, checks=True)
    kvhal.configure()
    held = Held()
    for n in (3, 3, 2):
        assert held.fused(n, back=True).shape == (n, 512)
        assert kvhal.load_kv_slots(held.cache, torch.arange(n)).shape == (n, 512)
    assert "refused" not in log and log.count("prepared") == 2


def test_slots_of_several_dimensions_are_compared_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flattened, six slots are like any other six."""
    log = use_preparing(monkeypatch, checks=True)
    kvhal.configure()
    held, six = Held(), torch.arange(6)
    for _ in range(2):
        kvhal.load_kv_slots(held.cache, six.view(2, 3), rows(6).view(2, 3, 512))
    with pytest.raises(ValueError, match="out: has shape"):
        kvhal.load_kv_slots(held.cache, six.view(2, 3), rows(6).view(3, 2, 512))
    with pytest.raises(ValueError, match="out: has shape"):
        kvhal.load_kv_slots(held.cache, six.view(3, 2), rows(6).view(2, 3, 512))
    assert log == ["launch", "prepare", "prepared"]


@pytest.mark.parametrize("out", [kvhal.KVCacheTensors(rows(), ints(3)), (rows(), None), [rows()]])
def test_other_outputs_of_a_load_are_validated(out: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_preparing(monkeypatch, checks=True)
    kvhal.configure()
    held = Held()
    for given in (rows(), kvhal.KVCacheTensors(rows(), None)):
        for _ in range(2):
            held.load(out=given)
    if type(out) is tuple:
        held.load(out=out)
        return
    with pytest.raises((TypeError, ValueError), match="out"):
        held.load(out=out)


@pytest.mark.parametrize("given", [False, True])
def test_a_load_of_index_records_is_compared_first(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has two outputs: what is tried is a load of main records."""
    log = use_preparing(monkeypatch, checks=True)
    kvhal.configure()
    cache, segments = kvhal.alloc_kv_cache(2, 4, RAW, "cpu").zero_(), torch.tensor([[0, 0, 3, 0]], dtype=torch.int32)
    out = kvhal.KVCacheTensors(torch.ones((3, 128), dtype=torch.float8_e4m3fn), ints(3)) if given else None
    for _ in range(3):
        data, scales = kvhal.load_paged_kv_cache(cache, segments, 3, out, layout=RAW)
        assert not data.view(torch.uint8).any() and scales is not None and not scales.any()
    assert log == ["launch", "prepare", "prepared", "prepared"]
