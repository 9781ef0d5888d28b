"""A kernel's host function launches exactly what validation lets through and the launcher takes that very kernel for.

Public functions rely on it for calls like the one before (`kvhal.ops.repeated`, Call.checks). The oracle is a call that was
never made before: kvhal's validation and the launcher's choice, in Python, on the same tensors.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
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
from tests.compile.cuda_calls import MANY, TOKENS, Operation, Tensors, changes, load_of, moved, operations, tensors
from tests.compile.cuda_host import OnGpu, host_function, launches

LAYOUT, BLOCK_SIZE = kvhal.V41_FP4_FORMAT, 4
OPERATIONS = operations(LAYOUT)
H100 = Platform("cuda", "sm_90")
NOTHING = ("no kernel",)


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
PLAIN = (LAYOUT, BLOCK_SIZE)
CASES = [
    *product(("store", "load", "fused"), ["aligned"], [TOKENS, MANY], [PLAIN]),
    *product(("store", "load", "fused"), ["narrow"], [TOKENS], [PLAIN]),
    ("load_slots", "int32", TOKENS, PLAIN),
    ("store", "aligned", TOKENS, (kvhal.MXFP8_INDEX_KV_FORMAT, 1)),
    ("load", "aligned", TOKENS, (kvhal.BF16_FORMAT, 133)),
    ("load_slots", "aligned", TOKENS, (kvhal.BF16_FORMAT, 3)),
    ("fused", "int32", TOKENS, (kvhal.V41_FORMAT, 1)),
]


@pytest.mark.parametrize(("name", "base", "n", "cache"), CASES)
def test_the_host_function_takes_what_its_launcher_would_take_it_for(
    name: str, base: str, n: int, cache: tuple[kvhal.KVCacheFormat, int], chosen: list[tuple[Any, ...]]
) -> None:
    operation = operations(cache[0])[name]
    first = BASES[base](tensors(operation.names, *cache, n))
    kernel = choice(operation, first, chosen)
    assert kernel is not None
    function, taken, tried = host_function(*kernel), 0, 0
    generator = random.Random(name)
    singles = [(part, change) for part in operation.names for change in changes(first[part])]
    trials = [[]] + [[single] for single in singles] + [generator.sample(singles, 2) for _ in range(150)]
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
        for n in (1, 2, 1535, 1536, 1537, 8191, 8192, 8193, 8447, 8448, 8449, MANY):
            given = tensors(operation.names, *PLAIN, n)
            kernel = choice(operation, given, chosen)
            assert kernel is not None
            kernels[kernel] = host_function(*kernel)
            for other, function in kernels.items():
                assert took(function, operation, given, log) == (other == kernel), n
    assert len(kernels) == {"load_slots": 1, "fused": 3}.get(name, 2)


def test_another_number_of_rows_is_loaded_where_there_are_so_many(chosen: list[tuple[Any, ...]]) -> None:
    operation = OPERATIONS["load"]
    given = tensors(operation.names, *PLAIN)
    kernel, served = choice(operation, given, chosen), []
    assert kernel is not None
    with launches() as log:
        for total_k in (-(2**40), -1, 0, 1, 2, 3, 4, 2**31 - 1, 2**31, 2**40, 2**32 + 2):
            choose = choice(load_of(total_k, LAYOUT), given, chosen)
            assert took(host_function(*kernel), load_of(total_k, LAYOUT), given, log) == (choose in (kernel, NOTHING)), total_k
            served += [total_k] if choose == kernel else []
    assert served == [1, 2, 3]


def test_one_row_of_an_output_may_have_any_stride(chosen: list[tuple[Any, ...]]) -> None:
    operation = load_of(1, LAYOUT)
    given = tensors(operation.names, *PLAIN)
    kernel = choice(operation, given, chosen)
    assert kernel is not None
    with launches() as log:
        for stride in (0, 8, 512, 513, 1024):
            given["out"] = torch.zeros(2048, dtype=torch.bfloat16).as_strided((1, 512), (stride, 1))
            assert choice(operation, given, chosen) == kernel and took(host_function(*kernel), operation, given, log)


def test_a_launcher_is_never_refused_by_the_kernel_that_it_chose(chosen: list[tuple[Any, ...]]) -> None:
    """A fused store's rows that go back, and rows of fp32, lie as they like; the other kernel is not meant."""
    binder, kernels, calls = OPERATIONS["fused"].bind, {}, []
    launch = binder(Request(Op.FUSED_STORE, LAYOUT, H100, BLOCK_SIZE))
    weight, positions, turns, cache, slots = list(tensors(OPERATIONS["fused"].names, *PLAIN).values())[1:]
    for dtype, shift, stride in product((torch.bfloat16, torch.float32), (0, 1, 2, 4, 8), (512, 514, 516, 520, 513)):
        kv, back = (torch.zeros(4096, dtype=kind).as_strided((3, 512), (stride, 1), shift) for kind in (dtype, torch.bfloat16))
        for rows, given_back in ((kv, torch.zeros((3, 512)).bfloat16()), (torch.zeros((3, 512), dtype=dtype), back)):
            chosen.clear()
            norm, rope = kvhal.NormArgs(weight), kvhal.RopeArgs(positions, turns, 64)
            launch(rows, norm, rope, None, cache, slots, given_back)
            ((kernel, operands),) = chosen
            kernels[kernel] = host_function(*kernel)
            calls.append((kernel, operands))
    assert len(kernels) == 4
    with launches() as log:
        for kernel, operands in calls:
            for other, function in kernels.items():
                log.clear()
                given = [OnGpu(value) if isinstance(value, Tensor) else value for value in operands]
                try:
                    result = function(*given)
                except RuntimeError:
                    result = "raised"
                assert (result is None) == bool(log) == (other == kernel)


@pytest.mark.parametrize("name", OPERATIONS)
def test_tensors_of_several_devices_are_not_taken(name: str, chosen: list[tuple[Any, ...]]) -> None:
    operation = OPERATIONS[name]
    given = tensors(operation.names, *PLAIN)
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
    given = tensors(operation.names, *PLAIN)
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
