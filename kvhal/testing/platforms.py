"""Made-up machines: platforms as `detect` would describe them, with everything installed that the backends there need."""

from __future__ import annotations

from kvhal.platform import Module, Platform

VERSIONS = {"torch": "2.13.0", "numpy": "2.4.6", "triton": "3.6.0", "tilelang": "0.1.15", "torch_npu": "2.9.0"}
PATHS = {"nvcc": "/usr/local/cuda/bin/nvcc", "g++": "/usr/bin/g++", "bisheng": "/usr/local/Ascend/bin/bisheng"}


def machine(kind: str, arch: str, *names: str, interpreted: bool = False, simulate: bool = False) -> Platform:
    """A platform with torch and numpy, and the named modules and tools; all other modules are not installed.

    Args:
        kind: "cpu", "cuda", "rocm", "npu".
        arch: "sm_90", "gfx942", "ascend950", ...
        names: out of `VERSIONS` and `PATHS`.
        interpreted: Triton's interpreter is on.
        simulate: simulators may serve.

    Raises:
        KeyError: a name is in neither table.
    """
    modules = tuple(Module(name, VERSIONS[name]) for name in ("torch", "numpy", *(n for n in names if n not in PATHS)))
    tools = tuple((name, PATHS[name]) for name in names if name in PATHS)
    return Platform(kind, arch, arch, modules, tools, interpreted, simulate)


#: the columns of the support matrix
PLATFORMS: dict[str, Platform] = {
    "cpu": machine("cpu", "x86_64"),
    "cpu+interpreter": machine("cpu", "x86_64", "triton", interpreted=True),
    "cpu+simulator": machine("cpu", "x86_64", "tilelang", "g++", simulate=True),
    "sm_80": machine("cuda", "sm_80", "triton", "tilelang", "nvcc", "g++"),
    "sm_90": machine("cuda", "sm_90", "triton", "tilelang", "nvcc", "g++"),
    "sm_100": machine("cuda", "sm_100", "triton", "tilelang", "nvcc", "g++"),
    "gfx942": machine("rocm", "gfx942", "triton", "tilelang", "g++"),
    "gfx950": machine("rocm", "gfx950", "triton", "tilelang", "g++"),
    "ascend950": machine("npu", "ascend950", "tilelang", "torch_npu", "bisheng", "g++"),
    "ascend910b": machine("npu", "ascend910b", "tilelang", "torch_npu", "bisheng", "g++"),
}
