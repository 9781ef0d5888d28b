"""CUDA run without a GPU: kernels and device functions become C++, each PTX instruction in them a function of warp.h."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

HEADER = Path(__file__).with_name("warp.h")
COMPILE = ["g++", "-std=c++17", "-O0", "-w", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
TYPES = {"float": ctypes.c_float, "int": ctypes.c_int32, "int64_t": ctypes.c_int64}
KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(([^)]*)\) \{')
SHARED = 1 << 14  #: elements of an array in dynamic shared memory, enough for any kernel's


def as_cpp(text: str) -> str:
    """CUDA source as C++: hints (volatile ones) are left out, every other block of PTX becomes a block of calls."""
    text = re.sub(r"#include [^\n]*", "", text)
    text = re.sub(r"extern __shared__ ([^;]*)\[\];", rf"__shared__ \1[{SHARED}];", text)
    text = re.sub(r"asm volatile\(.*?\);", ";", text, flags=re.DOTALL)
    return re.sub(r'asm\(((?:\s*"[^"]*")+)\s*:([^:;]*):([^;]*)\);', _block, text)


def _block(match: re.Match[str]) -> str:
    body = "".join(re.findall(r'"([^"]*)"', match[1])).strip().removeprefix("{").removesuffix("}")
    operands = re.findall(r'"(=?)[a-z]"\(((?:[^()]|\([^()]*\))*)\)', f"{match[2]},{match[3]}")
    lines = [f"u32 ptx{i} = {'0' if out else f'bits({value})'};" for i, (out, value) in enumerate(operands)]
    for statement in filter(None, (part.strip() for part in body.split(";"))):
        name, _, rest = re.sub(r"%(\d+)", r"ptx\1", statement).partition(" ")
        if name == ".reg":
            lines.append(f"u32 {rest.split(maxsplit=1)[1]};")
        elif rest.startswith("{"):
            lower, upper, both = re.findall(r"\w+", rest)
            lines.append(f"{lower} = {both} & 0xFFFFu, {upper} = {both} >> 16;")
        else:
            into, given = rest.split(",", 1)
            lines.append(f"{into} = {name.replace('.', '_')}({given});")
    lines += [f"give({value}, ptx{i});" for i, (out, value) in enumerate(operands) if out]
    return "{ " + " ".join(lines) + " }"


class Programs:
    """Kernels compiled together.

    Args:
        sources: name -> CUDA source of one kernel, with its device functions in namespace ``kv``.
        folder: where to work.

    Raises:
        RuntimeError: g++ refused them.
    """

    def __init__(self, sources: Mapping[str, str], folder: Path) -> None:
        parts, self._types = [f'#include "{HEADER}"\nextern "C" int* off() {{ return &units_off; }}'], {}
        for name, source in sources.items():
            kernel = KERNEL.search(source)
            assert kernel is not None, f"{name}: no kernel in the source"
            parameters = [parameter.split() for parameter in kernel[2].split(", ")]
            text = re.sub(r"\bkv\b(?=::| \{|;)", f"kv_{name}", re.sub(rf"\b{kernel[1]}\b", f"{name}_kernel", as_cpp(source)))
            # of a pointer the first word is const, or ends with a star
            call = f"{name}_kernel({', '.join(words[-1] for words in parameters)})"
            head = f'extern "C" const char* {name}(int thread_blocks, int threads, {kernel[2]})'
            parts.append(f"{text}\n{head} {{ return run_grid(thread_blocks, threads, [=] {{ {call}; }}); }}")
            self._types[name] = [TYPES.get(words[0], ctypes.c_void_p) for words in parameters]
        unit, compiled, library = (folder / f"kernels.{kind}" for kind in ("cpp", "o", "so"))
        unit.write_text("\n".join(parts))
        # linked without -fsanitize: warp.h has what that calls
        for command in (
            [*COMPILE, "-fsanitize=alignment", "-c", "-o", compiled, unit],
            ["g++", "-shared", "-o", library, compiled],
        ):
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr[:4000])
        self._library = ctypes.CDLL(str(library))
        self._library.off.restype = ctypes.POINTER(ctypes.c_int)

    def run(self, name: str, thread_blocks: int, threads: int, *arguments: Any, units_off: int = 0) -> None:
        """Launches a kernel on CPU memory, and waits for it.

        Args:
            name, thread_blocks, threads: which, and how many of them.
            arguments: tensors, addresses, numbers.
            units_off: how far the hardware's estimates of reciprocals are off, in the last place.

        Raises:
            RuntimeError: an access was not aligned, or threads did not meet.
        """
        self._library.off()[0] = units_off
        function = self._library[name]
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_int, ctypes.c_int, *self._types[name]]
        given = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
        failure = function(thread_blocks, threads, *given)
        if failure is not None:
            raise RuntimeError(f"{name}: {failure.decode()}")


def simulated(factory: Callable[..., Any], *arguments: Any, folder: Path) -> Callable[..., Any]:
    """What `build.kernel` returns, on CPU memory: a kernel's host function, and what that launches."""
    from tests.compile.cuda_host import OnGpu, host_and_source, launches, register

    function, source = host_and_source(factory, *arguments)
    found = KERNEL.search(source)
    assert found is not None
    programs = Programs({"simulation": source}, folder)
    count = len(found[2].split(", "))

    def launch(*given: Any) -> None:
        programs.run("simulation", *given[count : count + 2], *given[:count])

    def call(*operands: Any) -> Any:
        with launches():
            register(found[1], launch)
            return function(*(OnGpu(value) if isinstance(value, Tensor) else value for value in operands))

    return call
