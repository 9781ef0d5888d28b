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
    """Inside, a backend's table says that zero tokens are the most of a small call; one of OPS has to be called.

    Raises:
        AssertionError: the backend asked its table for no shape that has such a number.
    """
    modules: tuple[Any, ...]
    if backend == "cuda_tilelang":
        from kvhal.backends.cuda_tilelang import fused, load, store

        modules = (fused, load, store)
        places = {"store": 2, "slots": 2, "slots_index": 2, "fused": 3}  # where the number is in a shape
    else:
        from kvhal.backends.portable_triton import launch

        modules = (launch,)
        places = {"store_few": 1, "slots_few": 1, "fused_few": 1}

    patched = 0

    def without_few(shape_of: Any) -> Any:
        def changed(arch: str, kernel: str, dtype: str | None) -> tuple[int, ...]:
            nonlocal patched
            shape: tuple[int, ...] = shape_of(arch, kernel, dtype)
            at = places.get(kernel)
            if at is None:
                return shape
            patched += 1
            return (*shape[:at], 0, *shape[at + 1 :])

        return changed

    patches = [patch.object(module, "shape_of", without_few(module.shape_of)) for module in modules]
    config.forget()
    for one in patches:
        one.start()
    try:
        yield
        assert patched, f"{backend}'s table has none of {', '.join(places)}"
    finally:
        for one in patches:
            one.stop()
        config.forget()
