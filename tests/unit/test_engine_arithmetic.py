"""The arithmetic that makes results independent of order, shape and padding."""

from __future__ import annotations

import math

import pytest
import torch

from kvhal.engine.arithmetic import (
    ACTIVATION_BITS,
    RECORD_BITS,
    WEIGHT_BITS,
    attend,
    attention_weights,
    exponential,
    index_scores,
    linear,
    pick_top,
    silu,
    snap,
)
from kvhal.engine.config import EngineConfig
from kvhal.engine.weights import make_weights

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_snap_rounds_to_multiples_ties_to_even() -> None:
    x = torch.tensor([0.125, 0.375, -0.3, 7.0])
    assert snap(x, 2, F64).tolist() == [0.0, 0.5, -0.25, 7.0]
    assert x.tolist() == torch.tensor([0.125, 0.375, -0.3, 7.0]).tolist()


def test_linear_is_one_rounding_of_the_exact_sum_in_any_order() -> None:
    x, weight = 20 * normal(9, 512), snap(normal(512, 40, seed=1), WEIGHT_BITS, F64)
    whole = linear(x, weight)
    exact = [
        [sum(int(a * 2**16) * int(b * 2**16) for a, b in zip(row, column, strict=True)) for column in weight.T.tolist()]
        for row in snap(x, ACTIVATION_BITS, F64).tolist()
    ]
    assert whole.tolist() == torch.tensor([[value / 2**32 for value in row] for row in exact], dtype=F64).float().tolist()
    order = torch.randperm(512, generator=torch.Generator().manual_seed(2))
    assert torch.equal(linear(x[:, order], weight[order]), whole)
    assert all(torch.equal(linear(x[i : i + 1], weight), whole[i : i + 1]) for i in range(9))


def test_exponential_and_silu_are_close_to_the_mathematical_ones() -> None:
    x = torch.linspace(-86.9, 86.9, 20001)
    error = (exponential(x).double() / x.double().exp() - 1).abs().max()
    assert error < 4e-7
    assert exponential(torch.tensor([-1e30, 0.0, 1e30])).tolist()[1] == 1.0
    assert torch.isfinite(exponential(torch.tensor([-math.inf, math.inf]))).all()
    assert (silu(x) - torch.nn.functional.silu(x)).abs().max() < 2e-5


def test_exponential_does_not_depend_on_shape_or_strides() -> None:
    x = 10 * normal(37, 41)
    assert torch.equal(exponential(x.T).T, exponential(x))
    assert torch.equal(torch.cat([exponential(row[:, None]).T for row in x]), exponential(x))


def test_attention_does_not_depend_on_order_or_padding() -> None:
    queries, records = normal(3, 2, 512), snap(normal(3, 20, 512, seed=1), RECORD_BITS, F64)
    visible = torch.rand((3, 20), generator=torch.Generator().manual_seed(2)) < 0.5
    visible[1] = False
    values = attend(queries, records, visible, 448)
    assert not values[1].any()
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    assert torch.equal(attend(queries, records[:, order], visible[:, order], 448), values)
    padded = torch.cat((records, 50 * torch.ones(3, 9, 512, dtype=F64)), 1)
    assert torch.equal(attend(queries, padded, torch.nn.functional.pad(visible, (0, 9)), 448), values)
    assert torch.equal(attend(queries[2:], records[2:], visible[2:], 448), values[2:])


def test_attention_is_softmax() -> None:
    queries, records = normal(4, 2, 512), snap(normal(4, 20, 512, seed=1), RECORD_BITS, F64)
    scores = queries.double() @ records.transpose(1, 2) / math.sqrt(512)
    exact = scores.softmax(-1) @ records[..., :448]
    assert (attend(queries, records, torch.ones(4, 20, dtype=torch.bool), 448) - exact).abs().max() < 2e-4


def test_attention_weights_of_what_is_not_visible_are_zero() -> None:
    scores = torch.tensor([[1.0, 500.0, 1.0]])
    weights = attention_weights(scores, torch.tensor([[True, False, True]]), F64)
    assert weights.tolist() == [[1.0, 0.0, 1.0]]


@pytest.mark.parametrize("count", [1, 3, 10, 12])
def test_picks_are_the_best_of_the_range_lower_column_first(count: int) -> None:
    generator = torch.Generator().manual_seed(4)
    scores = torch.randint(-3, 4, (200, 10), generator=generator).float()  # many ties, some below zero
    begin = torch.randint(0, 6, (200, 1), generator=generator)
    end = torch.randint(0, 11, (200, 1), generator=generator)
    for row, picks in enumerate(pick_top(scores, begin, end, count).tolist()):
        columns = range(int(begin[row]), int(end[row]))
        best = sorted(columns, key=lambda column: (-float(scores[row, column]), column))[:count]
        assert picks == best + [-1] * (count - len(best))


def test_index_scores_share_keys_or_not_and_have_no_negative_zero() -> None:
    queries, weights = normal(5, 2, 128), normal(5, 2, seed=1)
    keys = snap(normal(7, 128, seed=2), RECORD_BITS, F64)
    scores = index_scores(queries, weights, keys)
    assert torch.equal(index_scores(queries, weights, keys.expand(5, 7, 128)), scores)
    exact = ((queries @ keys.float().T).relu() * weights[..., None]).sum(1)
    assert (scores - exact).abs().max() < 1e-3
    none = index_scores(queries, -weights.abs(), torch.zeros(7, 128, dtype=F64))
    assert not torch.signbit(none).any()


def test_weights_come_from_the_seed_and_lie_on_their_grid() -> None:
    config = EngineConfig(num_layers=2, hidden_size=64)
    one, same, other = make_weights(config), make_weights(config), make_weights(EngineConfig(2, hidden_size=64, seed=1))
    assert torch.equal(one.layers[1].query, same.layers[1].query)
    assert not torch.equal(one.layers[1].query, other.layers[1].query)
    assert torch.equal(snap(one.head, WEIGHT_BITS, F64), one.head)
    assert one.layers[0].compressor is not None
    assert one.layers[1].compressor is None
    assert abs(float(one.layers[0].query.var()) * 64 - 1) < 0.05
