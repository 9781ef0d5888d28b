"""What the launchers of cuda_tilelang hand to their kernels, with kernels that only take notes: no compiler, no device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvhal
from kvhal.interface import HadamardArgs, Launcher, NormArgs, Op, Request, RopeArgs
from kvhal.platform import Platform

pytest.importorskip("tilelang")

from kvhal.backends.cuda_tilelang import build, fused, index, load, plan, store
from kvhal.backends.cuda_tilelang.tuned import shape_of

H100 = Platform("cuda", "sm_90")
BLOCK_SIZE = 4


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """(factory, its arguments, what the kernel got) of every launch."""
    found: list[tuple[Any, ...]] = []

    def kernel(factory: Callable[..., Any], *arguments: Any, platform: Platform, device: torch.device) -> build.Kernel:
        return lambda *given: found.append((factory, arguments, given))

    for module in (fused, index, load, plan, store):
        monkeypatch.setattr(module, "kernel", kernel)
    return found


def arguments(op: Op, shift: int) -> list[tuple[Any, ...]]:
    """Calls of an operation whose rows start `shift` elements off a multiple of 16 bytes."""

    def rows(n: int, columns: int = 512, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(n * columns + shift, dtype=dtype)[shift:].view(n, columns)

    cache, ints = kvhal.alloc_kv_cache(2, BLOCK_SIZE, kvhal.V41_FORMAT, "cpu"), torch.zeros((2, 4), dtype=torch.int32)
    slots, slots32 = torch.arange(3), torch.arange(3, dtype=torch.int32)
    norm, rope = NormArgs(torch.ones(512), 0.5), RopeArgs(slots, torch.ones(9, 64), 64)
    return {
        Op.STORE: [(rows(3), cache, slots), (rows(3), cache, slots32)],
        Op.LOAD: [(cache, ints, 3, rows(3), None)],
        Op.LOAD_SLOTS: [(cache, slots, rows(3)), (cache, slots32, rows(3))],
        Op.CONVERT_INDEX: [(ints.view(2, 1, 4), ints, ints[:, :1], 4)],
        Op.INDEX_CAT: [(ints, ints, 7, torch.zeros((2, 8), dtype=torch.int32))],
        Op.EXPAND_SWA_INDEX: [(ints, ints)],
        Op.DECODE_SWA_INDEX: [(ints[:, :2].contiguous(), 8, ints)],
        Op.EXPAND_LOAD_PLAN: [(torch.zeros((5, 5), dtype=torch.int32), ints, 4, rows(2, 4, torch.int32))],
        Op.FUSED_STORE: [
            (rows(3), norm, rope, None, cache, slots, rows(3)),
            (rows(3), None, None, HadamardArgs(), None, None, rows(3)),
            (rows(3), norm, None, None, cache, slots32, None),
        ],
    }[op]


BINDERS: dict[Op, Callable[[Request], Launcher]] = {
    Op.STORE: store.bind_store,
    Op.LOAD: load.bind_load,
    Op.LOAD_SLOTS: load.bind_load_slots,
    Op.CONVERT_INDEX: index.bind_convert_index,
    Op.INDEX_CAT: index.bind_index_cat,
    Op.EXPAND_SWA_INDEX: index.bind_expand_swa_index,
    Op.DECODE_SWA_INDEX: index.bind_decode_swa_index,
    Op.EXPAND_LOAD_PLAN: plan.bind_expand_load_plan,
    Op.FUSED_STORE: fused.bind_fused_store,
}


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("op", Op)
def test_a_prepared_launcher_does_what_the_launcher_does(op: Op, shift: int, log: list[tuple[Any, ...]]) -> None:
    launch: Any = BINDERS[op](Request(op, kvhal.V41_FORMAT, H100, BLOCK_SIZE))
    kernels = set()
    for given in arguments(op, shift):
        log.clear()
        launch(*given)
        launch.prepare(*given)(*(flat(*given) if op == Op.FUSED_STORE else given))
        (factory, static, first), (again, as_static, second) = log
        assert (factory, static) == (again, as_static)
        assert len(first) == len(second) and all(a is b or a == b for a, b in zip(first, second, strict=True))
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        assert all(any(tensor is value for value in first) for tensor in tensors), "as they are, none left out"
        kernels.add(static)
    assert len(kernels) == len(arguments(op, shift)), "each of these calls has a kernel of its own"


INDEX_NAMES = {
    Op.CONVERT_INDEX: "convert",
    Op.INDEX_CAT: "cat",
    Op.EXPAND_SWA_INDEX: "expand",
    Op.DECODE_SWA_INDEX: "window",
}


@pytest.mark.parametrize("op", INDEX_NAMES)
def test_a_large_table_is_written_several_entries_a_thread(op: Op, log: list[tuple[Any, ...]]) -> None:
    """By the size of the table that is written; the others are as large as they may be, or small."""
    threads, entries, few = shape_of("sm_90", INDEX_NAMES[op], None)
    launch = BINDERS[op](Request(op, None, H100, None))

    def tables(rows: int, width: int) -> tuple[Any, ...]:
        written, single = (torch.zeros(shape, dtype=torch.int32) for shape in ((rows, width), (rows, 1)))
        return {
            Op.CONVERT_INDEX: (written[None], torch.zeros((1, 1), dtype=torch.int32), single.view(1, rows), BLOCK_SIZE),
            Op.INDEX_CAT: (single, written[:, 1:], 7, written),
            Op.EXPAND_SWA_INDEX: (torch.zeros((rows, 4), dtype=torch.int32), written),
            Op.DECODE_SWA_INDEX: (torch.zeros((rows, 2), dtype=torch.int32), BLOCK_SIZE, written),
        }[op]

    for rows, width in ((few, threads), (1, few * threads), (few // 2, threads + 1), (few + 1, 1), (1, few * threads + 1)):
        launch(*tables(rows, width))
    assert [entry[1] for entry in log] == [(threads, each) for each in (1, 1, 1, entries, entries)]


def test_rows_off_their_alignment_get_another_kernel(log: list[tuple[Any, ...]]) -> None:
    for op in (Op.STORE, Op.LOAD, Op.LOAD_SLOTS, Op.EXPAND_LOAD_PLAN, Op.FUSED_STORE):
        launch = BINDERS[op](Request(op, kvhal.V41_FORMAT, H100, BLOCK_SIZE))
        log.clear()
        for shift in (0, 8, 1, 0):
            launch(*arguments(op, shift)[0])
        wide, eight, odd, last = (entry[1] for entry in log)
        assert wide == eight == last != odd


def flat(kv: Any, norm: Any, rope: Any, hadamard: Any, *into: Any) -> tuple[Any, ...]:
    """What a prepared fused store takes: tensors only, None for those that are left out."""
    turns = (None, None) if rope is None else (rope.positions, rope.cos_sin_cache)
    return (kv, None if norm is None else norm.weight, *turns, *into)


def test_a_fused_kernel_gets_the_tensors_of_this_call(log: list[tuple[Any, ...]]) -> None:
    """A prepared launcher keeps the number it was made with, and no tensor."""
    launch: Any = BINDERS[Op.FUSED_STORE](Request(Op.FUSED_STORE, kvhal.V41_FORMAT, H100, BLOCK_SIZE))
    kv, _, rope, _, cache, slots, back = arguments(Op.FUSED_STORE, 0)[0]
    for eps in (0.5, 10**20):
        prepared = launch.prepare(kv, NormArgs(torch.zeros(512), eps), rope, None, cache, slots, back)
        tensors = (kv.clone(), torch.zeros(512), slots.clone(), torch.zeros(9, 64), cache.clone(), slots.clone(), back)
        prepared(*tensors)
        first, *others = log[-1][2]
        assert type(first) is float and first == eps, "an int beyond 64 bits cannot be passed as one"
        assert all(have is need for have, need in zip(others, tensors, strict=True))
    launch(kv, None, None, HadamardArgs(), None, None, back)
    assert log[-1][2] == (0.0, kv, None, None, None, None, None, back)


def test_a_kernel_that_refuses_what_it_was_chosen_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It launched nothing, which nobody would notice."""
    for module in (fused, load, store):
        monkeypatch.setattr(module, "kernel", lambda *what, platform, device: lambda *given: 1)
    for op in (Op.STORE, Op.LOAD, Op.LOAD_SLOTS, Op.FUSED_STORE):
        launch = BINDERS[op](Request(op, kvhal.V41_FORMAT, H100, BLOCK_SIZE))
        for given in arguments(op, 0):
            with pytest.raises(RuntimeError, match="nothing was launched"):
                launch(*given)


def test_kernels_that_look_at_their_tensors_themselves(log: list[tuple[Any, ...]]) -> None:
    checked = {op for op in Op if getattr(BINDERS[op](Request(op, kvhal.V41_FORMAT, H100, BLOCK_SIZE)), "checks", False)}
    assert checked == {Op.STORE, Op.LOAD, Op.LOAD_SLOTS, Op.FUSED_STORE}
    assert not BINDERS[Op.LOAD](Request(Op.LOAD, kvhal.MXFP8_INDEX_KV_FORMAT, H100, BLOCK_SIZE)).checks  # type: ignore[attr-defined]


def main_format(elements: int, group: int, scale: Any = "ue8m0", dtype: Any = "e4m3") -> kvhal.KVCacheFormat:
    return kvhal.KVCacheFormat(dtype, elements, group, 0, True, scale, "a main format", token_interleaved=True)


@pytest.mark.parametrize(
    ("layout", "copied"),
    [
        (kvhal.V41_FORMAT, True),
        (kvhal.V41_FP4_FORMAT, True),
        (main_format(384, 32), False),  # 396 bytes
        (main_format(512, 64), False),  # 520 bytes
        (main_format(128, 32, "fp32"), False),  # 144 bytes, eight lanes
        (main_format(256, 16), False),  # 272 bytes, sixteen lanes
        (kvhal.BF16_FORMAT, False),
        (kvhal.MXFP8_INDEX_KV_FORMAT, False),
    ],
)
def test_records_that_a_warp_shares_are_copied_in_bulk(
    layout: kvhal.KVCacheFormat, copied: bool, log: list[tuple[Any, ...]]
) -> None:
    """Where there are many segments; all others, and all of few segments, are read by lanes."""
    (_, _, few) = shape_of("sm_90", "load_bulk", "e4m3")
    launch = BINDERS[Op.LOAD](Request(Op.LOAD, layout, H100, BLOCK_SIZE))
    cache, out = kvhal.alloc_kv_cache(2, BLOCK_SIZE, layout, "cpu"), torch.zeros((3, 16), dtype=torch.bfloat16)
    for count in (few // BLOCK_SIZE, few // BLOCK_SIZE + 1):
        launch(cache, torch.zeros((1, 4), dtype=torch.int32).expand(count, 4), 3, out, None)
    names = [factory.__name__ for factory, *_ in log]
    plain = "raw_kernel" if layout.is_index else "load_kernel"
    assert names == [plain, "load_bulk_kernel" if copied else plain]


def test_more_segments_than_a_grid_holds_are_refused(log: list[tuple[Any, ...]]) -> None:
    launch = BINDERS[Op.LOAD](Request(Op.LOAD, kvhal.V41_FORMAT, H100, BLOCK_SIZE))
    cache, out = kvhal.alloc_kv_cache(2, BLOCK_SIZE, kvhal.V41_FORMAT, "cpu"), torch.zeros((3, 512), dtype=torch.bfloat16)
    segments = torch.zeros((1, 4), dtype=torch.int32)
    most = (2**31 - 1) // BLOCK_SIZE
    launch(cache, segments.expand(most, 4), 3, out, None)
    with pytest.raises(ValueError, match=f"load_segments: has {most + 1} rows, .* takes {most} at a time; pass it in parts"):
        launch(cache, segments.expand(most + 1, 4), 3, out, None)
    assert len(log) == 1


@pytest.mark.parametrize("arch", ["sm_90", "an untuned one"])
@pytest.mark.parametrize("rows", ["bfloat16", "float32"])
def test_every_rotation_fits_into_shared_memory(arch: str, rows: str) -> None:
    """All of a row in Neox style, beside staged weights: what a launch has without asking for more."""
    for elements in range(8, 2048 + 8, 8):
        layout = kvhal.KVCacheFormat("e4m3", elements, 8, 0, True, "ue8m0", "", token_interleaved=True)
        stages = fused.Stages(rows, "float32", fused.Rope(0, elements, True, "int64"), False, "int64", False, 16)
        for _, shape, _ in fused.kernels_of(layout, arch):
            if shape != fused.FEW:
                octets, warps, held = fused.placement(layout, stages, shape)
                tokens, weights = octets.tokens_a_warp * warps, octets.lanes * octets.rounds * 8
                assert 4 * (tokens * elements + weights) <= 48 << 10, elements
                assert warps * held <= 8 or octets.rounds <= 4, "records of more octets a lane have the registers of several"
