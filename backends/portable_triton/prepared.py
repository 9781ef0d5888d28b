"""Launchers, and what they are asked to prepare for calls that are alike: only addresses and the stream are left to do."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from kvhal.backends.portable_triton.launch import DIVISOR, Kernel
from kvhal.interface import Launcher
from kvhal.operands import as_they_are
from kvhal.platform import Platform


def launcher(
    call_of: Callable[..., tuple[Any, ...]], platform: Platform, operands: Callable[..., tuple[Any, ...]] = as_they_are
) -> Launcher:
    """A launcher that can be asked to `prepare` ("Host time" in docs/adding_a_backend.md), except under Triton's interpreter.

    Args:
        call_of: a function of the launcher's arguments: kernel, programs, and what the kernel takes.
        platform: where it will run.
        operands: from the launcher's arguments to what a prepared one is called with.
    """

    def launch(*arguments: Any) -> None:
        kernel, *rest = call_of(*arguments)
        kernel(*rest)

    def prepare(*arguments: Any) -> Launcher:
        # objects of their own: one tensor may stand for two arguments now (positions and slots), and two for them later
        apart = [argument.detach() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
        kernel, programs, *taken = call_of(*apart)
        given = operands(*apart)
        sources = [_sources(operand, given) for operand in taken]
        if any(len(found) > 1 for found in sources):  # of views only, which a fused store does not pass
            return launch
        return prepared(kernel, programs, tuple(taken), tuple(found[0] if found else None for found in sources), len(given))

    if not platform.interpreted:
        launch.prepare = prepare
    return launch


def _sources(operand: Any, given: tuple[Any, ...]) -> list[int]:
    """Which of `given` an operand is, or may be a view of; none for a number."""
    if not isinstance(operand, torch.Tensor):
        return []
    found = [index for index, tensor in enumerate(given) if tensor is operand]
    tensors = [(index, tensor) for index, tensor in enumerate(given) if isinstance(tensor, torch.Tensor)]
    return found or [index for index, tensor in tensors if tensor.data_ptr() == operand.data_ptr()]


def prepared(kernel: Kernel, programs: int, operands: tuple[Any, ...], sources: tuple[int | None, ...], count: int) -> Launcher:
    """A function of `count` arguments that launches `kernel` again, for other tensors.

    Args:
        kernel, programs, operands: a launch.
        sources: for each operand the argument that it is then, or is a view of; None for a number.
        count: of the function's arguments.
    """
    dtypes = [getattr(operand, "dtype", None) for operand in operands]
    device = next(operand.device.index for operand in operands if isinstance(operand, torch.Tensor))
    numbers = tuple(operand if source is None else None for operand, source in zip(operands, sources, strict=True))

    def unaligned(*tensors: torch.Tensor) -> None:
        """Triton made other code for addresses that do not divide."""
        again = (
            number if source is None else tensors[source].view(dtype)
            for number, source, dtype in zip(numbers, sources, dtypes, strict=True)
        )
        kernel(programs, *again)

    built, values = kernel.built(device, operands)
    matter = tuple(
        aligned and source is not None and value % DIVISOR == 0
        for aligned, source, value in zip(kernel.aligned, sources, values, strict=True)
    )
    head = (kernel.grid(programs), 1, 1)
    fixed = (built.function, built.packed_metadata, None, None, None)
    make = _maker(count, sources, matter)
    return make(built.run, head, kernel.current_stream, device, fixed, numbers, kernel.constants, unaligned)


@lru_cache
def _maker(count: int, sources: tuple[int | None, ...], matter: tuple[bool, ...]) -> Callable[..., Launcher]:
    """What makes a launcher of `count` arguments, written out: a loop over operands takes twice as long.

    Args:
        count: of the launcher's arguments.
        sources: argument that an operand's address is of, None for a number.
        matter: whether the compiled code depends on the address dividing.
    """
    used = sorted({source for source in sources if source is not None})
    aligned = sorted({source for source, matters in zip(sources, matter, strict=True) if matters})
    given = ", ".join(f"g{index}" for index in range(count))
    operands = [f"n{at}" if source is None else f"p{source}" for at, source in enumerate(sources)]
    numbers = [f"    n{at} = numbers[{at}]" for at, source in enumerate(sources) if source is None]
    lines = [
        "def make(run, head, stream_of, device, fixed, numbers, constants, unaligned):",
        *numbers,
        f"    def launch({given}):",
        *(f"        p{index} = g{index}.data_ptr()" for index in used),
        *([f"        if ({' | '.join(f'p{index}' for index in aligned)}) % {DIVISOR}:"] if aligned else []),
        *([f"            return unaligned({given})"] if aligned else []),
        f"        run(*head, stream_of(device), *fixed, {', '.join(operands)}, *constants)",
        "    return launch",
    ]
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    made: Callable[..., Launcher] = scope["make"]
    return made
