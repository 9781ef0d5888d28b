"""Functional simulator of Ascend vector kernels on the CPU.

It executes the very source that TileLang generates for the device, through TileLang's own host code and runtime
module. Only the device compiler (g++ over small headers) and libascendcl are replaced. It finds wrong bytes, accesses
outside the bytes that the arguments own, misaligned wide accesses, divergent barriers and results that depend on the
order of threads. It does not model pipe synchronisation, caches, or the flushing of subnormal numbers, and says nothing
about speed.

    kernel = build(prim_func)
    kernel(cpu_tensor, other_cpu_tensor)
    with schedule("reverse"):
        kernel(cpu_tensor, other_cpu_tensor)
"""

from .build import SimulatedKernel, build
from .errors import SimulatorError, SimulatorFault, SimulatorUnavailable, UnsupportedSource
from .runtime import loaded, schedule

__all__ = [
    "SimulatedKernel",
    "SimulatorError",
    "SimulatorFault",
    "SimulatorUnavailable",
    "UnsupportedSource",
    "build",
    "loaded",
    "schedule",
    "why_unavailable",
]


def why_unavailable() -> str | None:
    """None when this process can simulate, otherwise the reason. Builds the runtime library on first use."""
    from .build import _tilelang
    from .runtime import library

    try:
        _tilelang()
        library()
    except SimulatorUnavailable as error:
        return str(error)
    return None
