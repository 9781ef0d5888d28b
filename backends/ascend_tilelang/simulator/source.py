"""Translation of the source that TileLang generates into C++ for the host.

The translation is small on purpose: the statements stay TileLang's. Qualified pointers become checked pointer classes,
and an entry function that unpacks the launch arguments is added.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import UnsupportedSource

_KERNEL = re.compile(r'extern "C" __global__ (__\w+__)(?:\([^)]*\))? void (\w+)\(([^)]*)\)')
_POINTER = re.compile(r"__(gm|ubuf)__\s+(?:const\s+)?([A-Za-z_][\w:]*)\s*\*(?:\s*__restrict__)?")
_PARAMETER = re.compile(r"(?:kvsim::gm_ptr<([\w:]+)>|([A-Za-z_]\w*))\s*(\w+)")
_INCLUDE = re.compile(r"^#include <([^>]+)>$", re.MULTILINE)
_PROVIDED = {f"tl_templates/ascend/{name}.h" for name in ("common", "debug", "dcache_bypass")}
_COOPERATIVE = re.compile(r"\basc_(?:syncthreads|shfl\w*|reduce_\w+)\b|\btl::AscendAllReduce\b")
_MISSING = (
    re.compile(r"error: '(?P<name>[\w:]+)' (?:was not declared|has not been declared|does not name a type)"),
    re.compile(r"error: '(?P<name>[\w:]+)' is not a member of"),
    re.compile(r"fatal error: (?P<name>\S+): No such file"),
)


@dataclass(frozen=True)
class Translation:
    """Host source of one kernel and the name under which the runtime looks it up."""

    kernel: str
    text: str


def translate(source: str, tensors: Sequence[str]) -> Translation:
    """Host C++ for the device source of one kernel.

    Args:
        source: what TileLang generated.
        tensors: names of the kernel's tensor arguments, in the order in which their extents are announced.

    Raises:
        UnsupportedSource: for more or less than one kernel, for one that needs the Cube, for an unknown header.
    """
    for header in _INCLUDE.findall(source):
        if header not in _PROVIDED:
            raise UnsupportedSource(f"the simulator does not provide the header <{header}>")
    kernels = _KERNEL.findall(source)
    if len(kernels) != 1:
        raise UnsupportedSource(f"expected one kernel in the generated source, found {len(kernels)}")
    core, name, _ = kernels[0]
    if core != "__vector__":
        raise UnsupportedSource(f"kernel {name} runs on {core.strip('_')} cores; only vector kernels are simulated")
    checked = _POINTER.sub(lambda m: f"kvsim::{'gm' if m[1] == 'gm' else 'ub'}_ptr<{m[2]}>", source)
    match = _KERNEL.search(checked)
    parameters = [p.strip() for p in match[3].split(",") if p.strip()] if match else []
    definitions = (
        f"#define KVSIM_COOPERATIVE {int(bool(_COOPERATIVE.search(source)))}\n"
        f"#define KVSIM_REDUCE {int('tl::AscendAllReduce' in source)}\n"
    )
    return Translation(name, definitions + checked + _entry(name, parameters, tensors))


def _entry(kernel: str, parameters: Sequence[str], tensors: Sequence[str]) -> str:
    reads = []
    for position, parameter in enumerate(parameters):
        match = _PARAMETER.fullmatch(parameter)
        if match is None:
            raise UnsupportedSource(f"kernel {kernel} takes a parameter that the simulator cannot pass: {parameter}")
        pointee, scalar, name = match.groups()
        if pointee is None:
            reads.append(f"  auto a{position} = arguments.scalar<{scalar}>();\n")
        elif name in tensors:
            reads.append(f"  auto a{position} = arguments.pointer<{pointee}>({list(tensors).index(name)});\n")
        else:
            raise UnsupportedSource(f"kernel {kernel}: no argument is named like its pointer parameter {name!r}")
    passed = ", ".join(f"a{i}" for i in range(len(parameters)))
    return (
        f'\nextern "C" __attribute__((visibility("default"))) void kvsim_entry_{kernel}(kvsim::Launch *launch) {{\n'
        "  kvsim::launch = launch;\n"
        "  launch->machine = &kvsim::machine;\n"
        "  kvsim::ArgumentReader arguments;\n"
        f"{''.join(reads)}"
        f"  kvsim::for_each_block([&] {{ {kernel}({passed}); }});\n"
        "}\n"
    )


def explain_failure(kernel: str, message: str) -> UnsupportedSource:
    """Error for compiler output: names the intrinsic or header that the simulator lacks, when that is the cause."""
    for pattern in _MISSING:
        found = pattern.search(message)
        if found is not None:
            return UnsupportedSource(f"kernel {kernel} uses {found['name']}, which the simulator does not model")
    return UnsupportedSource(f"the translated source of kernel {kernel} does not compile:\n{message}")
