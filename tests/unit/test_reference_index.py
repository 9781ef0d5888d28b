"""The index operations of reference_torch against loops over Python integers, on hostile values and sliced tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvhal.backends.reference_torch.manifest import BACKEND
from kvhal.interface import Op, Request
from kvhal.platform import Platform

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def bind(op: Op) -> Any:
    return BACKEND.bind(Request(op, None, Platform("cpu", "test")))


def wrap(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("width", [0, 1, 4])
@pytest.mark.parametrize("block_size", [1, 16, 2**20])
def test_convert_index(width: int, block_size: int) -> None:
    rng = np.random.default_rng(width)
    pool = [-1, 0, 1, 15, 16, 33, 63, 64, 2**20, 2**22, INT_MAX, INT_MIN, -17]
    topk = torch.from_numpy(rng.choice(pool, (2, 3, 40))).int()[:, :, :37]
    blocks = [0, 3, 7, -1, -2, 2047, 2048, INT_MAX, INT_MIN]
    tables = torch.from_numpy(rng.choice(blocks, (2, width + 1))).int()[:, :width]
    lens = torch.tensor([[0, 37, 20], [99, -3, INT_MAX]], dtype=torch.int32)
    expected = topk.clone()
    for b, q, k in np.ndindex(*topk.shape):
        x = int(topk[b, q, k])
        expected[b, q, k] = -1
        if k < lens[b, q] and 0 <= x < width * block_size and tables[b, x // block_size] >= 0:
            slot = int(tables[b, x // block_size]) * block_size + x % block_size
            expected[b, q, k] = slot if slot <= INT_MAX else -1
    bind(Op.CONVERT_INDEX)(topk, tables, lens, block_size)
    assert torch.equal(topk, expected)


def test_index_cat() -> None:
    left = torch.tensor([[1, -1, INT_MIN, 9], [INT_MAX, -7, 0, 9]], dtype=torch.int32)[:, :3]
    right = torch.tensor([[0, -1, 5], [-9, INT_MAX, INT_MIN]], dtype=torch.int32)
    out = torch.full((2, 8), 7, dtype=torch.int32)
    bind(Op.INDEX_CAT)(left, right, 100, out[:, :6])
    expected = [[1, -1, INT_MIN, 100, -1, 105, 7, 7], [INT_MAX, -7, 0, -1, wrap(INT_MAX + 100), -1, 7, 7]]
    assert out.tolist() == expected


def test_expand_swa_index() -> None:
    pool = [0, 1, 3, 5, 8, 50, -1, -4, INT_MIN, INT_MAX]
    pivots = torch.from_numpy(np.random.default_rng(0).choice(pool, (300, 4))).int()
    out = torch.full((300, 10), 7, dtype=torch.int32)
    bind(Op.EXPAND_SWA_INDEX)(pivots, out[:, :8])
    for (offset1, len1, offset2, len2), row in zip(pivots.tolist(), out.tolist(), strict=True):
        len1, len2 = max(len1, 0), max(len2, 0)
        want = [offset1 + c for c in range(min(len1, 8))]
        want += [offset2 + c for c in range(min(len2, 8 - len(want)))]
        assert row == [wrap(value) for value in want] + [-1] * (8 - len(want)) + [7, 7]


@pytest.mark.parametrize("block", [1, 3, 8, INT_MAX])
def test_decode_swa_index(block: int) -> None:
    pool = [0, 1, 2, 5, 7, 8, 23, 100, -1, -5, INT_MIN, INT_MAX]
    windows = torch.from_numpy(np.random.default_rng(0).choice(pool, (200, 2))).int()
    out = torch.full((200, 8), 7, dtype=torch.int32)
    bind(Op.DECODE_SWA_INDEX)(windows, block, out[:, :6])
    for (start, length), row in zip(windows.tolist(), out.tolist(), strict=True):
        count = min(max(length, 0), 6) if start >= 0 else 0
        want = [wrap(start // block * block + (start % block + j) % block) for j in range(count)]
        assert row == want + [-1] * (6 - count) + [7, 7]
