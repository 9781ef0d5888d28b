"""Cases of the fused store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvhal.formats import KVCacheFormat
from kvhal.interface import CastArgs, HadamardArgs, KVCacheOutArgs, NormArgs, Op, RopeArgs
from kvhal.testing import metadata
from kvhal.testing.cache_cases import block_sizes, blocks_for
from kvhal.testing.case import Case
from kvhal.testing.maker import Maker
from kvhal.testing.values import adversarial_rows, plain_rows

MAX_POSITION = 24


@dataclass(frozen=True)
class Fused:
    """What one case switches on."""

    norm: torch.dtype | None = None  #: the weight's dtype
    eps: float = 1e-6
    rope: int | None = None  #: share of the record in 1/8 that is rotated
    neox: bool = False
    offset: bool = False  #: an offset of its own, instead of the record's end
    hadamard: bool = False
    wide: bool = True  #: int64 slots and positions
    fp32: bool = False
    hostile: bool = False  #: adversarial values
    store: bool = True
    back: bool = False
    misaligned: bool = False
    tokens: int = 20  #: at most; each of the 19 patterns of adversarial values meets each group

    @property
    def stages(self) -> tuple[str, ...]:
        on = (("norm", self.norm is not None), ("rope", self.rope is not None), ("hadamard", self.hadamard))
        return tuple(name for name, switched in on if switched)


BF16, FP32 = torch.bfloat16, torch.float32

CASES: dict[str, Fused] = {
    "cast": Fused(hostile=True, back=True, wide=False, tokens=99),
    "norm": Fused(norm=BF16, hostile=True),
    "rope": Fused(rope=1, hostile=True, wide=False, misaligned=True),
    "neox": Fused(rope=2, neox=True, offset=True, fp32=True, back=True),
    "norm-rope": Fused(norm=FP32, eps=0.0, rope=1, fp32=True, back=True, wide=False, misaligned=True),
    "norm-rope-bf16": Fused(norm=BF16, eps=1e-5, rope=1),
    "back-only": Fused(norm=BF16, rope=8, hostile=True, store=False, back=True),
    "no-tokens": Fused(norm=BF16, rope=1, back=True, tokens=0),
    "hadamard": Fused(hadamard=True, hostile=True, back=True),
    "all": Fused(norm=FP32, rope=4, neox=True, hadamard=True, fp32=True, back=True),
    "all-bf16": Fused(norm=BF16, rope=2, hadamard=True, hostile=True, wide=False),
}


def fused_cases(layout: KVCacheFormat) -> list[Case]:
    """Cases of `fused_norm_rope_hadamard_cast_store_kvcache`; the Hadamard stage only where the format allows it."""
    first, second = block_sizes(layout)
    power = layout.elements & (layout.elements - 1) == 0
    found = []
    for number, (name, what) in enumerate(CASES.items()):
        if what.hadamard and not power:
            continue
        size = second if number % 4 == 3 else first
        known = size if what.store else None
        found.append(Case(Op.FUSED_STORE, layout, f"{name}-b{size}", _make(layout, size, what), known, what.stages))
    return found


def _make(layout: KVCacheFormat, size: int, what: Fused) -> Callable[[Maker], dict[str, Any]]:
    def make(maker: Maker) -> dict[str, Any]:
        arguments: dict[str, Any] = {"cast_args": CastArgs.for_layout(layout, cast_back=what.back)}
        blocks = blocks_for(10, size)
        slots = metadata.slots(maker.rng, blocks * size, 10, what.wide, unique=True)
        tokens = min(len(slots), what.tokens)
        arguments["kv"] = _input(maker, layout, tokens, what)
        if what.store:
            cache = maker.cache(layout, blocks, size, written=True)
            arguments["out_args"] = KVCacheOutArgs(cache, maker.place("slot_mapping", slots[:tokens]), layout)
        if what.norm is not None:
            arguments["norm_args"] = NormArgs(_weight(maker, layout.elements, what.norm), what.eps)
        if what.rope is not None:
            arguments["rope_args"] = _rope(maker, layout.elements, tokens, what)
        if what.hadamard:
            arguments["hadamard_args"] = HadamardArgs()
        return arguments

    return make


def _input(maker: Maker, layout: KVCacheFormat, tokens: int, what: Fused) -> torch.Tensor:
    """Rows with full fp32 mantissas, or bf16; adversarial ones hold NaN, Inf, zeros and numbers of every size."""
    rng, elements = maker.rng, layout.elements
    bits = adversarial_rows(rng, tokens, layout) if what.hostile else plain_rows(rng, tokens, elements)
    stride, skip = (elements + 1, 1) if what.misaligned else (elements, 0)
    if not what.fp32:
        return maker.place("kv", bits, dtype=torch.bfloat16, row_stride=stride, skip=skip)
    wide = bits.astype(np.uint32) << 16 | rng.integers(0, 2**16, bits.shape, dtype=np.uint32)
    if tokens > 4:  # some rows of numbers that overflow, vanish or are not numbers
        wide[0] = rng.integers(0, 2**32, elements, dtype=np.uint32)
        wide[1] = rng.integers(0, 2**23, elements, dtype=np.uint32)
        wide[2] = 0x7F000000 + rng.integers(0, 2**16, elements, dtype=np.uint32)
        wide[3] = 0x80000000
    return maker.place("kv", wide.view(np.float32), row_stride=stride, skip=skip)


def _weight(maker: Maker, elements: int, dtype: torch.dtype) -> torch.Tensor:
    weight = 1.0 + 0.25 * maker.rng.standard_normal(elements)
    values = torch.from_numpy(weight.astype(np.float32))
    return maker.place("norm_args.weight", values.to(dtype))


def _rope(maker: Maker, elements: int, tokens: int, what: Fused) -> RopeArgs:
    width = max(2, elements * (what.rope or 1) // 8 // 2 * 2)
    offset = (elements - width) // 2 if what.offset else None
    table = maker.rng.uniform(-1.0, 1.0, (MAX_POSITION, width)).astype(np.float32)
    cache = maker.place("rope_args.cos_sin_cache", table, row_stride=width + 3)
    bad = [-1, metadata.INT32_MIN, metadata.INT32_MAX, MAX_POSITION] + ([2**32, metadata.INT64_MIN] if what.wide else [])
    positions = maker.rng.integers(0, MAX_POSITION, tokens)
    if tokens > 2 * len(bad):
        positions[1 : 1 + 2 * len(bad) : 2] = bad
    positions = positions if what.wide else positions.astype(np.int32)
    return RopeArgs(maker.place("rope_args.positions", positions), cache, width, what.neox, offset)
