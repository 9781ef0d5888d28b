"""As if no call were a small one: cases of a few tokens through the kernels for many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from kvhal import config
from kvhal.interface import Op

OPS = (Op.STORE, Op.LOAD_SLOTS, Op.FUSED_STORE)  #: that have kernels for few tokens


@contextmanager
def no_call_is_small(backend: str) -> Iterator[None]:
    """Inside, a backend's table says that zero tokens are the most of a small call: the last number of these shapes."""
    modules: dict[Any, tuple[str, ...]]
    if backend == "cuda_tilelang":
        from kvhal.backends.cuda_tilelang import fused, store

        modules = {store: ("store",), fused: ("fused",)}
    else:
        from kvhal.backends.portable_triton import launch

        modules = {launch: ("store_few", "fused_few", "slots_few")}

    def without_few(shape_of: Any, kernels: tuple[str, ...]) -> Any:
        def changed(arch: str, kernel: str, dtype: str | None) -> tuple[int, ...]:
            shape: tuple[int, ...] = shape_of(arch, kernel, dtype)
            return (*shape[:-1], 0) if kernel in kernels else shape

        return changed

    patches = [patch.object(module, "shape_of", without_few(module.shape_of, names)) for module, names in modules.items()]
    config.forget()
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()
        config.forget()
