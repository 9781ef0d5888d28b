"""From a kernel to something callable: the device compiler on an NPU, the simulator on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvhal.errors import BackendFailure
from kvhal.interface import Reason, Request

THREADS = 256  #: of a SIMT region
#: cores that a simulated launch spreads its work over: few, so that every kernel's loop over its tiles is executed
SIMULATED_CORES = 3

PASS_CONFIGS: dict[str, Any] = {
    # The kernels check every index themselves, which the simulator verifies; a second, generated check would hide a
    # missing one.
    "tl.disable_safe_memory_legalize": True,
    # The kernels place their barriers themselves. The compiler's own would also land inside branches that only some of
    # the threads take, where the others never arrive.
    "tl.disable_thread_storage_sync": True,
}


@dataclass(frozen=True)
class Compiler:
    """What makes kernels for one kind of device.

    Attributes:
        build: from a TileLang function to a callable.
        cores: vector cores to spread a launch over.
    """

    build: Callable[[Any], Callable[..., None]]
    cores: int

    def kernel(self, factory: Callable[..., Any], *constants: Any) -> Callable[..., None]:
        """The kernel that `factory(*constants)` describes, built on first use in this process."""
        return _kernel(self.build, factory, *constants)


@cache
def _kernel(build: Callable[[Any], Callable[..., None]], factory: Callable[..., Any], *constants: Any) -> Callable[..., None]:
    return build(factory(*constants))


def compiler_of(request: Request) -> Compiler:
    """What compiles kernels for a request.

    Raises:
        BackendFailure: the simulator is missing here, or the device is wanted after simulating; carries the reason.
    """
    from kvhal.backends.ascend_tilelang import simulator

    if request.platform.kind == "cpu":
        why = simulator.why_unavailable()
        if why is not None:
            raise BackendFailure(Reason("simulator", why, "g++ and tilelang", "see docs/ascend.md"))
        return Compiler(_simulated, SIMULATED_CORES)
    if simulator.loaded():
        have = "this process has simulated, and its runtime library stands in for the real one"
        raise BackendFailure(Reason("process", have, "a process of its own for the device"))
    return Compiler(_native, _vector_cores())


def _simulated(prim_func: Any) -> Callable[..., None]:
    from kvhal.backends.ascend_tilelang import simulator

    return simulator.build(prim_func, pass_configs=PASS_CONFIGS)


def _native(prim_func: Any) -> Callable[..., None]:
    import tilelang

    # A fused multiply-add rounds once where the specification rounds twice.
    configs = {**PASS_CONFIGS, "tl.device_compile_flags": ["-ffp-contract=off"]}
    kernel: Callable[..., None] = tilelang.compile(
        prim_func, target="ascend", execution_backend="tvm_ffi", pass_configs=configs
    )
    return kernel


def _vector_cores() -> int:
    import torch

    properties = torch.npu.get_device_properties(torch.npu.current_device())  # type: ignore[attr-defined]
    return int(getattr(properties, "vector_core_num", 64))
