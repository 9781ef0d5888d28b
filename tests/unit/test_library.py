"""The torch.library operators: schemas, fakes, and compiled code that equals eager byte for byte."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

import kvhal
from kvhal import Op
from kvhal.config import current
from kvhal.layout import sf_output
from kvhal.testing.case import PUBLIC
from tests.faults.calls import Change, good
from tests.faults.test_refuse_fused import part
from tests.unit.hot_calls import CALLS

OPS = torch.ops.kvhal
FORMATS = [*kvhal.SUPPORTED_KV_CACHE_FORMATS, kvhal.BF16_FORMAT]
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def cache_of(layout: kvhal.KVCacheFormat, blocks: int = 4, block_size: int = 16) -> torch.Tensor:
    cache = kvhal.alloc_kv_cache(blocks, block_size, layout, "cpu")
    cache.view(torch.uint8).random_(0, 120)
    return cache


def rows_of(layout: kvhal.KVCacheFormat, n: int = 5) -> torch.Tensor:
    return torch.randn(n, layout.elements, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16)


def int32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def name_of(layout: kvhal.KVCacheFormat) -> str:
    return kvhal.formats.format_to_text(layout)


@pytest.mark.parametrize("layout", FORMATS, ids=str)
def test_opcheck_store_and_loads(layout: kvhal.KVCacheFormat) -> None:
    cache, text = cache_of(layout), name_of(layout)
    slots = torch.tensor([3, -1, 17, 63, 8], dtype=torch.int64)
    torch.library.opcheck(OPS.store_kv_cache, (rows_of(layout), cache, slots, text), test_utils=CHECKS)
    torch.library.opcheck(
        OPS.load_kv_slots, (cache, slots, torch.zeros(5, layout.elements, dtype=torch.bfloat16), text), test_utils=CHECKS
    )
    out = kvhal.ops.cache.new_load_output(layout, 7, torch.device("cpu"))
    out.kv.zero_()
    data = out.kv.view(torch.uint8) if out.kv.dtype == torch.float8_e4m3fn else out.kv
    arguments = (cache, int32([2, 0, 4, 0], [-1, 0, 3, 4]), 7, data, out.sf, text)
    torch.library.opcheck(OPS.load_paged_kv_cache, arguments, test_utils=CHECKS)


def test_opcheck_index_operations() -> None:
    topk = torch.arange(12, dtype=torch.int32).view(1, 2, 6)
    torch.library.opcheck(OPS.convert_kv_index, (topk, int32([5, 0, 2]), int32([4, 6]), 4), test_utils=CHECKS)
    left, right = int32([0, 1], [2, -1]), int32([0, -1, 3], [4, 5, -1])
    out = torch.zeros(2, 5, dtype=torch.int32)
    torch.library.opcheck(OPS.kv_index_cat, (left, right, 7, 2, out), test_utils=CHECKS)
    torch.library.opcheck(OPS.expand_swa_index, (int32([3, 2, 9, 1]), torch.zeros(1, 6, dtype=torch.int32)), test_utils=CHECKS)
    windows = (int32([6, 3], [-1, 0]), 8, torch.zeros(2, 4, dtype=torch.int32))
    torch.library.opcheck(OPS.get_kv_swa_index_decode, windows, test_utils=CHECKS)
    spans = (int32([0, 0, 0, 3, 9], [3, 6, -1, 0, 2]), int32([5, 0, 2]), 4, torch.zeros(4, 4, dtype=torch.int32))
    torch.library.opcheck(OPS.expand_load_plan, spans, test_utils=CHECKS)


@pytest.mark.parametrize("layout", [kvhal.V41_FORMAT, kvhal.V41_FP4_FORMAT, kvhal.BF16_FORMAT], ids=str)
def test_opcheck_fused(layout: kvhal.KVCacheFormat) -> None:
    cast = kvhal.CastArgs.for_layout(layout)
    angles = torch.randn(32, 64)
    arguments = (
        rows_of(layout),
        torch.rand(512),
        1e-6,
        torch.arange(5),
        angles,
        [64, 0, 448],
        True,
        cast.fmt,
        cast.num_per_channels,
        cast.round_sf,
        cast.sf_format,
        cache_of(layout),
        torch.tensor([3, -1, 17, 63, 8]),
        name_of(layout),
        torch.zeros(5, 512, dtype=torch.bfloat16),
    )
    torch.library.opcheck(OPS.fused_norm_rope_hadamard_cast_store_kvcache, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("layout", FORMATS, ids=str)
def test_compiled_store_then_load_equals_eager(layout: kvhal.KVCacheFormat) -> None:
    def step(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, segments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kvhal.store_kv_cache(kv, cache, slots, layout=layout)
        loaded = kvhal.load_paged_kv_cache(cache, segments, kv.shape[0], layout=layout)
        return loaded.kv, kvhal.load_kv_slots(cache, slots, layout=layout), *(() if loaded.sf is None else (loaded.sf,))

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 9):
        expected, actual = cache_of(layout), cache_of(layout)
        actual.copy_(expected)
        slots = torch.randperm(64, generator=torch.Generator().manual_seed(n))[:n]
        segments = int32([1, 0, n, 0])
        want, have = (
            step(rows_of(layout, n), expected, slots, segments),
            compiled(rows_of(layout, n), actual, slots, segments),
        )
        assert torch.equal(expected.view(torch.uint8), actual.view(torch.uint8))
        for a, b in zip(want, have, strict=True):
            assert a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if layout.is_index:
            assert have[-1].dtype == sf_output(layout)[0]


def test_compiled_index_and_fused_equal_eager() -> None:
    layout = kvhal.V41_FORMAT

    def step(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, topk: torch.Tensor) -> tuple[torch.Tensor, ...]:
        back = kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
            kv,
            norm_args=kvhal.NormArgs(torch.ones(512)),
            rope_args=kvhal.RopeArgs(slots, torch.ones(64, 64), 64),
            hadamard_args=kvhal.HadamardArgs(),
            cast_args=kvhal.CastArgs.for_layout(layout, cast_back=True),
            out_args=kvhal.KVCacheOutArgs(cache, slots, layout),
        )
        kvhal.convert_kv_index(topk, int32([3, 1]), int32([3]), 16)
        windows = kvhal.get_kv_swa_index_decode(int32([6, 3]), 4, 8)
        dense = kvhal.expand_swa_index(int32([0, 2, 9, 1]), 4)
        plan = kvhal.expand_load_plan(int32([0, 0, 0, 3, 9]), int32([5, 0, 2]), 4, 3)
        return back, windows, kvhal.kv_index_cat(windows, dense, 3, 4), plan, topk

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    slots = torch.tensor([3, -1, 17, 63, 8])
    expected = cache_of(layout)
    actual = kvhal.alloc_kv_cache(4, 16, layout, "cpu").copy_(expected)
    topk = torch.tensor([[[0, 17, 40, 2]]], dtype=torch.int32)
    want = step(rows_of(layout), expected, slots, topk.clone())
    have = compiled(rows_of(layout), actual, slots, topk.clone())
    assert torch.equal(expected, actual)
    for a, b in zip(want, have, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def given(**changes: Any) -> Change:
    return lambda _: changes


#: calls that eager refuses, and that a schema would take: it makes ints of bools, and None leaves a stage out
REFUSED: dict[str, tuple[Op, Change]] = {
    "store, layout": (Op.STORE, given(layout="")),
    "load, sf_format": (Op.LOAD, given(sf_format="fp32")),
    "load, total_k": (Op.LOAD, given(total_k=True)),
    "load, uint8": (Op.LOAD, lambda c: {"out": kvhal.KVCacheTensors(c["out"].kv.view(torch.uint8), c["out"].sf)}),
    "load, list": (Op.LOAD, given(out=[])),
    "slots, layout": (Op.LOAD_SLOTS, given(layout=False)),
    "convert": (Op.CONVERT_INDEX, given(block_size=True)),
    "cat": (Op.INDEX_CAT, given(total_k_swa_cur=True)),
    "expand": (Op.EXPAND_SWA_INDEX, given(width=9)),
    "decode, window_size": (Op.DECODE_SWA_INDEX, given(window_size=9)),
    "decode, swa_block_size": (Op.DECODE_SWA_INDEX, given(swa_block_size=True)),
    "plan": (Op.EXPAND_LOAD_PLAN, given(num_segments=6)),
    "fused, hadamard_args": (Op.FUSED_STORE, given(hadamard_args=False)),
    "fused, nothing to do": (Op.FUSED_STORE, given(out_args=None)),
    **{
        f"fused, {field} {value!r}": (Op.FUSED_STORE, part(name, **{field: value}))
        for name, field, value in (
            ("norm_args", "eps", True),
            ("norm_args", "weight", None),
            ("rope_args", "is_neox_style", "0"),
            ("rope_args", "is_neox_style", 2),
            ("rope_args", "offset", True),
            ("rope_args", "positions", None),
            ("cast_args", "cast_back", "x"),
            ("cast_args", "round_sf", 1),
            ("out_args", "kv_cache", None),
            ("out_args", "layout", "V41_FORMAT"),
        )
    },
}


@pytest.mark.parametrize("what", REFUSED)
def test_compiled_refuses_what_eager_refuses(what: str) -> None:
    op, change = REFUSED[what]
    call = good(op, kvhal.MXFP8_INDEX_KV_FORMAT if op == Op.LOAD else kvhal.V41_FORMAT)
    arguments = {**call.arguments, **change(call.arguments)}

    def run() -> None:
        PUBLIC[op](**arguments)

    torch._dynamo.reset()
    with pytest.raises((TypeError, ValueError)) as eager:
        run()
    with pytest.raises(eager.type, match=re.escape(str(eager.value))):
        torch.compile(run, backend="aot_eager")()


class Expand(torch.nn.Module):
    """A table as wide as another tensor is long."""

    def forward(self, pivots: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return kvhal.expand_swa_index(pivots, like.shape[0])


def test_an_exported_size_stays_variable() -> None:
    pivots, sizes = torch.tensor([[0, 2, 5, 1]], dtype=torch.int32), (None, {0: torch.export.Dim("d", min=2, max=100)})
    program = torch.export.export(Expand(), (pivots, torch.zeros(7)), dynamic_shapes=sizes, strict=False)
    for width in (2, 9):
        like = torch.zeros(width)
        assert torch.equal(program.module()(pivots, like), Expand()(pivots, like))


def test_sizes_that_only_data_tells_are_compared_when_they_are_there() -> None:
    layout = kvhal.V41_FORMAT
    cache = kvhal.alloc_kv_cache(1, 8, layout, "cpu").zero_()

    def store(kv: torch.Tensor, slots: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
        return kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
            kv[first],
            cast_args=kvhal.CastArgs.for_layout(layout, cast_back=True),
            out_args=kvhal.KVCacheOutArgs(cache, slots[second], layout),
        )

    compiled = torch.compile(store, backend="aot_eager", fullgraph=True)
    kv, slots = torch.randn(8, 512).bfloat16(), torch.arange(8)
    odd = slots % 2 == 1
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        back = compiled(kv, slots, odd, odd.clone())
        assert back is not None and torch.equal(back, kvhal.load_kv_slots(cache, slots[odd], layout=layout))
        with pytest.raises(ValueError, match="slot_mapping: has 3 slots, needs 4"):
            compiled(kv, slots, odd, slots < 3)


def test_a_meta_tensor_among_others_is_refused() -> None:
    with pytest.raises(ValueError, match="tensors: have devices cpu, meta, need one device"):
        OPS.expand_swa_index(int32([3, 2, 9, 1]), torch.zeros(1, 6, dtype=torch.int32, device="meta"))


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_launch_nothing_and_are_not_remembered(name: str) -> None:
    """Before and behind calls with real ones, and of several modes."""
    call = CALLS[name]
    for first in (lambda: None, call):
        kvhal.configure()
        first()
        bound = dict(current().table)
        for _ in range(2):
            with FakeTensorMode():
                fake = call()
        assert current().table == bound
        real = call()
        assert type(real) is (type(None) if fake is None else torch.Tensor)
        assert fake is None or (isinstance(fake, FakeTensor) and fake.shape == real.shape and fake.dtype == real.dtype)
