"""The language model on a tiny random network: cache and no cache, prefill and decode, batch and alone agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import kvhal
from kvhal.formats import KVCacheFormat
from kvhal.llm import KV_FORMATS, BlockPool, Generation, LLMError, PagedCache, parse_kv_format, perplexity
from kvhal.llm.decode import MIN_WIDTH, DecodeBatch
from kvhal.llm.model import Model, dense_attention
from kvhal.llm.prefill import Piece, prefill, split
from kvhal.platform import detect
from kvhal.registry import backends
from tests.unit.tiny_llm import CONFIG, matrices, plain_forward, prompts, tiny_model

ELEMENTS = CONFIG.record_elements
BF16 = parse_kv_format("bf16", ELEMENTS)
FORMATS = {name: parse_kv_format(name, ELEMENTS) for name in KV_FORMATS}


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.inference_mode():
        yield


def paged(layout: KVCacheFormat = BF16, blocks: int = 16, block_size: int = 16) -> PagedCache:
    return PagedCache(CONFIG.layers, blocks, block_size, layout, "cpu")


def dense_logits(model: Model, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor(tokens)
    return model.logits(model.hidden(ids, torch.arange(len(ids)), dense_attention(model.config)))


def prefill_logits(model: Model, cache: PagedCache, batch: list[list[int]], chunk: int) -> list[torch.Tensor]:
    """Logits of every token of every prompt, as the chunks of a prefill give them."""
    tables = cache.reserve([len(prompt) for prompt in batch])
    parts: list[list[torch.Tensor]] = [[] for _ in batch]
    for pieces, hidden in prefill(model, cache, batch, tables, chunk):
        for piece, rows in zip(pieces, torch.split(hidden, [piece.end - piece.begin for piece in pieces]), strict=True):
            parts[piece.sequence].append(model.logits(rows))
    cache.pool.give_back(tables)
    return [torch.cat(part) for part in parts]


def decode_logits(model: Model, cache: PagedCache, batch: list[list[int]], known: int) -> list[torch.Tensor]:
    """Logits of the tokens after the first `known` of every prompt, one a step, the text given."""
    tables = cache.reserve([len(prompt) for prompt in batch])
    list(prefill(model, cache, [prompt[:known] for prompt in batch], tables))
    steps = min(map(len, batch)) - known
    decoder = DecodeBatch(model, cache, tables, [known] * len(batch), torch.zeros(len(batch)))
    logits = []
    for step in range(steps):
        decoder.tokens.copy_(torch.tensor([prompt[known + step] for prompt in batch]))
        decoder.step()
        logits.append(decoder.logits.clone())
    return list(torch.stack(logits, 1))


def generate(
    model: Model, cache: PagedCache, batch: list[list[int]], count: int, stop: tuple[int, ...] = ()
) -> list[list[int]]:
    steps = list(Generation(model, cache).run(batch, count, stop))
    return [[token for step in steps if (token := step[index]) is not None] for index in range(len(batch))]


@pytest.mark.parametrize(
    ("counts", "name"), [((0, 4, 16), "layers"), ((2, "4", 16), "num_blocks"), ((2, 4, 16.0), "block_size")]
)
def test_a_cache_takes_counts_only(counts: Any, name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name}: has "):
        PagedCache(*counts, kvhal.V41_FORMAT, "cpu")


def test_forward_equals_plain_numpy_on_unpermuted_weights(model: Model) -> None:
    tokens = prompts(40)[0]
    expected = plain_forward(matrices(), tokens)
    np.testing.assert_allclose(dense_logits(model, tokens).numpy(), expected, atol=0.05)
    # A wrong rotation is no rounding error: without it the logits are elsewhere.
    still = plain_forward(matrices(), tokens, CONFIG.__class__(**{**vars(CONFIG), "rope_base": 1.0}))
    assert np.abs(still - expected).max() > 1


@pytest.mark.parametrize(("chunk", "block_size"), [(1, 16), (7, 1), (16, 16), (64, 48), (512, 133)])
def test_prefill_equals_no_cache(model: Model, chunk: int, block_size: int) -> None:
    batch = prompts(1, 37, 16, 50)
    got = prefill_logits(model, paged(BF16, 110, block_size), batch, chunk)
    for prompt, logits in zip(batch, got, strict=True):
        torch.testing.assert_close(logits, dense_logits(model, prompt), atol=0.05, rtol=0)


def test_decode_equals_no_cache(model: Model) -> None:
    batch = prompts(MIN_WIDTH + 20, MIN_WIDTH + 20, MIN_WIDTH + 20)  # across a change of width
    got = decode_logits(model, paged(blocks=32), batch, known=5)
    for prompt, logits in zip(batch, got, strict=True):
        expected = dense_logits(model, prompt)[5:]
        torch.testing.assert_close(logits, expected, atol=0.05, rtol=0)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", FORMATS)
def test_a_prefill_attends_to_what_later_steps_read(model: Model, name: str) -> None:
    batch = prompts(40, 40)
    whole = prefill_logits(model, paged(FORMATS[name]), batch, chunk=512)
    stepwise = decode_logits(model, paged(FORMATS[name]), batch, known=1)
    exact = [dense_logits(model, prompt) for prompt in batch]
    for one, other, unquantised in zip(whole, stepwise, exact, strict=True):
        difference = (one[1:] - other).abs().max().item()
        assert difference < 0.05
        if name != "bf16":  # what attending to the chunk's own K and V would have given is far away
            assert (unquantised - one).abs().max().item() > 5 * difference


def test_all_traffic_goes_through_kvhal(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(kvhal, name)
        return lambda *given, **named: (calls.append(name), function(*given, **named))[1]

    for name in ("store_kv_cache", "load_paged_kv_cache", "load_kv_slots", "convert_kv_index"):
        monkeypatch.setattr(kvhal, name, counted(name))
    generate(model, paged(), prompts(20), 3)
    prefilled = ["store_kv_cache", "load_paged_kv_cache"] * CONFIG.layers
    decoded = ["convert_kv_index", *["store_kv_cache", "load_kv_slots"] * CONFIG.layers]
    assert calls == prefilled + decoded * 2


def test_a_batch_answers_as_each_prompt_alone(model: Model) -> None:
    batch = prompts(3, 40, 17, 1)
    cache = paged(blocks=20)
    together = generate(model, cache, batch, 12)
    assert together == [generate(model, paged(), [prompt], 12)[0] for prompt in batch]
    assert all(len(answer) == 12 for answer in together)
    assert cache.pool.free == 20


def test_an_answer_ends_at_a_stop_token(model: Model) -> None:
    batch = prompts(3, 9)
    free = generate(model, paged(), batch, 10)
    stop = free[0][4]
    ended = generate(model, paged(), batch, 10, (stop,))
    expected = [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in free]
    assert ended == expected and len(ended[0]) <= 5


def test_blocks_come_back_when_nobody_reads_on(model: Model) -> None:
    cache = paged()
    run = Generation(model, cache)
    steps = run.run(prompts(20, 3), 8)
    next(steps), next(steps)
    assert cache.pool.free < 16
    steps.close()
    assert cache.pool.free == 16
    assert (run.prompt_tokens, run.decode_tokens) == (23, 2) and run.prefill_seconds > 0 < run.decode_seconds


@pytest.mark.parametrize("name", FORMATS)
def test_every_backend_generates_the_same_tokens(model: Model, name: str) -> None:
    """Every registered backend that serves this record here: natively, interpreted, or through its simulator."""
    batch, layout = prompts(5, 9), FORMATS[name]
    answers = {}
    for backend, manifest in backends().items():
        platform = detect("cpu").with_simulation(bool(manifest.simulator))
        needs = ("store_kv_cache", "load_paged_kv_cache", "load_kv_slots", "convert_kv_index")
        verdicts = [manifest.why_not(kvhal.Request(kvhal.Op(op), layout, platform, 16)) for op in needs]
        if not any(verdicts):
            with kvhal.use_backend(backend, simulate=bool(manifest.simulator)):
                answers[backend] = generate(model, paged(layout, 4), batch, 3)
    assert "reference_torch" in answers
    assert all(answer == answers["reference_torch"] for answer in answers.values()), answers


def test_perplexity_is_the_dense_models(model: Model) -> None:
    tokens = prompts(100)[0]
    loss = torch.nn.functional.cross_entropy(dense_logits(model, tokens)[:-1], torch.tensor(tokens[1:]))
    results = [perplexity(model, BF16, tokens, block_size=16, chunk=chunk) for chunk in (512, 33)]
    for result in results:
        assert result.perplexity == pytest.approx(loss.exp().item(), rel=1e-3)
        assert (result.tokens, result.bytes_per_token) == (100, CONFIG.layers * 768)


def test_split_fills_passes_in_order() -> None:
    assert list(split([3, 5, 1], 4)) == [[Piece(0, 0, 3), Piece(1, 0, 1)], [Piece(1, 1, 5)], [Piece(2, 0, 1)]]
    for lengths, chunk in itertools.product([(7,), (2, 2), (9, 1, 9)], [1, 4, 100]):
        pieces = [piece for one in split(lengths, chunk) for piece in one]
        assert [(p.sequence, t) for p in pieces for t in range(p.begin, p.end)] == [
            (sequence, t) for sequence, length in enumerate(lengths) for t in range(length)
        ]


def test_a_pool_gives_no_block_twice() -> None:
    pool = BlockPool(7)
    first = pool.take([2, 0, 3])
    assert first.shape == (3, 3) and sorted(first[first >= 0].tolist()) == sorted(set(first[first >= 0].tolist()))
    with pytest.raises(LLMError, match="has 2 free blocks of 7, needs 3"):
        pool.take([1, 2])
    assert pool.free == 2
    pool.give_back(first)
    assert pool.free == 7


def test_bytes_per_token_count_padding() -> None:
    assert paged(FORMATS["fp8"], 1, 16).bytes_per_token == CONFIG.layers * 396
    assert paged(FORMATS["fp8"], 1, 1).bytes_per_token > CONFIG.layers * 396


@pytest.mark.parametrize(
    ("lengths", "count", "message"),
    [
        ((), 4, "prompts: has none"),
        ((3, 0), 4, "prompt 2: has no tokens"),
        ((3,), 0, "max_tokens: has 0"),
        ((3, 510), 4, "prompt 2: has 510 tokens and an answer of 4 to come, needs at most 512"),
        ((250,), 10, "cache: has room for 256 tokens, needs 272"),
    ],
)
def test_what_does_not_fit_is_said(model: Model, lengths: tuple[int, ...], count: int, message: str) -> None:
    with pytest.raises(LLMError, match=message):
        generate(model, paged(), prompts(*lengths), count)


def test_a_decoder_stops_where_its_table_ends(model: Model) -> None:
    cache = paged(block_size=4)
    decoder = DecodeBatch(model, cache, cache.reserve([4]), [3], torch.tensor([5]))
    decoder.step()
    with pytest.raises(LLMError, match="room for 4"):
        decoder.step()


def test_a_captured_step_is_the_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the device's graphs that runs on replay what it captured; tests/gpu has the real ones."""
    plain = DecodeBatch._compute
    capturing: list[Graph] = []
    captured: list[int] = []

    class Graph:
        replay: Callable[[], None]

    def compute(self: DecodeBatch, width: int) -> None:
        if capturing:
            captured.append(width)
            capturing[-1].replay = lambda: plain(self, width)
        else:
            plain(self, width)

    @contextmanager
    def graph(one: Graph) -> Iterator[None]:
        capturing.append(one)
        yield
        capturing.clear()

    stream = SimpleNamespace(wait_stream=lambda other: None)
    device = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda one: nullcontext(),
        CUDAGraph=Graph,
        graph=graph,
    )
    batch = prompts(MIN_WIDTH - 4, 9)
    expected = generate(model, paged(blocks=40), batch, 10)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(DecodeBatch, "_compute", compute)
    steps = list(Generation(model, paged(blocks=40), graph=True).run(batch, 10))
    assert [list(answer) for answer in zip(*steps, strict=True)] == expected
    assert captured == [MIN_WIDTH, MIN_WIDTH + 16]  # the second is as wide as the block table


def test_a_graph_needs_a_device_that_has_them(model: Model) -> None:
    cache = paged()
    with pytest.raises(LLMError, match="graph: has device cpu"):
        DecodeBatch(model, cache, cache.reserve([4]), [3], torch.tensor([5]), graph=True)
