"""A kernel's host function launches exactly what validation lets through and the launcher takes that very kernel for.

Public functions rely on it for calls like the one before (`kvhal.ops.repeated`, Call.checks). The oracle is a call that was
never made before: kvhal's validation and the launcher's choice, in Python, on the same tensors.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import kvhal
from kvhal.interface import Op, Request
from kvhal.platform import Platform

pytest.importorskip("tilelang")

from kvhal.backends.cuda_tilelang import fused, load, store
from tests.compile.cuda_host import OnGpu, host_function, launches

Tensors = dict[str, Tensor]
LAYOUT, BLOCK_SIZE, TOKENS = kvhal.V41_FP4_FORMAT, 4, 3
H100 = Platform("cuda", "sm_90")
NOTHING = ("no kernel",)
MANY = 20000  #: tokens; more than any kernel for few takes


@dataclass(frozen=True)
class Operation:
    """One operation: its tensors, the public call on them, what the kernel is called with."""

    op: Op
    names: tuple[str, ...]
    bind: Callable[[Request], Any]
    public: Callable[[Tensors], object]
    operands: Callable[[Tensors], tuple[Any, ...]]


def _fused(given: Tensors) -> None:
    kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
        given["kv"],
        norm_args=kvhal.NormArgs(given["weight"]),
        rope_args=kvhal.RopeArgs(given["positions"], given["turns"], 64),
        cast_args=kvhal.CastArgs.for_layout(LAYOUT),
        out_args=kvhal.KVCacheOutArgs(given["cache"], given["slots"], LAYOUT),
    )


OPERATIONS = {
    "store": Operation(
        Op.STORE,
        ("kv", "cache", "slots"),
        store.bind_store,
        lambda given: kvhal.store_kv_cache(given["kv"], given["cache"], given["slots"], layout=LAYOUT),
        lambda given: (given["kv"], given["cache"], given["slots"]),
    ),
    "load": Operation(
        Op.LOAD,
        ("cache", "segments", "out"),
        load.bind_load,
        lambda given: kvhal.load_paged_kv_cache(given["cache"], given["segments"], TOKENS, given["out"], layout=LAYOUT),
        lambda given: (given["cache"], given["segments"], TOKENS, given["out"], None),
    ),
    "load_slots": Operation(
        Op.LOAD_SLOTS,
        ("cache", "slots", "out"),
        load.bind_load_slots,
        lambda given: kvhal.load_kv_slots(given["cache"], given["slots"], given["out"], layout=LAYOUT),
        lambda given: (given["cache"], given["slots"], given["out"]),
    ),
    "fused": Operation(
        Op.FUSED_STORE,
        ("kv", "weight", "positions", "turns", "cache", "slots"),
        fused.bind_fused_store,
        _fused,
        lambda given: (1e-6, *(given[name] for name in ("kv", "weight", "positions", "turns", "cache", "slots")), None),
    ),
}


def tensors(names: tuple[str, ...], n: int = TOKENS) -> Tensors:
    """Valid ones, aligned; the rows of many tokens are one row."""
    rows = torch.zeros((1, 512), dtype=torch.bfloat16).expand(n, 512) if n == MANY else torch.zeros((n, 512)).bfloat16()
    made = {
        "kv": rows,
        "cache": kvhal.alloc_kv_cache(3, BLOCK_SIZE, LAYOUT, "cpu"),
        "slots": torch.arange(n),
        "segments": torch.zeros((n, 4), dtype=torch.int32),
        "out": torch.zeros((max(n, TOKENS) if "segments" in names else n, 512), dtype=torch.bfloat16),
        "weight": torch.ones(512),
        "positions": torch.arange(n),
        "turns": torch.zeros((9, 64)),
    }
    return {name: made[name] for name in names}


def restrided(tensor: Tensor, axis: int, change: int) -> Tensor:
    """The same extents over other memory, `change` elements more from one to the next of an axis."""
    strides = list(tensor.stride())
    strides[axis] = max(strides[axis] + change, 0)
    span = 1 + sum(stride * max(extent - 1, 0) for stride, extent in zip(strides, tensor.shape, strict=True))
    return torch.zeros(span + 64, dtype=tensor.dtype).as_strided(tensor.shape, strides)


def moved(tensor: Tensor, elements: int) -> Tensor:
    span = 1 + sum(stride * max(extent - 1, 0) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))
    return torch.zeros(span + 64, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride(), elements)


def sized(tensor: Tensor, axis: int, change: int) -> Tensor:
    """Another extent of an axis, with contiguous strides."""
    shape = list(tensor.shape)
    shape[axis] = max(shape[axis] + change, 0)
    return torch.zeros(shape, dtype=tensor.dtype)


def changes(tensor: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """What is done to one tensor of a call."""
    found: list[Callable[[Tensor], Tensor]] = [lambda tensor: tensor.clone()]
    for dtype in (torch.int16, torch.int32, torch.int64, torch.uint8, torch.float16, torch.float32, torch.bfloat16):
        found.append(lambda tensor, dtype=dtype: tensor.to(dtype))
    found += [lambda tensor: tensor[None], lambda tensor: tensor.unsqueeze(-1), lambda tensor: tensor.reshape(-1)]
    for axis, change in product(range(tensor.dim()), (-5, -1, 1, 3)):
        found.append(lambda tensor, axis=axis, change=change: sized(tensor, axis, change))
    for axis, change in product(range(tensor.dim()), (-512, -16, -8, -1, 1, 2, 4, 8, 16, 32)):
        found.append(lambda tensor, axis=axis, change=change: restrided(tensor, axis, change))
    for extent in (0, 1):  # of what is left of the first axis its stride may be anything
        found.append(lambda tensor, extent=extent: tensor[:extent])
        for change in (-512, -1, 1, 16, 32):
            found.append(lambda tensor, extent=extent, change=change: restrided(tensor[:extent], 0, change))
    for elements in (1, 2, 4, 8, 16, 32):
        found.append(lambda tensor, elements=elements: moved(tensor, elements))
    return found


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Kernels that launchers asked for, and what they were run with; kvhal takes CPU tensors to cuda_tilelang."""
    found: list[tuple[Any, ...]] = []

    def kernel(*what: Any, platform: Platform, device: torch.device) -> Callable[..., None]:
        return lambda *given: found.append((what, given))

    for module in (fused, load, store):
        monkeypatch.setattr(module, "kernel", kernel)
    binders = {operation.op: operation.bind for operation in OPERATIONS.values()}

    def launcher(op: Op, layout: Any, block_size: Any) -> Any:
        return binders[op](Request(op, layout, H100, block_size))

    cache_calls, fused_calls = (importlib.import_module(f"kvhal.ops.{name}_calls") for name in ("cache", "fused"))
    monkeypatch.setattr(cache_calls, "bound", lambda scope, op, key, layout, size, device: launcher(op, layout, size))
    monkeypatch.setattr(fused_calls, "_bound", lambda scope, layout, size, *rest: launcher(Op.FUSED_STORE, layout, size))
    yield found
    kvhal.configure()


def choice(operation: Operation, given: Tensors, found: list[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """The kernel that a first call would run with these tensors as they are; None where it is refused, NOTHING to do."""
    found.clear()
    kvhal.configure()
    try:
        operation.public(given)
    except (ValueError, TypeError):
        return None
    if not found:
        return NOTHING
    kernel, taken = found[0]
    as_they_are = all(facts(value) in [facts(other) for other in taken] for value in given.values())
    return kernel if as_they_are else None


def facts(value: Any) -> Any:
    """What tells a tensor from a view of it."""
    if not isinstance(value, Tensor):
        return None
    return value.data_ptr(), value.shape, [step for step, extent in zip(value.stride(), value.shape, strict=True) if extent > 1]


def took(function: Callable[..., Any], operation: Operation, given: Tensors, log: list[str]) -> bool:
    """Whether the host function launched."""
    log.clear()
    arguments = [OnGpu(value) if isinstance(value, Tensor) else value for value in operation.operands(given)]
    try:
        result = function(*arguments)
    except (RuntimeError, ValueError, TypeError):
        result = "raised"
    assert (result is None) == bool(log), "launched, or said that it did not"
    return bool(log)


BASES: dict[str, Callable[[Tensors], Tensors]] = {
    "aligned": lambda given: given,
    "narrow": lambda given: {name: moved(value, 1) if name in ("kv", "out") else value for name, value in given.items()},
    "int32": lambda given: {name: value.int() if name in ("slots", "positions") else value for name, value in given.items()},
}
CASES = [*product(OPERATIONS, BASES, [TOKENS]), *product(("store", "load", "fused"), ["aligned"], [MANY])]


@pytest.mark.parametrize(("name", "base", "n"), CASES)
def test_the_host_function_takes_what_its_launcher_would_take_it_for(
    name: str, base: str, n: int, chosen: list[tuple[Any, ...]]
) -> None:
    operation = OPERATIONS[name]
    first = BASES[base](tensors(operation.names, n))
    kernel = choice(operation, first, chosen)
    assert kernel is not None
    function, taken, tried = host_function(*kernel), 0, 0
    generator = random.Random(name)
    singles = [(part, change) for part in operation.names for change in changes(first[part])]
    trials = [[]] + [[single] for single in singles] + [generator.sample(singles, 2) for _ in range(300)]
    with launches() as log:
        for trial in trials:
            given = dict(first)
            for part, change in trial:
                try:
                    given[part] = change(given[part])
                except (RuntimeError, IndexError):  # the first change left nothing for the second
                    continue
            choose = choice(operation, given, chosen)
            if choose is NOTHING:  # a launch on tensors without elements would do nothing either
                continue
            want = choose == kernel
            said = {part: (value.dtype, value.shape, value.stride(), value.data_ptr() % 64) for part, value in given.items()}
            assert took(function, operation, given, log) == want, said
            taken, tried = taken + want, tried + 1
    assert 20 < taken < tried - 100, "both are seen"


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_number_of_tokens_has_one_kernel(name: str, chosen: list[tuple[Any, ...]]) -> None:
    """Around every threshold, as for every call: the one that the launcher takes for it."""
    operation = OPERATIONS[name]
    kernels: dict[tuple[Any, ...], Callable[..., Any]] = {}
    with launches() as log:
        for n in (1, 2, 2047, 2048, 2049, 16383, 16384, 16385, MANY):
            given = tensors(operation.names, n)
            kernel = choice(operation, given, chosen)
            assert kernel is not None
            kernels[kernel] = host_function(*kernel)
            for other, function in kernels.items():
                assert took(function, operation, given, log) == (other == kernel), n
    assert len(kernels) == (1 if name == "load_slots" else 2)


@pytest.mark.parametrize("name", OPERATIONS)
def test_tensors_of_several_devices_are_not_taken(name: str, chosen: list[tuple[Any, ...]]) -> None:
    operation = OPERATIONS[name]
    given = tensors(operation.names)
    kernel = choice(operation, given, chosen)
    assert kernel is not None
    values = operation.operands(given)
    with launches() as log:
        for away in [None, *(index for index, value in enumerate(values) if isinstance(value, Tensor))]:
            log.clear()
            arguments = [
                OnGpu(value, int(index == away)) if isinstance(value, Tensor) else value for index, value in enumerate(values)
            ]
            if away is None:
                assert host_function(*kernel)(*arguments) is None and log
            else:
                with pytest.raises(RuntimeError, match="device_id"):
                    host_function(*kernel)(*arguments)
                assert not log


@pytest.mark.parametrize("name", ["load", "fused", "store", "load_slots"])
def test_counts_beyond_32_bits_are_not_cut(name: str, chosen: list[tuple[Any, ...]]) -> None:
    """2**32 more tokens or segments than there are: no other count is launched instead."""
    operation = OPERATIONS[name]
    given = tensors(operation.names)
    kernel = choice(operation, given, chosen)
    assert kernel is not None
    with launches() as log:
        counted = {"load": ("segments",)}.get(name, ("kv", "slots", "positions", "out"))
        arguments = []
        for part, value in zip((*operation.names,), (given[part] for part in operation.names), strict=True):
            argument = OnGpu(value)
            if part in counted:
                argument.shape[0] += 2**32
            arguments.append((part, argument))
        by_name = dict(arguments)
        real = {id(value): part for part, value in given.items()}
        result = host_function(*kernel)(
            *(by_name[real[id(value)]] if isinstance(value, Tensor) else value for value in operation.operands(given))
        )
        assert result is not None or name in ("load_slots",)
        assert bool(log) == (name == "load_slots"), "64 bits throughout"
