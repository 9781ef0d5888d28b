"""What the machine is, as a frozen value, and the little that depends on a device type. The only file naming torch.cuda/npu."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform as host
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvhal.interface import Reason


@dataclass(frozen=True)
class Module:
    """An importable distribution: its version, or why it cannot be imported."""

    name: str
    version: str | None
    error: str | None = None


@dataclass(frozen=True)
class Platform:
    """A device and the software around it. Frozen: any machine can be faked in a test.

    Attributes:
        kind: "cpu", "cuda", "rocm", "npu", or another torch device type.
        arch: "sm_90", "gfx942", "ascend950", or the CPU's name.
        device_name: as the driver calls it.
        modules: the languages and torch, with versions or errors.
        tools: programs on PATH that backends need, name -> path.
        interpreted: Triton kernels run in Triton's interpreter (TRITON_INTERPRET=1).
        simulate: functional simulators may serve CPU tensors.
        failures: (backend, reason) pairs met while binding on this machine.
    """

    kind: str
    arch: str
    device_name: str = ""
    modules: tuple[Module, ...] = ()
    tools: tuple[tuple[str, str], ...] = ()
    interpreted: bool = False
    simulate: bool = False
    failures: tuple[tuple[str, Reason], ...] = ()

    def module(self, name: str) -> Module:
        """The module's facts; one that was not looked for counts as not installed."""
        return next((m for m in self.modules if m.name == name), Module(name, None, "not installed"))

    def tool(self, name: str) -> str | None:
        """Path of a program, None when it is not there."""
        return dict(self.tools).get(name)

    def sm(self) -> int | None:
        """CUDA compute capability as a number (90 for sm_90), None on anything else."""
        digits = self.arch.removeprefix("sm_") if self.kind == "cuda" else ""
        return int(digits) if digits.isdecimal() else None

    def with_simulation(self, simulate: bool) -> Platform:
        return self if simulate == self.simulate else replace(self, simulate=simulate)


LANGUAGES = ("torch", "numpy", "triton", "tilelang", "torch_npu")
TOOLS = ("nvcc", "bisheng", "g++")


def detect(device: torch.device | str = "cpu") -> Platform:
    """The platform of a torch device. Imports nothing and initialises no device but the one asked for."""
    return _detect(torch.device(device))


@lru_cache(maxsize=64)
def _detect(device: torch.device) -> Platform:
    kind, arch, name = _device_facts(device)
    return Platform(
        kind=kind,
        arch=arch,
        device_name=name,
        modules=tuple(_module(module) for module in LANGUAGES),
        tools=tuple((tool, path) for tool in TOOLS if (path := _find_tool(tool))),
        interpreted=os.environ.get("TRITON_INTERPRET") == "1",
    )


def _device_facts(device: torch.device) -> tuple[str, str, str]:
    if device.type == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
        if torch.version.hip:
            return "rocm", str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0], name
        major, minor = torch.cuda.get_device_capability(device)
        return "cuda", f"sm_{major}{minor}", name
    if device.type == "npu" and hasattr(torch, "npu") and torch.npu.is_available():
        name = str(torch.npu.get_device_name(device))
        return "npu", name.lower(), name
    if device.type == "cpu":
        return "cpu", host.machine(), host.processor() or host.machine()
    return device.type, "not available", "not available"


def _find_tool(name: str) -> str | None:
    found = shutil.which(name)
    if found is None and name == "nvcc":
        home = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc")
        found = home if os.access(home, os.X_OK) else None
    return found


def _module(name: str) -> Module:
    try:
        if importlib.util.find_spec(name) is None:
            return Module(name, None, "not installed")
        return Module(name, importlib.metadata.version(name))
    except (ImportError, ValueError) as error:
        return Module(name, None, f"{type(error).__name__}: {error}")


def available_devices() -> list[torch.device]:
    """Every device torch can use here, the CPU first."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if hasattr(torch, "npu") and torch.npu.is_available():
        devices += [torch.device("npu", index) for index in range(torch.npu.device_count())]
    return devices


def is_capturing(device: torch.device) -> bool:
    """The device's current stream is being captured into a graph: nothing may be compiled now."""
    return device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def capture(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A function that repeats what `run` launches: a replayed CUDA graph where there are graphs, `run` itself elsewhere.

    `run` must have run before, so that everything it needs is built.
    """
    if device.type != "cuda":
        return run
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def usable_device(device: torch.device | str) -> torch.device:
    """A device of this machine; "meta", which every machine has, is one.

    Raises:
        ValueError: it is no device's name, or this machine has none of its kind, or not so many.
    """
    try:
        found = torch.device(device)
        kind = None if found.type == "meta" else torch.get_device_module(found)
        usable = kind is None or (kind.is_available() and (found.index or 0) < kind.device_count())
    except (RuntimeError, TypeError, AttributeError):
        usable = False
    if not usable:
        raise ValueError(f"device: has {device!r}, needs a torch device of this machine, such as 'cpu'")
    return found


def device_guard(device: torch.device) -> AbstractContextManager[Any] | None:
    """A context that makes `device` current, None when a launch needs none (one device, or the CPU)."""
    if device.type == "cuda":
        return torch.cuda.device(device)
    if device.type == "npu":
        return torch.npu.device(device)  # type: ignore[no-any-return, attr-defined]
    return None


def current_index(kind: str) -> Callable[[], int]:
    """What tells the index of the current device of a kind that has several, "cuda" or "npu"."""
    if kind == "npu":
        return torch.npu.current_device  # type: ignore[no-any-return, attr-defined]
    # torch.cuda.current_device asks first whether CUDA has been initialised: tensors lie there already
    return getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def on_device(launch: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`launch` with `device` made current around it where more than one device exists; `launch` itself otherwise.

    So are the launchers that `launch.prepare` returns, where it has one; what they return is passed on. One that looks at its
    tensors itself (`launch.checks`) is not asked about tensors of another device, which it may not tell from its own.
    """
    if device.type != "npu" and not (device.type == "cuda" and torch.cuda.device_count() > 1):
        return launch
    current = current_index(device.type)
    index = device.index
    checks = getattr(launch, "checks", False)

    def there(run: Callable[..., Any], told: bool) -> Callable[..., Any]:
        def guarded(*arguments: Any) -> Any:
            if told and arguments[0].get_device() != index:
                return False
            if current() == index:
                return run(*arguments)
            with device_guard(device):  # type: ignore[union-attr]
                return run(*arguments)

        return guarded

    guarded: Any = there(launch, told=False)
    prepare = getattr(launch, "prepare", None)
    if prepare is not None:

        def prepare_there(*arguments: Any) -> Callable[..., Any]:
            with device_guard(device):  # type: ignore[union-attr]
                return there(prepare(*arguments), told=checks)

        guarded.prepare, guarded.checks = prepare_there, checks
    return guarded  # type: ignore[no-any-return]
