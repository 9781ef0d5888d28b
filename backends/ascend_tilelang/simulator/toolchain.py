"""The host compiler, and the directory of what it has built.

Everything built is keyed by its source text, the headers, the flags and the compiler, and appears under its final name
only when complete, so that any number of processes may share the directory.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import SimulatorUnavailable

_ROOT = Path(__file__).parent
INCLUDE = _ROOT / "include"
NATIVE = _ROOT / "native"

# -ffp-contract=off: a fused multiply-add would round differently from the device code that was asked for.
# -fno-strict-aliasing: the generated code reinterprets values through pointer casts.
# -U_FORTIFY_SOURCE: the fortified longjmp rejects jumps between stacks.
_COMMON = ("-std=c++20", "-fPIC", "-shared", "-fno-strict-aliasing", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w")
# -O1: kernels run for milliseconds, so compile time dominates. Uninitialised locals hold a pattern, so that reading one
# gives the same wrong answer everywhere. Local arrays and divisions are always checked; they would otherwise corrupt or
# kill the process. -nodefaultlibs keeps the sanitizer's library out: ubsan.h has the entry points.
KERNEL_FLAGS = (
    *_COMMON,
    "-O1",
    "-fno-exceptions",
    "-fno-rtti",
    "-ftrivial-auto-var-init=pattern",
    "-fno-sanitize-recover=all",
    "-nodefaultlibs",
)
ALWAYS_CHECKED = "-fsanitize=bounds,integer-divide-by-zero"
UNDEFINED_BEHAVIOUR = "-fsanitize=undefined,bounds,integer-divide-by-zero,float-cast-overflow"
KERNEL_LIBRARIES = ("-lm", "-lc")


@functools.cache
def compiler() -> str:
    """Path of g++. Raises SimulatorUnavailable without one."""
    found = shutil.which("g++")
    if found is None:
        raise SimulatorUnavailable("the Ascend simulator needs g++, which is not on PATH")
    return found


@functools.cache
def fingerprint() -> str:
    """Digest of the compiler's version and of every header and runtime source of the simulator."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(version.encode())
    for path in sorted([*INCLUDE.rglob("*.h"), *NATIVE.iterdir()]):
        digest.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def key_of(*parts: str) -> str:
    """Cache key of the given parts together with `fingerprint()`."""
    text = "\0".join((fingerprint(), *parts))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cache_directory() -> Path:
    """Directory of simulated builds; created when missing. Separate from every kernel cache of TileLang."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(base) / "kvhal" / "ascend-sim"
    path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def staging() -> Iterator[Path]:
    """Temporary directory on the file system of the cache, so that its content can be renamed into place."""
    path = Path(tempfile.mkdtemp(prefix="tmp-", dir=cache_directory()))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def published(key: str, make: Callable[[Path], None]) -> Path:
    """Directory `key` of the cache, filled by `make(directory)` when it does not exist yet."""
    final = cache_directory() / key
    if final.is_dir():
        return final
    with staging() as stage:
        make(stage)
        try:
            stage.rename(final)
        except OSError:
            # Another process was faster; its content is the same. Anything else leaves no directory, and is an error.
            if not final.is_dir():
                raise
    return final


class Compilation:
    """One compiler run in the background."""

    def __init__(self, arguments: Sequence[str | Path]) -> None:
        command = [str(a) for a in arguments]
        environment = {**os.environ, "LC_ALL": "C"}  # messages are searched for names, so they must be untranslated
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)

    def wait(self) -> str | None:
        """None when it succeeded, otherwise what the compiler said."""
        message = self._process.communicate()[1]
        return None if self._process.returncode == 0 else message or f"exit status {self._process.returncode}"


def compile_runtime(directory: Path) -> None:
    """Builds the stand-in `libascendcl.so` in `directory`. Raises SimulatorUnavailable with the compiler's message."""
    # The soname makes TileLang's lookup of the real library find this one, once it is loaded.
    sources = sorted(NATIVE.glob("*.cpp"))
    flags = (*_COMMON, "-O2", "-Wl,-soname,libascendcl.so", "-I", str(INCLUDE))
    message = Compilation([compiler(), *flags, *sources, "-o", directory / "libascendcl.so", "-ldl"]).wait()
    if message is not None:
        raise SimulatorUnavailable(f"the runtime library of the Ascend simulator does not compile:\n{message}")
