"""What portable_triton prepares for calls that are alike launches what the launcher does, with the addresses of those calls."""

from __future__ import annotations

import gc
import os
import weakref
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvhal.formats import BUILTIN_FORMATS
from kvhal.interface import FORMAT_OPS, NormArgs, Op, Request, RopeArgs
from kvhal.layout import alloc_kv_cache
from kvhal.platform import Platform
from kvhal.tuning import MULTIPROCESSORS

VARIANTS = ("", "few", "hadamard-back")  #: see `format_call`


def test_prepared_launches_are_those_of_the_launcher() -> None:
    """In a process in which Triton does not interpret; nothing is compiled or launched."""
    before = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found = pool.submit(compare_all).result()
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before
    assert found.pop("few loads")
    assert len(found) == len(FORMAT_OPS) * len(BUILTIN_FORMATS) * len(VARIANTS) + len(Op) - len(FORMAT_OPS)
    assert [name for name, same in found.items() if not same] == []


def compare_all() -> dict[str, bool]:
    """Call -> whether a prepared launcher passes on what the launcher does, of other tensors and at other addresses too."""
    from kvhal.backends.portable_triton import launch
    from kvhal.backends.portable_triton.manifest import BACKEND
    from tests.triton.calls import FEW, MANY, format_call, index_call

    patch = pytest.MonkeyPatch()
    seen: list[tuple[Any, ...]] = []

    def compiled(kernel: launch.Kernel, args: tuple[Any, ...]) -> SimpleNamespace:
        function = (id(kernel), kernel.key(0, args)[0])
        return SimpleNamespace(run=lambda *given: seen.append(given), function=function, packed_metadata="metadata")

    patch.setattr(launch.Kernel, "_compile", compiled)
    patch.setattr(
        launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: ("stream", device)))
    )
    patch.setattr(launch, "current_index", lambda kind: lambda: None)  # what a CPU tensor says of its device

    def agree(op: Op, layout: Any, make: Any) -> bool:
        launcher: Any = BACKEND.bind(Request(op, layout, Platform("cuda", "sm_90"), 64 if layout else None))
        first: list[Any] = []
        make(lambda *given: first.extend(given))
        before = [together(argument, first) for argument in (moved(argument, 0) for argument in first)]
        kept = [weakref.ref(argument) for argument in before if isinstance(argument, torch.Tensor)]
        prepared = launcher.prepare(*before)
        del before
        gc.collect()
        if any(tensor() is not None for tensor in kept):
            return False
        for shift in (0, 1):
            later = [moved(argument, shift) for argument in first]
            seen.clear()
            launcher(*later)
            prepared(*flat(op, *later))
            want, have = seen
            if want != have:
                return False
        return True

    found = {"few loads": programs_of_loads(BACKEND, seen) == [few_programs(4), 132]}
    for op in Op:
        if op not in FORMAT_OPS:
            found[str(op)] = agree(op, None, lambda record, op=op: index_call(op, record))
            continue
        for name, layout in BUILTIN_FORMATS.items():
            for variant in VARIANTS:
                count = FEW if variant == "few" else MANY
                found[f"{op}/{name}/{variant}"] = agree(
                    op, layout, lambda record, *a, o=op, y=layout, v=variant, n=count: format_call(o, record, y, v, n)
                )
    patch.undo()
    return found


def programs_of_loads(backend: Any, seen: list[tuple[Any, ...]]) -> list[int]:
    """Programs of loads of 256 and of 320 tokens, the most that may be few and more; blocks have 64."""
    layout = BUILTIN_FORMATS["V41_FORMAT"]
    launcher = backend.bind(Request(Op.LOAD, layout, Platform("cuda", "sm_90"), 64))
    cache, found = alloc_kv_cache(3, 64, layout, "cpu"), []
    for count in (4, 5):
        seen.clear()
        segments, out = torch.zeros((count, 4), dtype=torch.int32), torch.zeros((1, 512), dtype=torch.bfloat16)
        launcher(cache, segments, 1, out, None)
        found.append(seen[0][0])
    return found


def few_programs(segments: int) -> int:
    """One a token, and as many more as let them lie evenly."""
    return -(-segments * 64 // MULTIPROCESSORS) * MULTIPROCESSORS


def together(argument: Any, arguments: list[Any]) -> Any:
    """Positions and slots as one tensor, as they are of a first sequence in a new cache."""
    if (
        isinstance(argument, RopeArgs)
        and isinstance(arguments[5], torch.Tensor)
        and argument.positions.dtype == arguments[5].dtype
    ):
        return replace(argument, positions=arguments[5])
    return argument


def moved(argument: Any, shift: int) -> Any:
    """Another tensor of the same kind; of integers it starts `shift` elements behind an address that divides by 64."""
    if isinstance(argument, NormArgs):
        return replace(argument, weight=moved(argument.weight, shift))
    if isinstance(argument, RopeArgs):
        tensors = (moved(tensor, shift) for tensor in (argument.positions, argument.cos_sin_cache))
        return replace(argument, **dict(zip(("positions", "cos_sin_cache"), tensors, strict=True)))
    if not isinstance(argument, torch.Tensor):
        return argument
    size, item = argument.untyped_storage().nbytes(), argument.element_size()
    storage = torch.zeros(size + 64 + shift * item, dtype=torch.uint8)
    begin = -storage.data_ptr() % 64 + (shift * item if argument.dtype in (torch.int32, torch.int64) else 0)
    return storage[begin : begin + size].view(argument.dtype).as_strided(argument.shape, argument.stride())


def flat(op: Op, *arguments: Any) -> tuple[Any, ...]:
    if op != Op.FUSED_STORE:
        return arguments
    kv, norm, rope, _, *into = arguments
    turns = (None, None) if rope is None else (rope.positions, rope.cos_sin_cache)
    return (kv, None if norm is None else norm.weight, *turns, *into)
