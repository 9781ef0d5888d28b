"""What the engine does with its caches: order of loads and stores, sharing between layers, static decode steps, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvhal.engine import (
    BOS,
    CrossLayerRuntime,
    Decoder,
    Engine,
    EngineConfig,
    PoolExhausted,
    decode,
    no_cache_logits,
    prefill,
)
from kvhal.formats import BF16_FORMAT, KVCacheFormat

SMALL = EngineConfig(
    num_layers=5,
    layers_per_group=3,
    window_size=12,
    swa_block_size=12,
    block_size=16,
    top_k=4,
    max_seq_len=96,
    max_batch=3,
    hidden_size=64,
)


INDEX = KVCacheFormat("e4m3", 512, 32, 0, False, "ue8m0", "")


def text(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [BOS, *torch.randint(0, 256, (count - 1,), generator=generator).tolist()]


class Calls:
    """Records which cache each operation of a module touches, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, engine: Engine) -> None:
        self.log: list[tuple[str, str]] = []
        self._names = {cache.data_ptr(): name for name, cache in engine.caches.tensors().items()}
        for name, kind in (
            ("load_paged_kv_cache", "load"),
            ("load_kv_slots", "load"),
            ("fused_norm_rope_hadamard_cast_store_kvcache", "store"),
        ):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, self._wrap(kind, getattr(module, name)))

    def _wrap(self, kind: str, call: Any) -> Any:
        def recorded(first: Tensor, *args: Any, **kwargs: Any) -> Any:
            cache = kwargs["out_args"].kv_cache if kind == "store" else first
            self.log.append((kind, self._names[cache.data_ptr()]))
            return call(first, *args, **kwargs)

        return recorded


def test_prefill_stores_a_window_only_after_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(SMALL)
    calls = Calls(monkeypatch, prefill, engine)
    engine.prefill([text(20)], chunk_size=20)
    for layer in range(SMALL.num_layers):
        of_layer = [kind for kind, name in calls.log if name == f"swa.{layer}"]
        assert of_layer == ["load", "store"]


def test_a_store_before_the_load_would_change_the_result() -> None:
    """What the order protects from: the same chunk run again finds a ring that already holds the chunk itself."""
    engine = Engine(SMALL)
    tokens = text(30)
    (sequence,), _ = engine.prefill([tokens[:20]], chunk_size=20)
    (right,) = engine.prefill_chunk([sequence], [tokens[20:]])
    assert torch.equal(right, no_cache_logits(SMALL, engine.model.weights, tokens)[20:])
    sequence.length = 20
    (wrong,) = engine.prefill_chunk([sequence], [tokens[20:]])
    assert not torch.equal(right, wrong)


def test_a_group_loads_its_compressed_cache_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(SMALL)
    assert set(engine.caches.sources) == {0, 3}
    calls = Calls(monkeypatch, prefill, engine)
    engine.prefill([text(20)], chunk_size=20)
    assert [name for kind, name in calls.log if kind == "load" and "swa" not in name] == [
        "main.0",
        "index.0",
        "main.3",
        "index.3",
    ]


def test_a_decode_consumer_reads_its_source_and_picks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(SMALL)
    (sequence,), _ = engine.prefill([text(20)])
    calls = Calls(monkeypatch, decode, engine)
    engine.decode([sequence], [1])
    loads = [name for kind, name in calls.log if kind == "load"]
    assert [name for name in loads if "index" in name] == ["index.0", "index.3"]
    assert [name for name in loads if "main" in name] == ["main.0"] * 3 + ["main.3"] * 2


@pytest.mark.parametrize("layers_per_group", [1, 2, 5])
def test_groupings_equal_the_oracle(layers_per_group: int) -> None:
    config = replace(SMALL, layers_per_group=layers_per_group)
    engine = Engine(config)
    tokens = text(41)
    (sequence,), (logits,) = engine.prefill([tokens[:40]], chunk_size=13)
    last, _ = engine.decode([sequence], tokens[40:])
    assert torch.equal(torch.cat((logits, last)), no_cache_logits(config, engine.model.weights, tokens))


def test_a_runtime_gives_only_what_its_source_published() -> None:
    runtime = CrossLayerRuntime()
    with pytest.raises(RuntimeError, match="layer 0 has not published its cache, last was None"):
        runtime.of(0)
    kv, index = torch.zeros(1), torch.zeros(2)
    runtime.publish(3, kv, index)
    assert runtime.of(3) == (kv, index)
    with pytest.raises(RuntimeError, match="layer 0 has not published its cache, last was 3"):
        runtime.of(0)


class NoHostReads(TorchDispatchMode):
    """Fails on operations that read a tensor's value on the host or have a shape that depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "unique", "_unique2", "masked_select", "equal"), name
        return func(*args, **(kwargs or {}))


def test_a_decode_step_is_static() -> None:
    """What a CUDA graph needs: no host read in the step, inputs and outputs that stay where they are."""
    engine = Engine(SMALL)
    sequences, _ = engine.prefill([text(10), text(23, 1)])
    decoder = engine.decoder(2)
    tensors = [*vars(decoder.metadata).values(), decoder.logits, decoder.next_tokens]
    addresses = [tensor.data_ptr() for tensor in tensors if isinstance(tensor, Tensor)]
    engine.decode(sequences, [1, 2])
    engine.caches.reserve(sequences, [1, 1])
    decoder.plan(sequences, torch.tensor([3, 4]))
    with torch.no_grad(), NoHostReads():
        decoder.step()
    tensors = [*vars(decoder.metadata).values(), decoder.logits, decoder.next_tokens]
    assert addresses == [tensor.data_ptr() for tensor in tensors if isinstance(tensor, Tensor)]
    for row, (tokens, extra) in enumerate(((text(10), [1, 3]), (text(23, 1), [2, 4]))):
        assert torch.equal(decoder.logits[row], no_cache_logits(SMALL, engine.model.weights, tokens + extra)[-1])


def test_inactive_rows_of_a_step_store_nothing() -> None:
    engine = Engine(SMALL)
    sequences, _ = engine.prefill([text(12), text(15, 1)])
    decoder = Decoder(engine.model, engine.caches, 3, engine.device)
    engine.caches.reserve(sequences, [1, 1])
    decoder.plan(sequences, torch.tensor([5, 6]))
    with torch.no_grad():
        decoder.step()
    assert torch.isfinite(decoder.logits).all()
    assert torch.equal(decoder.logits[1], no_cache_logits(SMALL, engine.model.weights, [*text(15, 1), 6])[-1])
    unused = {0, 1, 2} - {sequence.state_id for sequence in sequences}
    assert all(not cache[list(unused)].any() for name, cache in engine.caches.tensors().items() if "swa" in name)


def test_tokens_chosen_on_the_device_feed_the_next_step() -> None:
    engine = Engine(SMALL)
    (sequence,), (logits,) = engine.prefill([text(10)])
    chosen = logits[-1:, :256].argmax(1)
    tokens = text(10)
    for _ in range(5):
        tokens.append(int(chosen))
        _, chosen = engine.decode([sequence], chosen)
    assert int(chosen) == int(no_cache_logits(SMALL, engine.model.weights, tokens)[-1, :256].argmax())


def test_an_exhausted_pool_changes_nothing() -> None:
    engine = Engine(replace(SMALL, num_blocks=3))
    with pytest.raises(PoolExhausted, match="blocks: 0 of 3 are free, needs 1"):
        engine.prefill([text(16), text(49, 1)], chunk_size=16)
    assert (engine.caches.blocks.free, engine.caches.states.free) == (3, 3)
    with pytest.raises(PoolExhausted, match="ring blocks: 0 of 3 are free, needs 1"):
        engine.prefill([text(2)] * 4)
    assert engine.caches.states.free == 3


def test_refusals_name_what_is_wrong() -> None:
    engine = Engine(SMALL)
    (sequence,), _ = engine.prefill([text(95)])
    for call, message in (
        (lambda: engine.prefill([[1], [2, 300]]), r"token_lists\[1\]\[1\]: has 300, needs 0 <= token_lists\[1\]\[1\] <= 256"),
        (lambda: engine.prefill([[1]], chunk_size=0), "chunk_size: has 0, needs 1 <= chunk_size"),
        (lambda: engine.prefill([[1] * 97]), r"token_lists\[0\]: has 97 tokens, needs at most 96"),
        (lambda: engine.prefill_chunk([sequence], []), "chunks: has 0 entries, needs 1, one a sequence"),
        (lambda: engine.prefill_chunk([sequence], [[1, 2]]), "would have 97 tokens, needs at most max_seq_len 96"),
        (lambda: engine.decode([sequence], [1, 2]), "tokens: has 2 entries, needs 1, one a sequence"),
        (lambda: engine.decode([sequence, sequence], [1, 2]), "one occurs twice"),
        (lambda: engine.decode([sequence], [-1]), r"tokens\[0\]: has -1"),
        (lambda: engine.decode([], []), "batch_size: has 0, needs 1..3"),
        (lambda: engine.generate([b"x" * 90], 7), "max_new_tokens: has 7, needs 1..6"),
        (lambda: engine.generate([b"x"], 0), "max_new_tokens: has 0"),
        (lambda: engine.generate([b"", b"x" * 96], 1), r"prompts\[1\]: has 96 bytes, needs at most 95"),
        (lambda: engine.generate([b"x" * 95], 2), r"max_new_tokens: has 2, needs 1\.\.1"),
        (lambda: engine.decode([sequence], torch.tensor([1.9])), "tokens: has dtype torch.float32"),
        (lambda: engine.decode([sequence], torch.tensor([[1]])), r"tokens: has shape \(1, 1\)"),
        (lambda: Engine(SMALL, "xpu:7"), "device: has 'xpu:7', needs a torch device of this machine"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for wrong, message in (
        (lambda: engine.prefill([[1.9]]), r"token_lists\[0\]\[0\]: has 1.9, needs an int"),  # type: ignore[list-item]
        (lambda: engine.prefill_chunk([sequence], [[True]]), r"chunks\[0\]\[0\]: has True"),
        (lambda: engine.decode([sequence], [1.9]), r"tokens\[0\]: has 1.9"),  # type: ignore[list-item]
        (lambda: engine.generate([b"x"], 2.5), "max_new_tokens: has 2.5"),  # type: ignore[arg-type]
        (lambda: engine.generate([b"x"], 2, 2.5), "chunk_size: has 2.5"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=message):
            wrong()
    assert sequence.length == 95
    engine.release([sequence])
    engine.release([sequence])
    assert engine.caches.states.free == 3
    with pytest.raises(ValueError, match=r"sequences\[0\]: was released"):
        engine.decode([sequence], [1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers has 0, needs an int >= 1"),
        ({"top_k": 1.5}, "top_k has 1.5"),
        ({"num_blocks": -1}, "num_blocks has -1"),
        ({"num_blocks": 2.5}, "num_blocks has 2.5, needs None or an int"),
        ({"num_blocks": True}, "num_blocks has True"),
        ({"main_format": INDEX}, r"main_format has e4m3\[512\]/32:ue8m0,raw, needs a record that loads as bf16 rows"),
        ({"swa_format": INDEX}, r"swa_format has e4m3\[512\]/32:ue8m0,raw, needs"),
        ({"index_format": "V41_FORMAT"}, "index_format has 'V41_FORMAT', needs a KVCacheFormat"),
        ({"swa_block_size": 5}, "swa_block_size has 5, needs >= window_size 12"),
        ({"ratio": 3}, "block_size has 16, needs a multiple of ratio 3"),
        ({"rope_dim": 63}, "rope_dim has 63, needs an even count below 128"),
        ({"rope_dim": 128}, "rope_dim has 128"),
        ({"index_format": KVCacheFormat(None, 0, 0, 96, False, None, "")}, "index_format has 96 elements"),
        ({"main_format": KVCacheFormat(None, 0, 0, 384, False, None, "")}, "main_format has 384 elements, needs 512"),
        ({"accumulate": "bf16"}, "accumulate has 'bf16'"),
    ],
)
def test_a_config_refuses_what_contradicts_itself(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_records_may_have_another_width() -> None:
    wide = KVCacheFormat("e4m3", 384, 32, 0, True, "ue8m0", "", token_interleaved=True)
    plain = replace(BF16_FORMAT, bf16_elements=384)
    config = replace(SMALL, swa_format=wide, main_format=plain, num_layers=2)
    engine = Engine(config)
    _, (logits,) = engine.prefill([text(30)], chunk_size=8)
    assert torch.equal(logits, no_cache_logits(config, engine.model.weights, text(30)))


def test_progress_counts_tokens() -> None:
    seen: list[tuple[str, int, int]] = []
    Engine(SMALL).generate([b"0123456789", b"abc"], 3, 8, lambda *event: seen.append(event))
    assert seen == [("prefill", 12, 15), ("prefill", 15, 15), ("decode", 2, 3), ("decode", 3, 3)]
    assert Engine(SMALL).generate([], 3) == []
