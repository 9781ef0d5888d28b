"""Backends with other launch shapes than their tables': as if no call were a small one, or as a benchmark tries them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from kvhal import config
from kvhal.interface import Op
from kvhal.tuning import Shape

#: that have kernels for few tokens
OPS = {
    "cuda_tilelang": (
        Op.STORE,
        Op.LOAD,
        Op.FUSED_STORE,
        Op.CONVERT_INDEX,
        Op.INDEX_CAT,
        Op.EXPAND_SWA_INDEX,
        Op.DECODE_SWA_INDEX,
    ),
    "portable_triton": (Op.STORE, Op.LOAD, Op.LOAD_SLOTS, Op.FUSED_STORE),
}

#: kernel -> where its shape has the tokens, or the thread blocks of a table of indices, that are few
PLACES = {
    "cuda_tilelang": {"store": 2, "store_index": 2, "load_bulk": 2}
    | dict.fromkeys(("fused", "fused_index", "chunk", "chunk_index"), 4)
    | dict.fromkeys(("convert", "cat", "expand", "window"), 2),
    "portable_triton": {"store_few": 1, "load_few": 1, "slots_few": 1, "fused_few": 1},
}


@contextmanager
def shapes_changed(modules: tuple[Any, ...], change: Callable[[str, Shape], Shape]) -> Iterator[None]:
    """Inside, what these modules' `shape_of` returns for a kernel goes through ``change(kernel, shape)`` first."""

    def changed(shape_of: Callable[[str, str, str | None], Shape]) -> Callable[[str, str, str | None], Shape]:
        return lambda arch, kernel, dtype: change(kernel, shape_of(arch, kernel, dtype))

    config.forget()  # launchers keep their shapes
    try:
        with ExitStack() as patches:
            for module in modules:
                patches.enter_context(patch.object(module, "shape_of", changed(module.shape_of)))
            yield
    finally:
        config.forget()


@contextmanager
def no_call_is_small(backend: str) -> Iterator[None]:
    """Inside, a backend's table says that zero tokens are the most of a small call, and so for tables of indices.

    Raises:
        AssertionError: the table does not have the kernels whose shapes have such a number.
    """
    modules: tuple[Any, ...]
    if backend == "cuda_tilelang":
        from kvhal.backends.cuda_tilelang import fused, index, load, store
        from kvhal.backends.cuda_tilelang.tuned import TABLE

        modules = (fused, index, load, store)
    else:
        from kvhal.backends.portable_triton import launch
        from kvhal.backends.portable_triton.tuned import TABLE

        modules = (launch,)
    places = PLACES[backend]
    known = {kernel for kernel, _ in TABLE.defaults}
    assert known >= set(places), f"{backend}'s table has no {', '.join(set(places) - known)}"

    def without_few(kernel: str, shape: Shape) -> Shape:
        at = places.get(kernel)
        return shape if at is None else (*shape[:at], 0, *shape[at + 1 :])

    with shapes_changed(modules, without_few):
        yield


@contextmanager
def every_fused_store_is_a_chunk() -> Iterator[None]:
    """Inside, `cuda_tilelang`'s table says that its kernels for prefill chunks are for any number of tokens."""
    from kvhal.backends.cuda_tilelang import fused

    with shapes_changed((fused,), lambda kernel, shape: (*shape[:-1], 1 << 20 if kernel.startswith("chunk") else 0)):
        yield
