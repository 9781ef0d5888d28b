"""The table of backends: four built-in manifests and those that other packages register; imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

from kvhal.interface import Backend, Reason, Request

ENTRY_POINT_GROUP = "kvhal.backends"

BUILTIN_BACKENDS: dict[str, str] = {
    "cuda_tilelang": "kvhal.backends.cuda_tilelang.manifest",
    "ascend_tilelang": "kvhal.backends.ascend_tilelang.manifest",
    "portable_triton": "kvhal.backends.portable_triton.manifest",
    "reference_torch": "kvhal.backends.reference_torch.manifest",
}


@lru_cache(maxsize=1)
def backends() -> Mapping[str, Backend]:
    """Every backend by name, the built-in ones first. Manifests only: no kernel language is imported."""
    table = {name: importlib.import_module(module).BACKEND for name, module in BUILTIN_BACKENDS.items()}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in table:
            raise ValueError(
                f"entry point {point.name} = {point.value} of group {ENTRY_POINT_GROUP}: the name is taken by another "
                f"backend; rename it (taken: {', '.join(table)})"
            )
        table[point.name] = _load(point)
    return MappingProxyType(table)


def reload() -> None:
    """Forgets the table and all that was bound from it, so that packages installed since are found."""
    from kvhal import config  # config.py checks names against this table and so imports this module

    backends.cache_clear()
    config.forget()


def _load(point: EntryPoint) -> Backend:
    """A registered backend; one that cannot be loaded stays in the table and says why it cannot serve."""
    try:
        backend = point.load()
    except (ImportError, AttributeError) as error:
        return _broken(point, f"{type(error).__name__}: {error}")
    if not isinstance(backend, Backend):
        return _broken(point, f"a {type(backend).__name__}")
    if backend.name != point.name:
        return _broken(point, f"a backend called {backend.name}")
    return backend


def _broken(point: EntryPoint, have: str) -> Backend:
    reason = Reason("entry point", f"{point.value}: {have}", f"a kvhal.interface.Backend called {point.name}")

    def check(request: Request) -> tuple[Reason, ...]:
        return (reason,)

    return Backend(point.name, f"entry point {point.value}", (), (), check)
