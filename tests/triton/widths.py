"""The widest store that a compiled kernel makes into a cache; run in processes in which Triton compiles."""

from __future__ import annotations

import os
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

BITS = re.compile(r"st\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)")


def widest_stores(names: list[str]) -> dict[str, dict[str, int]]:
    """Bytes of the widest global store of the store and fused kernels for sm_90, for few tokens and many, by operation and
    format name."""
    before = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            return dict(zip(names, pool.map(_widest, names), strict=True))
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def _widest(name: str) -> dict[str, int]:
    import torch
    import triton
    from triton.compiler import ASTSource

    from kvhal.backends.portable_triton.launch import Kernel
    from kvhal.backends.portable_triton.manifest import BACKEND
    from kvhal.interface import NormArgs, Op, Request
    from kvhal.layout import alloc_kv_cache
    from kvhal.platform import Platform
    from kvhal.testing.formats import CONFORMANCE_FORMATS
    from tests.triton.aot import specialise
    from tests.triton.calls import FEW, MANY

    layout, found = CONFORMANCE_FORMATS[name], {}
    cache, weight = alloc_kv_cache(1, 64, layout, "cpu"), torch.zeros(layout.elements)

    def read(kernel: Kernel, programs: int, *args: object) -> None:
        target, backend, options, bound, specialisation = specialise(kernel, args, "sm_90")
        facts = kernel.function._pack_args(backend, options, bound, specialisation, options)
        source = ASTSource(kernel.function, *facts[1:])
        assembly = triton.compile(source, target=target, options=facts[0].__dict__).asm["ptx"]
        widths = [int(count or 1) * int(bits) // 8 for count, bits in BITS.findall(assembly)]
        found[op.value] = max(*widths, found.get(op.value, 0))

    Kernel.__call__ = read  # type: ignore[method-assign]
    for op in (Op.STORE, Op.FUSED_STORE):
        launch = BACKEND.bind(Request(op, layout, Platform("cuda", "sm_90"), 64))
        for n in (FEW, MANY):
            kv, slots = torch.zeros(n, layout.elements, dtype=torch.bfloat16), torch.zeros(n, dtype=torch.int64)
            launch(kv, cache, slots) if op == Op.STORE else launch(kv, NormArgs(weight), None, None, cache, slots, None)
    return found
