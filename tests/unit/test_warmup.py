"""After a warm-up, calls of the kinds that were named find everything built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvhal
from kvhal import CastArgs, FusedStages, HadamardArgs, KVCacheOutArgs, NormArgs, RopeArgs, warm
from kvhal.config import current
from kvhal.errors import CaptureError
from kvhal.interface import Backend, Launcher, Op, Request
from kvhal.layout import alloc_kv_cache

LAYOUT = kvhal.V41_FORMAT
KINDS = {
    "plain": FusedStages(),
    "norm, rope": FusedStages(norm=torch.bfloat16, rope_dim=64),
    "norm, rope, back": FusedStages(norm=torch.bfloat16, rope_dim=64, cast_back=True),
    "fp32 weight and rows": FusedStages(norm=torch.float32, rows=torch.float32),
    "neox from 0, int32": FusedStages(rope_dim=32, is_neox_style=True, offset=0, positions=torch.int32),
    "hadamard, not stored": FusedStages(hadamard=True, cast_back=True, store=False),
}


class Kernels:
    """A backend that builds as GPU backends do: one kernel for each combination of what their code depends on."""

    def __init__(self) -> None:
        self.built: set[Any] = set()
        self.binds: list[Request] = []
        self.capturing = False

    def bind(self, request: Request) -> Launcher:
        self.binds.append(request)

        def launch(*arguments: Any) -> None:
            key = (request.op, request.layout, request.block_size, *map(self.fact, arguments))
            if key not in self.built and self.capturing:
                raise CaptureError(f"{key} is not built")
            self.built.add(key)

        return launch

    @staticmethod
    def fact(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.shape[-1] if value.dim() > 1 else 0
        if isinstance(value, NormArgs):
            return value.weight.dtype
        if isinstance(value, RopeArgs):
            return value.positions.dtype, value.cos_sin_cache.stride(), value.rope_dim, value.is_neox_style, value.offset
        return type(value)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    made = Kernels()
    monkeypatch.setattr(Backend, "bind", lambda self, request: made.bind(request))
    kvhal.configure(backend="reference_torch")
    yield made
    kvhal.configure()


def call(kind: FusedStages, slot_dtype: torch.dtype, n: int = 5) -> None:
    """A fused store of a kind, on other sizes and values than a warm-up's."""
    cache = alloc_kv_cache(3, 4, LAYOUT, "cpu")
    rope = None
    if kind.rope_dim:
        positions, table = torch.arange(n, dtype=kind.positions), torch.ones(9, kind.rope_dim)
        rope = RopeArgs(positions, table, kind.rope_dim, kind.is_neox_style, kind.offset)
    kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
        torch.ones((n, 512), dtype=kind.rows),
        norm_args=NormArgs(torch.ones(512, dtype=kind.norm), 1e-5) if kind.norm else None,
        rope_args=rope,
        hadamard_args=HadamardArgs() if kind.hadamard else None,
        cast_args=CastArgs.for_layout(LAYOUT, cast_back=kind.cast_back),
        out_args=KVCacheOutArgs(cache, torch.arange(n, dtype=slot_dtype), LAYOUT) if kind.store else None,
    )


@pytest.mark.parametrize("name", KINDS)
def test_a_captured_fused_store_of_a_named_kind_builds_nothing(name: str, kernels: Kernels) -> None:
    kvhal.warmup(["fused_norm_rope_hadamard_cast_store_kvcache"], layouts=[LAYOUT], block_size=4, fused=[KINDS[name]])
    binds, kernels.capturing = len(kernels.binds), True
    for slot_dtype in (torch.int32, torch.int64):
        call(KINDS[name], slot_dtype)
    assert len(kernels.binds) == binds == 1
    for other, kind in KINDS.items():
        if other != name:
            with pytest.raises(CaptureError):
                call(kind, torch.int64)


def test_several_kinds_at_once(kernels: Kernels) -> None:
    kvhal.warmup(layouts=[LAYOUT], block_size=4, fused=iter(KINDS.values()))
    kernels.capturing = True
    for kind in KINDS.values():
        call(kind, torch.int64)
    assert {request.op for request in kernels.binds} == set(Op)


def test_a_warmup_makes_calls_of_every_size(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a GPU has kernels for few tokens and for many, each operation is called with both, by slots of both kinds."""
    seen: dict[Op, set[tuple[int, torch.dtype]]] = {op: set() for op in Op}

    def bind(request: Request) -> Launcher:
        def launch(*given: Any) -> None:
            place = {Op.STORE: 2, Op.FUSED_STORE: 5, Op.CONVERT_INDEX: 2}.get(request.op, 0 if request.layout is None else 1)
            sized = given[place]
            rows = sized.shape[1] if request.op == Op.CONVERT_INDEX else sized.shape[0]
            seen[request.op].add((rows * (4 if request.op == Op.LOAD else 1), sized.dtype))

        return launch

    monkeypatch.setattr(kernels, "bind", bind)
    monkeypatch.setattr(warm, "_counts", lambda device: (1, 70))
    kvhal.warmup(layouts=[LAYOUT], block_size=4)
    slots = {(count, dtype) for count in (1, 70) for dtype in (torch.int32, torch.int64)}
    tables = {(1, torch.int32), (70, torch.int32)}
    assert [seen[op] for op in (Op.STORE, Op.LOAD_SLOTS, Op.FUSED_STORE)] == [slots] * 3
    assert seen[Op.LOAD] == {(4, torch.int32), (72, torch.int32)}, "segments of four tokens"
    assert all(seen[op] == tables for op in (Op.CONVERT_INDEX, Op.INDEX_CAT, Op.EXPAND_SWA_INDEX, Op.DECODE_SWA_INDEX))


def test_without_any_kind_no_fused_store_is_built(kernels: Kernels) -> None:
    kvhal.warmup(layouts=[LAYOUT], fused=[])
    assert Op.FUSED_STORE not in {request.op for request in kernels.binds}


def test_the_reference_is_bound_for_each_set_of_stages() -> None:
    kvhal.configure(backend="reference_torch")
    kvhal.warmup([Op.FUSED_STORE], layouts=[LAYOUT], block_size=4, fused=KINDS.values())
    bound = {entry[1:] for entry in current().table}
    assert {(entry[1], entry[3]) for entry in bound} == {
        (4, ()),
        (4, ("norm", "rope")),
        (4, ("norm",)),
        (4, ("rope",)),
        (None, ("hadamard",)),
    }


def test_one_of_each_will_do(kernels: Kernels) -> None:
    kvhal.warmup(Op.FUSED_STORE, layouts=LAYOUT, block_size=4, fused=KINDS["norm, rope"])
    assert [(request.op, request.layout) for request in kernels.binds] == [(Op.FUSED_STORE, LAYOUT)]
    for arguments, message in (
        ({"layouts": 3}, "layouts: has a int"),
        ({"layouts": "V41_FORMAT"}, "layouts: has a str"),
        ({"fused": None}, "fused: has a NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            kvhal.warmup(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="op: has 3, needs one of store_kv_cache"):
        kvhal.warmup(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (FusedStages(store=False), "out_args: has None"),
        (FusedStages(rope_dim=63), "rope_args.rope_dim: has 63"),
    ],
)
def test_kinds_that_cannot_be_called_are_refused_as_the_call_is(kind: FusedStages, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvhal.warmup([Op.FUSED_STORE], layouts=[LAYOUT], fused=[kind])
