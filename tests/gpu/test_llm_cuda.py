"""The language model on a GPU: captured steps are the plain ones, and backends give the same tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kvhal
from kvhal.llm import KV_FORMATS, Generation, Model, PagedCache, Weights, parse_kv_format
from kvhal.llm.decode import MIN_WIDTH
from kvhal.platform import detect
from kvhal.registry import backends
from tests.unit.tiny_llm import CONFIG, prompts, tiny_model

pytestmark = pytest.mark.gpu

OPS = (kvhal.Op.STORE, kvhal.Op.LOAD, kvhal.Op.LOAD_SLOTS, kvhal.Op.CONVERT_INDEX)


@pytest.fixture(scope="module")
def model() -> Model:
    weights = tiny_model().weights

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cuda")

    layers = tuple(
        dataclasses.replace(one, **{field.name: move(getattr(one, field.name)) for field in dataclasses.fields(one)})
        for one in weights.layers
    )
    return Model(CONFIG, Weights(move(weights.embedding), layers, move(weights.output_norm), move(weights.output)))


def generate(model: Model, name: str, graph: bool) -> list[list[int | None]]:
    cache = PagedCache(CONFIG.layers, 40, 16, parse_kv_format(name, CONFIG.record_elements), "cuda")
    return list(Generation(model, cache, graph=graph).run(prompts(MIN_WIDTH - 4, 40, 9), 12))  # across a change of width


@pytest.mark.parametrize("name", KV_FORMATS)
def test_every_backend_with_and_without_graphs(model: Model, name: str) -> None:
    layout = parse_kv_format(name, CONFIG.record_elements)
    answers = {}
    for backend, manifest in backends().items():
        if not any(manifest.why_not(kvhal.Request(op, layout, detect("cuda"), 16)) for op in OPS):
            with kvhal.use_backend(backend):
                for graph in (True, False):
                    answers[backend, graph] = generate(model, name, graph)
    assert len(answers) >= 2
    assert all(answer == answers["reference_torch", False] for answer in answers.values()), answers
