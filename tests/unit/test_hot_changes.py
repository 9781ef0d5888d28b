"""No change of an argument slips past a remembered call: done in place, by another class of tensor, by an equal number."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvhal
from kvhal import KVCacheOutArgs, NormArgs, RopeArgs
from kvhal.ops import alike
from tests.unit.hot_calls import CALLS, LAYOUT, counted, ints, new_cache, rows
from tests.unit.hot_launchers import use_preparing

__all__ = ["counted"]


class Held:
    """Arguments of every operation as an engine holds them, so that calls differ in what is done to one of them only."""

    def __init__(self) -> None:
        self.kv, self.cache, self.slots, self.out = rows(), new_cache(), torch.arange(3), rows()
        self.segments, self.weight, self.positions = ints(1, 4), torch.ones(512), torch.arange(3)
        self.table, self.topk, self.blocks, self.lens = torch.ones(8, 64), ints(1, 1, 2), ints(1, 2), ints(1, 1)
        self.left, self.right, self.wide, self.pivots = ints(2, 3), ints(2, 1), ints(2, 4), ints(1, 4)
        self.pairs, self.narrow, self.spans = ints(1, 2), ints(1, 4), ints(1, 5)

    def calls(self) -> dict[str, tuple[Callable[[], Any], tuple[str, ...]]]:
        """Operation -> the call, and the names of its tensors."""
        cast = kvhal.CastArgs.for_layout(LAYOUT)
        norm, rope = NormArgs(self.weight), RopeArgs(self.positions, self.table, 64)
        to = KVCacheOutArgs(self.cache, self.slots, LAYOUT)
        whole = {"norm_args": norm, "rope_args": rope, "cast_args": cast, "out_args": to}
        load = ("cache", "segments")
        return {
            "store": (lambda: kvhal.store_kv_cache(self.kv, self.cache, self.slots), ("kv", "cache", "slots")),
            "load": (lambda: kvhal.load_paged_kv_cache(self.cache, self.segments, 3, self.out), (*load, "out")),
            "load, new": (lambda: kvhal.load_paged_kv_cache(self.cache, self.segments, 3), load),
            "load_slots": (lambda: kvhal.load_kv_slots(self.cache, self.slots, self.out), ("cache", "slots", "out")),
            "convert": (lambda: kvhal.convert_kv_index(self.topk, self.blocks, self.lens, 4), ("topk", "blocks", "lens")),
            "cat": (lambda: kvhal.kv_index_cat(self.left, self.right, 4, 5, self.wide), ("left", "right", "wide")),
            "expand": (lambda: kvhal.expand_swa_index(self.pivots, 4, self.narrow), ("pivots", "narrow")),
            "decode": (lambda: kvhal.get_kv_swa_index_decode(self.pairs, 4, 8, self.narrow), ("pairs", "narrow")),
            "plan": (
                lambda: kvhal.expand_load_plan(self.spans, self.lens, 4, 1, self.narrow),
                ("spans", "lens", "narrow"),
            ),
            "fused": (
                lambda: kvhal.fused_norm_rope_hadamard_cast_store_kvcache(self.kv, **whole),
                ("kv", "weight", "positions", "table", "cache", "slots"),
            ),
        }


def longer(tensor: Tensor) -> Tensor:
    return torch.zeros((*tensor.shape[:-1], tensor.shape[-1] + 1), dtype=tensor.dtype)


def content(tensor: Tensor) -> Tensor:
    """Its bytes: what resize_ brings in is uninitialised, and may be a NaN."""
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


#: what can be done to a tensor in place so that the call is no longer valid, the object being the same
CHANGES: dict[str, Callable[[Tensor], object]] = {
    "resize_": lambda tensor: tensor.resize_(longer(tensor).shape),
    "set_": lambda tensor: tensor.set_(longer(tensor)),
    "data": lambda tensor: setattr(tensor, "data", tensor.to(torch.int16)),
    "unsqueeze_": lambda tensor: tensor.unsqueeze_(0).unsqueeze_(0).unsqueeze_(0),
    "device": lambda tensor: setattr(tensor, "data", tensor.to("meta")),
}


WIDER = {("convert", "topk"), ("convert", "blocks"), ("plan", "lens")}


#: what compares tensors: torch's compiled guard, Python, or a launcher that checks itself
COMPARED = pytest.mark.parametrize("compared", ["compiled", "python", "launcher"])


def compare_by(compared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alike, "COMPILED", alike.COMPILED and compared == "compiled")
    if compared == "launcher":
        use_preparing(monkeypatch, checks=True)
    kvhal.configure()


@COMPARED
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_changed_in_place_is_validated_again(change: str, compared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_by(compared, monkeypatch)
    for name, (_, arguments) in Held().calls().items():
        for argument in arguments:
            held = Held()
            call = held.calls()[name][0]
            call()
            call()
            if change in ("resize_", "set_") and (name, argument) in WIDER:  # these may be wider
                continue
            try:
                CHANGES[change](getattr(held, argument))
            except RuntimeError:  # torch itself does not allow it
                continue
            before = {other: content(value) for other, value in vars(held).items() if value.device.type == "cpu"}
            with pytest.raises((ValueError, TypeError)):
                call()
            assert all(torch.equal(content(getattr(held, other)), value) for other, value in before.items()), (name, argument)


@COMPARED
def test_strides_changed_in_place_are_seen(compared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_by(compared, monkeypatch)
    buffer = torch.arange(6)
    slots, kv, cache = buffer[:3], rows(), new_cache()
    for _ in range(2):
        kvhal.store_kv_cache(kv, cache, slots)
    slots.as_strided_((3,), (2,))
    with pytest.raises(ValueError, match="slot_mapping: has strides"):
        kvhal.store_kv_cache(kv, cache, slots)
    cache.as_strided_((2, 4, 1, 528), (528 * 4 - 8, 528, 528, 1))
    with pytest.raises(ValueError, match="kv_cache: has a block stride"):
        kvhal.store_kv_cache(kv, cache, buffer[:3])


def test_a_cache_moved_in_place_off_its_alignment_is_refused() -> None:
    storage = torch.zeros(3 * 2112, dtype=torch.uint8)
    cache = storage.as_strided((2, 4, 1, 528), (2112, 528, 528, 1))
    for _ in range(2):
        kvhal.load_kv_slots(cache, torch.arange(3))
    cache.as_strided_((2, 4, 1, 528), (2112, 528, 528, 1), 16)
    with pytest.raises(ValueError, match="kv_cache: starts at an address"):
        kvhal.load_kv_slots(cache, torch.arange(3))


class Sub(Tensor):
    pass


def test_other_kinds_of_tensors_are_served_and_never_remembered(counted: Counter[str]) -> None:
    kinds = [rows().as_subclass(Sub), torch.nn.Parameter(rows()), torch.nn.Parameter(rows(), requires_grad=False)]
    CALLS["store"]()
    want, cache = new_cache(), new_cache()
    kvhal.store_kv_cache(rows(), want, torch.arange(3), layout=LAYOUT)
    for kind in kinds:
        for _ in range(2):
            counted.clear()
            kvhal.store_kv_cache(kind, cache, torch.arange(3), layout=LAYOUT)
            assert counted["check_tensor"] > 0 and torch.equal(cache, want)
    needs_grad = rows().requires_grad_()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(3):
                kvhal.store_kv_cache(needs_grad, cache, torch.arange(3), layout=LAYOUT)
    assert not cache.requires_grad and torch.equal(cache, want)


#: numbers equal to those of a remembered call, of classes that are refused or must count as new
NUMBERS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "total_k": (lambda n: kvhal.load_paged_kv_cache(new_cache(), ints(1, 4), n, rows(1)), 1),
    "total_k new": (lambda n: kvhal.load_paged_kv_cache(new_cache(), ints(1, 4), n), 1),
    "block_size": (lambda n: kvhal.convert_kv_index(ints(1, 1, 2), ints(1, 2), ints(1, 1), n), 1),
    "cached": (lambda n: kvhal.kv_index_cat(ints(2, 3), ints(2, 1), n, 5), 1),
    "current": (lambda n: kvhal.kv_index_cat(ints(2, 3), ints(2, 1), 5, n), 1),
    "width": (lambda n: kvhal.expand_swa_index(ints(1, 4), n), 1),
    "window_size": (lambda n: kvhal.get_kv_swa_index_decode(ints(1, 2), n, 4), 1),
    "swa_block_size": (lambda n: kvhal.get_kv_swa_index_decode(ints(1, 2), 4, n), 1),
    "num_segments": (lambda n: kvhal.expand_load_plan(ints(1, 5), ints(1, 1), 4, n), 1),
    "rope_dim": (lambda n: rotated(n, 2), 64),
    "offset": (lambda n: rotated(64, n), 0),
}


NAMES = {"total_k new": "total_k", "cached": "total_k_swa_cached", "current": "total_k_swa_cur"}


def rotated(rope_dim: Any, offset: Any) -> Any:
    cast = kvhal.CastArgs.for_layout(LAYOUT, cast_back=True)
    rope = RopeArgs(torch.arange(3), torch.ones(8, 64), rope_dim, offset=offset)
    return kvhal.fused_norm_rope_hadamard_cast_store_kvcache(rows(), rope_args=rope, cast_args=cast)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_told_apart_by_their_class(name: str, counted: Counter[str]) -> None:
    call, number = NUMBERS[name]
    for _ in range(2):
        call(number)
    for wrong in (float(number), np.float32(number), *([bool(number)] if number < 2 else []), torch.tensor([number, number])):
        with pytest.raises((TypeError, ValueError), match=NAMES.get(name, name)):
            call(wrong)
    counted.clear()
    call(np.int64(number))
    assert counted["check_tensor"] > 0, "welcome, and validated"


def test_eps_of_another_class_is_refused_as_before() -> None:
    def call(eps: Any) -> None:
        kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
            rows(), norm_args=NormArgs(torch.ones(512), eps), cast_args=kvhal.CastArgs.for_layout(LAYOUT, cast_back=True)
        )

    for _ in range(2):
        call(1.0)
    for wrong in (True, "1", None, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"norm_args\.eps: has"):
            call(wrong)


@pytest.mark.parametrize("wrong", [1, 1.0, "yes", [True], torch.tensor(True)])
def test_a_flag_that_is_only_like_one_is_refused(wrong: Any) -> None:
    """After calls with True, which 1 and 1.0 equal, and where a list is no key: refused before anything is written."""

    def call(neox: Any = True, cast_back: Any = True) -> None:
        rope = RopeArgs(torch.arange(3), torch.ones(8, 64), 64, neox, 448)
        kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
            rows(), rope_args=rope, cast_args=kvhal.CastArgs.for_layout(LAYOUT, cast_back=cast_back)
        )

    for _ in range(2):
        call()
    for given in ({"neox": wrong}, {"cast_back": wrong}):
        with pytest.raises(TypeError, match=r"_args\.(is_neox_style|cast_back): has .*, needs True or False"):
            call(**given)


def test_arguments_forced_to_change_are_seen() -> None:
    """The argument classes are frozen; what is done to them all the same does not escape validation."""
    rope = RopeArgs(torch.arange(3), torch.ones(8, 64), 64, offset=448)
    norm, cast = NormArgs(torch.ones(512)), kvhal.CastArgs.for_layout(LAYOUT, cast_back=True)

    def call() -> Any:
        return kvhal.fused_norm_rope_hadamard_cast_store_kvcache(rows(), norm_args=norm, rope_args=rope, cast_args=cast)

    call()
    call()
    for owner, name, value in ((rope, "offset", 449), (rope, "rope_dim", 63), (norm, "eps", -1.0), (norm, "weight", None)):
        before = getattr(owner, name)
        object.__setattr__(owner, name, value)
        with pytest.raises((TypeError, ValueError), match=name):
            call()
        object.__setattr__(owner, name, before)
    assert torch.equal(call(), call())


def test_remembered_calls_keep_no_tensor_alive() -> None:
    held = Held()
    for call, _ in held.calls().values():
        for _ in range(3):
            call()
    alive = [weakref.ref(value) for value in vars(held).values()]
    del held, call
    gc.collect()
    assert not any(tensor() is not None for tensor in alive)
