"""What is written may share no byte with another tensor of the call; views that lie side by side share none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvhal
from kvhal import KVCacheTensors, Op
from kvhal.testing.case import PUBLIC
from tests.faults.calls import good

SHARED: dict[Op, tuple[str, ...]] = {
    Op.STORE: ("kv_cache", "kv", "slot_mapping"),
    Op.LOAD: ("out", "kv_cache", "load_segments", "out.sf"),
    Op.LOAD_SLOTS: ("out", "kv_cache", "slots"),
    Op.FUSED_STORE: (
        "out_args.kv_cache",
        "kv",
        "norm_args.weight",
        "rope_args.positions",
        "rope_args.cos_sin_cache",
        "out_args.slot_mapping",
    ),
    Op.CONVERT_INDEX: ("topk_idxs", "block_tables", "context_lens"),
    Op.INDEX_CAT: ("out", "left", "right"),
    Op.EXPAND_SWA_INDEX: ("out", "pivots"),
    Op.DECODE_SWA_INDEX: ("out", "kv_swa_index_offset_len"),
    Op.EXPAND_LOAD_PLAN: ("out", "spans", "block_tables"),
}
PAIRS = [(op, names[0], other) for op, names in SHARED.items() for other in names[1:]]
PAIRS += [(Op.LOAD, "out.sf", other) for other in ("kv_cache", "load_segments")]


def moved(arguments: dict[str, Any], name: str, place: Callable[[Tensor], Tensor]) -> None:
    """Replaces the tensor of a name such as "kv" or "rope_args.positions"."""
    outer, _, field = name.partition(".")
    old = arguments[outer]
    if isinstance(old, KVCacheTensors):
        arguments[outer] = old._replace(**{field or "kv": place(getattr(old, field or "kv"))})
    else:
        arguments[outer] = replace(old, **{field: place(getattr(old, field))}) if field else place(old)


@pytest.mark.parametrize(("op", "written", "other"), PAIRS)
@pytest.mark.parametrize("gap", [0, 32])
def test_written_memory_is_not_read(op: Op, written: str, other: str, gap: int) -> None:
    arguments = good(op, kvhal.MXFP8_INDEX_KV_FORMAT if op == Op.LOAD else kvhal.V41_FORMAT).arguments
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    for name, start in ((written, gap if other == "kv_cache" else 0), (other, 0 if other == "kv_cache" else gap)):
        moved(arguments, name, lambda old, at=start: memory[at:].view(old.dtype).as_strided(old.shape, old.stride()))
    with pytest.raises(ValueError, match=f"^{written}: has memory that {other} has too, needs memory of its own; pass"):
        PUBLIC[op](**arguments)
    assert not memory.any()


def int32(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)


def test_partly_shared_memory_is_refused() -> None:
    cache = kvhal.alloc_kv_cache(2, 16, kvhal.BF16_FORMAT, "cpu").zero_()
    rows, table = cache.view(32, 512), int32(3, 400)
    calls: list[Callable[[], Any]] = [
        lambda: kvhal.load_kv_slots(cache, torch.arange(16), rows[1:17]),
        lambda: kvhal.store_kv_cache(rows[:16], cache, torch.arange(1, 17)),
        lambda: kvhal.kv_index_cat(table[:, 100:300], table[:, :100], 1000, 0, table[:, :300]),
        lambda: kvhal.expand_swa_index(table.view(-1)[8:16].view(2, 4), 5, table[:2, 6:11]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="has memory that"):
            call()


def test_views_side_by_side_are_served() -> None:
    """Columns of one table, layers of one buffer, every other block of one cache, rows behind those that are written."""
    table, need = int32(3, 400), int32(3, 400)
    kvhal.kv_index_cat(table[:, :100], table[:, 100:150], 7, 0, table[:, 150:300])
    need[:, 150:300] = torch.cat((need[:, :100], need[:, 100:150] + 7), 1)
    assert torch.equal(table, need)

    records = torch.randn(2, 3, 4, 512, generator=torch.Generator().manual_seed(1)).bfloat16()  # blocks, layers, tokens
    layers = [records[:, layer].unsqueeze(2) for layer in range(3)]
    kvhal.store_kv_cache(records[:, 0, 1], layers[1], torch.tensor([0, 5]))
    assert torch.equal(layers[1].view(2, 4, 512)[[0, 1], [0, 1]], records[:, 0, 1])
    kvhal.load_kv_slots(layers[1], torch.tensor([2, 7]), records[:, 2, 3])
    assert torch.equal(records[:, 2, 3], records[[0, 1], 1, [2, 3]])

    cache = records.view(6, 4, 1, 512)
    kvhal.load_kv_slots(cache[::2], torch.tensor([1, 4, 8]), cache[1::2, 0, 0])
    assert torch.equal(cache[1::2, 0, 0], cache[[0, 2, 4], [1, 0, 0], 0])

    segments = torch.tensor([[0, 0, 4, 0]], dtype=torch.int32)
    buffer = torch.zeros(6, 512, dtype=torch.bfloat16)
    at_the_end = buffer[5].view(torch.int32)[:4].view(1, 4).copy_(segments)
    assert torch.equal(kvhal.load_paged_kv_cache(cache, at_the_end, 4, buffer).kv[:4], cache[0, :, 0])
