"""From a bound kernel to a launch: few specialisations, none of them compiled under graph capture, little host time.

Triton's own launch path binds and hashes every argument on every call. Here a call only looks at what may change the
compiled code: the dtypes of pointers, and whether pointers and strides divide by 16 (and strides of 1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver
from triton.runtime.errors import OutOfResources, PTXASError

from kvhal.backends.portable_triton.record import Record, power_of_two
from kvhal.backends.portable_triton.tuned import MAX_WARPS, shape_of
from kvhal.errors import BackendFailure, CaptureError
from kvhal.interface import Reason
from kvhal.platform import Platform, current_index, is_capturing
from kvhal.tuning import MULTIPROCESSORS

#: Triton's one notion of alignment: an argument divides by it, or not
DIVISOR = 16
FIRST_DEPENDENT = 90  #: programmatic dependent launch came with sm_90
#: Grids of at most so many programs let the next kernel start before they wait for the one in front of them: 0.1 us less a
#: launch. Programs of later kernels, which wait, take up places, so that a grid lies evenly only where every multiprocessor
#: gets as many; larger ones are for kernels that may get programs without work.
FEW_PROGRAMS, FEW_EVEN_PROGRAMS = MULTIPROCESSORS, 4 * MULTIPROCESSORS
LINE = tl.constexpr(128)  #: bytes of rows to a prefetch: a line of L2
INTERPRETER = Lock()  #: Triton's interpreter keeps the running program in globals
COMPILE_ERRORS = (CompilationError, OutOfResources, PTXASError, RuntimeError)


@triton.jit
def await_producers(early: tl.constexpr):
    """To be called before a kernel reads or writes anything; `early` is `Kernel`'s."""
    if early > 0:  # written out: with calls of the two halves loads of index records take a register more
        if tl.num_programs(0) <= early:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def let_next_start(early: tl.constexpr):
    """The first half of `await_producers`, for kernels that have something to do between the two."""
    if early > 0 and tl.num_programs(0) <= early:
        gdc_launch_dependents()


@triton.jit
def await_previous(early: tl.constexpr):
    """The second half of `await_producers`."""
    if early > 0:
        gdc_wait()


@triton.jit
def prefetch_rows(early: tl.constexpr, rows, exists, width: tl.constexpr, elements: tl.constexpr):
    """Brings rows to L2 before `await_previous`, where the next kernel may start early. A hint, which reads nothing: kernels in
    front may still be writing the rows.

    Args:
        rows, exists: pointers [T], and whether there is such a row; programs without one would all ask for the same lines.
        width: a power of two >= elements.
        elements: of a row.
    """
    if early > 0 and tl.num_programs(0) <= early:
        item: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
        lines: tl.constexpr = (width * item + LINE - 1) // LINE
        element = tl.minimum(tl.arange(0, lines) * (LINE // item), elements - 1)
        prefetch(rows[:, None] + element[None, :], exists[:, None])


@triton.jit
def prefetch(addresses, wanted):
    """Asks for the lines at pointers. Not pure, so that the compiler neither drops it nor moves it behind a wait."""
    asm: tl.constexpr = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; } // dummy $0"
    tl.inline_asm_elementwise(asm, "=r,l,r", [addresses, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1)


class Kernel:
    """A jit function with its compile-time constants, compiled once for each (device, dtypes, alignments).

    Args:
        function: the jit function; its run-time parameters come first, then the constants, then `early`: programs of a grid up
            to which the next kernel may start early; 0 where no kernel is launched before the one in front of it has ended.
        constants: the values of its other constexpr parameters, in order.
        num_warps: warps a program.
        platform: where it will run; it says whether launches can be dependent.
        even: small grids may get programs that find nothing to do, so that they lie evenly.

    Attributes:
        compiled: specialisation -> compiled kernel.
    """

    def __init__(
        self, function: Any, constants: tuple[Any, ...], num_warps: int, platform: Platform, *, even: bool = False
    ) -> None:
        dependent = (platform.sm() or 0) >= FIRST_DEPENDENT and not platform.interpreted
        self.function = function
        self.evenly = even and dependent
        self.constants = (*constants, (FEW_EVEN_PROGRAMS if even else FEW_PROGRAMS) if dependent else 0)
        self.options: dict[str, Any] = {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False}
        if dependent:
            self.options["launch_pdl"] = True
        self.compiled: dict[tuple[Any, ...], Any] = {}
        self.read: Callable[..., Any] | None = None
        self.current_device: Callable[[], int] | None = None
        self.current_stream: Callable[[int], int] | None = None
        self.interpreted = not isinstance(function, triton.JITFunction)
        if not self.interpreted:
            dynamic = function.params[: len(function.params) - len(self.constants)]
            self.aligned = [not (p.do_not_specialize or p.do_not_specialize_on_alignment) for p in dynamic]

    def __call__(self, programs: int, *args: Any) -> None:
        """Launches `programs` programs on the current device and its current stream.

        Raises:
            CaptureError: the kernel for these arguments is not compiled yet and a graph is being captured.
            BackendFailure: it does not compile, or does not fit the device.
        """
        if self.interpreted:
            with INTERPRETER, np.errstate(all="ignore"):  # what overflows or is no number is meant to
                self.function[(programs,)](*args, *self.constants)
            return
        if self.current_device is None:
            self.current_device = current_index("cuda")
        device = self.current_device()
        kernel, values = self.built(device, args)
        stream = self.current_stream(device)
        head = (self.grid(programs), 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None)
        kernel.run(*head, *values, *self.constants)

    def built(self, device: int, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """The compiled kernel for these arguments on a device, the current one if it is yet to be compiled; they as numbers."""
        if self.current_stream is None:
            self.current_stream = driver.active.get_current_stream
        key, values = self.key(device, args)
        kernel = self.compiled.get(key)
        if kernel is None:
            kernel = self.compiled[key] = self._compile(args)
        return kernel, values

    def grid(self, programs: int) -> int:
        """So many programs, and those that let a small grid lie evenly."""
        return programs + -programs % MULTIPROCESSORS if self.evenly and programs <= FEW_EVEN_PROGRAMS else programs

    def key(self, device: int, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """All that the compiled code depends on, at least as fine as Triton's own key; and the arguments as numbers."""
        if self.read is None:
            kinds = tuple(type(value) if type(value) in (int, float) else torch.Tensor for value in args)
            self.read = _reader(kinds, tuple(self.aligned))
        return self.read(device, *args)

    def _compile(self, args: tuple[Any, ...]) -> Any:
        device = next(value.device for value in args if isinstance(value, torch.Tensor))
        name = self.function.fn.__name__
        if is_capturing(device):
            raise CaptureError(f"{name} is not compiled for these arguments; call kvhal.warmup before capturing a graph")
        try:
            kernel = self.function.warmup(*args, *self.constants, grid=(1,), **self.options)
            kernel._init_handles()
        except COMPILE_ERRORS as error:
            raise BackendFailure(Reason("compilation", f"{name}: {error}", "a kernel that compiles and fits")) from error
        return kernel


@lru_cache
def _reader(kinds: tuple[type, ...], aligned: tuple[bool, ...]) -> Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """A function (device, *args) -> (key, numbers) for parameters of these kinds, written out: a loop takes twice as long.

    Args:
        kinds: int, float or torch.Tensor; a parameter is always of one of them.
        aligned: whether the compiled code depends on a number, or an address, being a multiple of DIVISOR.
    """
    names = [f"a{i}" for i in range(len(kinds))]
    lines, key, values = [], ["device"], []
    for name, kind, matters in zip(names, kinds, aligned, strict=True):
        value = name
        if kind is torch.Tensor:
            value = f"{name}_address"
            lines.append(f"    {value} = {name}.data_ptr()")
            key.append(f"{name}.dtype")
        if matters and kind is not float:
            key.append(f"{value} % {DIVISOR} == 0")
        if matters and kind is int:
            key.append(f"{value} == 1")  # Triton folds ones into the code
        values.append(value)
    source = "\n".join(
        (f"def read(device, {', '.join(names)}):", *lines, f"    return ({', '.join(key)},), ({', '.join(values)},)")
    )
    scope: dict[str, Any] = {}
    exec(source, scope)
    return scope["read"]


def few_shape(kernel: str, record: Record, platform: Platform) -> tuple[int, int]:
    """Tokens of a call up to which each gets a program of its own, and its warps; `kernel` is a name in tuned.py.

    0 tokens under the interpreter, which runs one program after another.
    """
    elements, most = shape_of(platform.arch, kernel, None if record.dtype == "bf16" else record.dtype)
    return 0 if platform.interpreted else most, min(MAX_WARPS, max(1, record.tile // elements))


def launch_shape(kernel: str, record: Record, arch: str) -> tuple[int, int]:
    """Tokens a program and its warps; `kernel` is a name in tuned.py."""
    size, least, warps = shape_of(arch, kernel, None if record.dtype == "bf16" else record.dtype)
    columns = power_of_two(record.data_bytes) if kernel == "raw" else record.tile
    return max(least, size // columns), min(max(MAX_WARPS, warps), warps * max(1, columns // size))
