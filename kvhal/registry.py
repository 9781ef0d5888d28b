"""The table of backends: four built-in manifests and those that other packages register; imported on first use."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from kvhal.interface import Backend, Reason, Request

log = logging.getLogger("kvhal")

ENTRY_POINT_GROUP = "kvhal.backends"

BUILTIN_BACKENDS: dict[str, str] = {
    "cuda_tilelang": "kvhal.backends.cuda_tilelang.manifest",
    "ascend_tilelang": "kvhal.backends.ascend_tilelang.manifest",
    "portable_triton": "kvhal.backends.portable_triton.manifest",
    "reference_torch": "kvhal.backends.reference_torch.manifest",
}


#: what importing a package and reading a manifest commonly raise; a package that does breaks itself alone
PACKAGE_ERRORS = (
    ImportError,
    AttributeError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    NameError,
    LookupError,
    ArithmeticError,
    AssertionError,
)


def backends() -> Mapping[str, Backend]:
    """Every backend by name, the built-in ones first. Manifests only: no kernel language is imported."""
    return _discover()[0]


def refused() -> tuple[Reason, ...]:
    """Why entry points of other packages are not in the table: their names cannot be used."""
    return _discover()[1]


@lru_cache(maxsize=1)
def _discover() -> tuple[Mapping[str, Backend], tuple[Reason, ...]]:
    table = {name: importlib.import_module(module).BACKEND for name, module in BUILTIN_BACKENDS.items()}
    found: dict[str, list[EntryPoint]] = {}
    reasons = []
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in BUILTIN_BACKENDS or not point.name.isidentifier():
            hint = "the built-in backend serves" if point.name in BUILTIN_BACKENDS else ""
            reasons.append(Reason("entry point", _text(point), "an identifier that no built-in backend has for a name", hint))
            log.warning("not registered: %s, %s", reasons[-1].have, hint or reasons[-1].need)
        else:
            found.setdefault(point.name, []).append(point)
    for name, points in found.items():
        if len(points) == 1:
            table[name] = _load(points[0])
        else:  # whichever came first would be a matter of chance
            table[name] = _broken(name, " and ".join(map(_text, points)), "one package that registers this name")
    return MappingProxyType(table), tuple(reasons)


def reload() -> None:
    """Forgets the table and all that was bound from it, so that packages installed since are found."""
    from kvhal import config  # config.py checks names against this table and so imports this module

    _discover.cache_clear()
    config.forget()


def _load(point: EntryPoint) -> Backend:
    """A registered backend; one that cannot be loaded stays in the table and says why it cannot serve."""
    need = f"a kvhal.interface.Backend called {point.name}"
    try:
        backend = point.load()
    except PACKAGE_ERRORS as error:
        return _broken(point.name, f"{_text(point)}: {type(error).__name__}: {error}", need)
    if not isinstance(backend, Backend):
        return _broken(point.name, f"{_text(point)}: a {type(backend).__name__}", need)
    if backend.name != point.name:
        return _broken(point.name, f"{_text(point)}: a backend called {backend.name}", need)
    return _guarded(backend)


def _text(point: EntryPoint) -> str:
    package = f" of {point.dist.name} {point.dist.version}" if point.dist else ""
    return f"{point.name} = {point.value}{package}"


def _guarded(backend: Backend) -> Backend:
    """The backend with a check that may fail: every decision asks every backend, and one bug must not stop them all."""

    def check(request: Request) -> tuple[Reason, ...]:
        try:
            return tuple(backend.check(request))
        except PACKAGE_ERRORS as error:
            return (
                Reason("check", f"{type(error).__name__}: {error}", "a check that raises nothing", "report it to its authors"),
            )

    return replace(backend, check=check)


def _broken(name: str, have: str, need: str) -> Backend:
    reason = Reason("entry point", have, need)

    def check(request: Request) -> tuple[Reason, ...]:
        return (reason,)

    return Backend(name, "an entry point that cannot be loaded", check)
