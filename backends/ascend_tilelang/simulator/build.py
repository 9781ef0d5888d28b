"""From a TileLang function to a kernel that runs on CPU tensors."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import runtime, toolchain
from .arguments import device_capsule
from .errors import SimulatorUnavailable
from .source import explain_failure, translate

_CALLBACK = "tilelang_callback_ascend_compile"
_MARKER = "kvhal-ascend-simulation:"  # also in native/acl.cpp

# Files of one entry of the cache.
_ABOUT = "about.json"
_DEVICE_SOURCE = "device.asc"
_DEVICE_LIBRARY = "device.so"
_HOST_LIBRARY = "host.so"

_redirecting = threading.local()
_redirect_lock = threading.Lock()
_redirects = 0
_original: Any = None


@functools.cache
def _tilelang() -> Any:
    try:
        import tilelang
    except ImportError as error:
        raise SimulatorUnavailable(f"the Ascend simulator needs tilelang, which does not import: {error}") from error
    return tilelang


@contextmanager
def _redirected(compile_device: Callable[[str], str]) -> Iterator[None]:
    """Sends device code compiled by this thread to `compile_device`; other threads keep TileLang's compiler.

    The registration is shared by concurrent simulated builds and undone when the last one ends.
    """
    global _redirects, _original
    import tvm_ffi

    def dispatch(code: str, target: Any, pass_config: Any = None) -> Any:
        mine = getattr(_redirecting, "compile_device", None)
        return _original(code, target, pass_config) if mine is None else bytearray(mine(str(code)).encode())

    with _redirect_lock:
        if _redirects == 0:
            _original = tvm_ffi.get_global_func(_CALLBACK)
            tvm_ffi.register_global_func(_CALLBACK, f=dispatch, override=True)
        _redirects += 1
    _redirecting.compile_device = compile_device
    try:
        yield
    finally:
        _redirecting.compile_device = None
        with _redirect_lock:
            _redirects -= 1
            if _redirects == 0:
                tvm_ffi.register_global_func(_CALLBACK, f=_original, override=True)


class SimulatedKernel:
    """A kernel that runs in the simulator; made by `build`.

    Calling it takes the arguments of the TileLang function: CPU tensors of the declared shape, strides and dtype, which
    are read and written in place, and Python numbers for scalars. Returns None. Raises SimulatorFault when the kernel
    does what would be an error on the device, and RuntimeError when TileLang refuses the arguments.

    Attributes:
        name: name of the device kernel.
        source: the source that TileLang generated for the device, before translation.
    """

    def __init__(self, directory: Path, tensors: tuple[str, ...]) -> None:
        about = json.loads((directory / _ABOUT).read_text())
        self.name: str = about["kernel"]
        self.source: str = (directory / _DEVICE_SOURCE).read_text()
        self._tensors = tensors
        runtime.announce(about["key"], directory / _DEVICE_LIBRARY)
        self._main = _tilelang().tvm.runtime.load_module(str(directory / _HOST_LIBRARY))["main"]

    def __call__(self, *arguments: Any) -> None:
        import tvm_ffi

        tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
        if len(tensors) != len(self._tensors):
            raise ValueError(f"{self.name} takes {len(self._tensors)} tensors, got {len(tensors)}")
        for name, tensor in zip(self._tensors, tensors, strict=True):
            if tensor.device.type != "cpu":
                raise ValueError(f"{self.name}: argument {name} is on {tensor.device}, the simulator runs on CPU tensors")
        passed = [tvm_ffi.from_dlpack(device_capsule(a)) if isinstance(a, torch.Tensor) else a for a in arguments]
        runtime.launch(self.name, self._tensors, tensors, lambda: self._main(*passed))


def build(
    prim_func: Any,
    *,
    pass_configs: Mapping[str, Any] | None = None,
    sanitize: bool = False,
    mutate: Callable[[str], str] | None = None,
) -> SimulatedKernel:
    """Compiles a function of TileLang's Ascend dialect for the simulator, or loads it from the simulator's cache.

    Several threads may build at once; the compilers run outside the interpreter's lock.

    Args:
        prim_func: what `T.prim_func` made.
        pass_configs: as for `tilelang.compile`.
        sanitize: also report undefined behaviour of the C++ language, signed overflow for one.
        mutate: changes the generated device source before it is translated. For tests that plant a fault.

    Raises:
        SimulatorUnavailable: no compiler, no tilelang, or a real libascendcl in this process.
        UnsupportedSource: the function needs something that the simulator does not model.
        ValueError: `mutate` changed nothing, so that the fault would not be planted.
    """
    tilelang = _tilelang()
    runtime.library()
    configs = dict(pass_configs or {})
    options = repr(sorted((str(k), repr(v)) for k, v in configs.items()))
    key = toolchain.key_of(tilelang.__version__, tilelang.tvm.ir.save_json(prim_func), options, str(sanitize))
    buffers = [prim_func.buffer_map[p] for p in prim_func.params if p in prim_func.buffer_map]
    tensors = tuple(str(b.data.name) for b in buffers)
    genuine = toolchain.published(key, lambda stage: _Build(stage, key, tensors, sanitize).run(prim_func, configs))
    if mutate is None:
        return SimulatedKernel(genuine, tensors)
    source = (genuine / _DEVICE_SOURCE).read_text()
    changed = mutate(source)
    if changed == source:
        raise ValueError("mutate left the source as it was")
    other = toolchain.key_of(key, changed)
    make = functools.partial(_build_mutant, genuine=genuine, source=changed, key=other, builder=(tensors, sanitize))
    return SimulatedKernel(toolchain.published(other, make), tensors)


def _build_mutant(stage: Path, *, genuine: Path, source: str, key: str, builder: tuple[tuple[str, ...], bool]) -> None:
    """Same host code, other device code: only the key inside the marker differs, and both keys are equally long."""
    build_device = _Build(stage, key, *builder)
    build_device.start(source)
    host = (genuine / _HOST_LIBRARY).read_bytes()
    (stage / _HOST_LIBRARY).write_bytes(host.replace(genuine.name.encode(), key.encode()))
    build_device.finish()


class _Build:
    """One build into a staging directory."""

    def __init__(self, stage: Path, key: str, tensors: tuple[str, ...], sanitize: bool) -> None:
        self._stage, self._key, self._tensors = stage, key, tensors
        checks = (toolchain.UNDEFINED_BEHAVIOUR,) if sanitize else (toolchain.ALWAYS_CHECKED, "-fwrapv")
        self._flags = (*toolchain.KERNEL_FLAGS, *checks)
        self._kernel = ""
        self._device: toolchain.Compilation | None = None

    def run(self, prim_func: Any, configs: dict[str, Any]) -> None:
        # JITKernel rather than tilelang.compile: the same compilation, without TileLang's kernel cache, in which a host
        # library must never appear.
        with _redirected(self.start):
            kernel = _tilelang().JITKernel(prim_func, target="ascend", execution_backend="tvm_ffi", pass_configs=configs)
        kernel.adapter.get_exportable_executable().export_library(str(self._stage / _HOST_LIBRARY), fcompile=self._compile_host)
        self.finish()

    def start(self, code: str) -> str:
        """Starts g++ on the translated source, so that TileLang's work goes on meanwhile. Returns the marker."""
        (self._stage / _DEVICE_SOURCE).write_text(code)
        translation = translate(code, self._tensors)
        self._kernel = translation.kernel
        path = self._stage / "device.cpp"
        path.write_text(translation.text)
        includes = ("-I", toolchain.INCLUDE, "-I", _tilelang().env.TILELANG_TEMPLATE_PATH)
        command = (toolchain.compiler(), *self._flags, *includes, path, "-o", self._stage / _DEVICE_LIBRARY)
        self._device = toolchain.Compilation([*command, *toolchain.KERNEL_LIBRARIES])
        return _MARKER + self._key

    def finish(self) -> None:
        """Waits for g++ and completes the directory. Raises UnsupportedSource when it failed."""
        message = self._device.wait() if self._device is not None else "no device code was generated"
        if message is not None:
            raise explain_failure(self._kernel, message)
        (self._stage / _ABOUT).write_text(json.dumps({"kernel": self._kernel, "key": self._key}))

    def _compile_host(self, output: str, files: list[str], options: list[str] | None = None, **_: Any) -> None:
        # `-x c`: the generated host code is valid C, and its headers take a third of the time that they take as C++.
        command = [toolchain.compiler(), "-x", "c", "-O1", "-w", "-fPIC", "-shared", *(options or []), *files]
        message = toolchain.Compilation([*command, "-o", output]).wait()
        if message is not None:
            raise SimulatorUnavailable(f"TileLang's host code does not compile:\n{message}")
