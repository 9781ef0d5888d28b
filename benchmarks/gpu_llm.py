"""Times a language model whose KV cache lives in kvhal, decode steps as CUDA graphs, for 1 and 64 streams; compares backends.

    python benchmarks/gpu_llm.py OUT.json --parts FOLDER    the model in parts, in the order of their names
    python benchmarks/gpu_llm.py OUT.json --model FILE      the model as one file; neither: what scripts/get-model fetched
    python benchmarks/gpu_llm.py OUT.json --tiny            a rehearsal on the CPU with a small random model, seconds

A machine without network may take less at a time than the model's 94 MiB: `scripts/get-model --split FOLDER` copies it there in
parts of 48 MiB (--part-mib), which can travel one by one into one folder. The machine also needs the packages gguf, tokenizers
and jinja2. What is measured:

- decode: tokens/s of all streams together, once without any host read between steps (the device's own pace) and once with every
  token read as soon as it is there (what streaming needs); with and without graphs; float32 and bfloat16;
- prefill: tokens/s of the streams' prompts;
- agreement: every backend that serves here generates the same tokens for each format;
- perplexity of each format on the first 1,024 tokens of the licence.

Every figure is kept as soon as it is there: a run that was stopped goes on where it was when it is started again.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

import kvhal
from kvhal.formats import KVCacheFormat
from kvhal.interface import Op
from kvhal.llm import (
    KV_FORMATS,
    Generation,
    LayerWeights,
    Model,
    ModelConfig,
    PagedCache,
    Weights,
    load_model,
    parse_kv_format,
    perplexity,
)
from kvhal.llm.decode import DecodeBatch, can_capture
from kvhal.llm.prefill import prefill
from kvhal.platform import detect
from kvhal.registry import backends

ROOT = Path(__file__).resolve().parents[1]
BLOCK_SIZE = 64
OPS = (Op.STORE, Op.LOAD, Op.LOAD_SLOTS, Op.CONVERT_INDEX)
TINY = ModelConfig(2, 64, 6, 3, 64, 96, 512, 2048, 100000.0, 1e-5)


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        dtypes: what the model computes in.
        streams: sequences decoded together.
        prompt: tokens of the longest prompt; the others are shorter.
        steps: decode steps that are timed.
        answer: tokens that backends are compared on.
        text: tokens of the perplexity.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    streams: tuple[int, ...] = (1, 64)
    prompt: int = 512
    steps: int = 256
    answer: int = 64
    text: int = 1024


REHEARSAL = Plan(dtypes=(torch.float32,), streams=(1, 4), prompt=24, steps=4, answer=4, text=40)


def random_model(device: torch.device, dtype: torch.dtype) -> Model:
    """A small random model with records of 384 elements, as the real one's."""
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / math.sqrt(shape[-1])).to(device, dtype)

    def ones() -> torch.Tensor:
        return torch.ones(TINY.hidden, device=device, dtype=dtype)

    queries, records = TINY.heads * TINY.head_dim, TINY.record_elements
    layers = tuple(
        LayerWeights(
            ones(),
            matrix(queries + records, TINY.hidden),
            matrix(TINY.hidden, queries),
            ones(),
            matrix(2 * TINY.feed_forward, TINY.hidden),
            matrix(TINY.hidden, TINY.feed_forward),
        )
        for _ in range(TINY.layers)
    )
    table = matrix(TINY.vocabulary, TINY.hidden)
    return Model(TINY, Weights(table, layers, ones(), table))


def tokens_of(tokenizer: Any, vocabulary: int, count: int) -> list[int]:
    """The first `count` tokens of the licence, or random ones without a tokenizer."""
    if tokenizer is None:
        return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    ids: list[int] = tokenizer.encode((ROOT / "LICENSE").read_text(encoding="utf-8").strip("\n"))
    return ids[:count]


def prompts_of(ids: list[int], streams: int, longest: int) -> list[list[int]]:
    """Prompts of different length, from half of `longest` up to it, each from another place of the text."""
    lengths = [longest - index * (longest // 2) // streams for index in range(streams)]
    return [(ids * 2)[7 * index : 7 * index + length] for index, length in enumerate(lengths)]


def timed(device: torch.device, run: Callable[[], None]) -> float:
    """Seconds of a call, the device's work included."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - began


@torch.inference_mode()
def time_decode(model: Model, layout: KVCacheFormat, batch: list[list[int]], steps: int, graph: bool) -> dict[str, Any]:
    """Prefill and decode rates of one batch; everything is compiled and captured before it is timed."""
    lengths = [len(prompt) for prompt in batch]
    blocks = sum(math.ceil((length + 2 * steps) / BLOCK_SIZE) for length in lengths)
    cache = PagedCache(model.config.layers, blocks, BLOCK_SIZE, layout, model.device)
    tables = cache.reserve([length + 2 * steps for length in lengths])

    def prompt_pass() -> None:
        for _ in prefill(model, cache, batch, tables):
            pass

    prompt_pass()
    prefill_seconds = timed(model.device, prompt_pass)
    decoder = DecodeBatch(model, cache, tables, lengths, torch.tensor([prompt[-1] for prompt in batch]), graph=graph)
    decoder.prepare(2 * steps)
    if not graph:
        DecodeBatch(model, cache, tables, lengths, torch.tensor([prompt[-1] for prompt in batch])).step()

    def decode(read: bool) -> None:
        for _ in range(steps):
            decoder.step()
            if read:
                decoder.tokens.tolist()

    device_seconds = timed(model.device, lambda: decode(read=False))
    streaming_seconds = timed(model.device, lambda: decode(read=True))
    return {
        "streams": len(batch),
        "graph": graph,
        "prompt_tokens": sum(lengths),
        "steps": steps,
        "prefill_tokens_per_second": round(sum(lengths) / prefill_seconds, 1),
        "decode_tokens_per_second": round(len(batch) * steps / device_seconds, 1),
        "streaming_tokens_per_second": round(len(batch) * steps / streaming_seconds, 1),
        "milliseconds_per_step": round(1000 * device_seconds / steps, 4),
        "cache_bytes_per_token": cache.bytes_per_token,
    }


def serving(layout: KVCacheFormat, device: torch.device) -> Iterator[str]:
    """Backends that serve this record on this device by their own word."""
    for name, backend in backends().items():
        if not any(backend.why_not(kvhal.Request(op, layout, detect(device), BLOCK_SIZE)) for op in OPS):
            yield name


def compare_backends(model: Model, ids: list[int], plan: Plan, graph: bool) -> list[dict[str, Any]]:
    """The tokens of every backend, for each format; they must be the same."""
    batch = prompts_of(ids, 4, plan.prompt // 4)
    rows = []
    for name in KV_FORMATS:
        layout = parse_kv_format(name, model.config.record_elements)
        answers = {}
        for backend in serving(layout, model.device):
            blocks = sum(math.ceil((len(prompt) + plan.answer) / BLOCK_SIZE) for prompt in batch)
            cache = PagedCache(model.config.layers, blocks, BLOCK_SIZE, layout, model.device)
            with kvhal.use_backend(backend):
                answers[backend] = list(Generation(model, cache, graph=graph).run(batch, plan.answer))
        equal = all(answer == answers["reference_torch"] for answer in answers.values())
        rows.append({"kv_format": name, "backends": list(answers), "equal": equal, "tokens": answers["reference_torch"]})
        print(name, "backends", list(answers), "equal" if equal else "DIFFERENT", flush=True)
    return rows


def measure(model: Model, ids: list[int], plan: Plan, graphs: tuple[bool, ...], runs: list[dict[str, Any]]) -> Iterator[None]:
    """Appends to `runs` every format, number of streams, with and without graphs, that is not there yet; one at a time."""
    dtype = str(model.dtype).removeprefix("torch.")
    known = {(run["kv_format"], run["dtype"], run["streams"], run["graph"]) for run in runs}
    for name, streams, graph in product(KV_FORMATS, plan.streams, graphs):
        if (name, dtype, streams, graph) in known:
            continue
        layout = parse_kv_format(name, model.config.record_elements)
        chosen = sorted({str(kvhal.explain(op, layout=layout, device=model.device).chosen) for op in OPS[:3]})
        facts = time_decode(model, layout, prompts_of(ids, streams, plan.prompt), plan.steps, graph)
        runs.append({"kv_format": name, "dtype": dtype, "backends": chosen, **facts})
        print(json.dumps(runs[-1]), flush=True)
        yield


def headline(details: dict[str, Any]) -> dict[str, Any]:
    """The table that scripts/perplexity-table puts into the documents: the fastest way to decode, for each format."""
    rows = []
    graphs = any(run["graph"] for run in details["runs"])
    for run in details["runs"]:
        if run["graph"] == graphs:
            rates = [f"{run[key]:,.0f}" for key in ("decode_tokens_per_second", "streaming_tokens_per_second")]
            backend = ", ".join(run["backends"])
            rows.append(
                [run["kv_format"], run["dtype"], run["streams"], *rates, f"{run['cache_bytes_per_token']:,.0f}", backend]
            )
    agree = sum(row["equal"] for row in details["agreement"])
    names = ", ".join(details["agreement"][0]["backends"])
    values = ", ".join(f"{name} {value:.2f}" for name, value in details["perplexity"].items())
    return {
        "title": f"{details['model']}: tokens/s of all streams, greedy decoding" + (", CUDA graphs" if graphs else ""),
        "machine": f"{details['device']}, torch {details['torch']}",
        "columns": [
            "K/V records",
            "computed in",
            "streams",
            "tokens/s",
            "with each token read",
            "cache bytes/token",
            "backend",
        ],
        "rows": rows,
        "notes": [
            f"{names} generate the same tokens in {agree} of {len(details['agreement'])} formats.",
            f"Perplexity: {values}.",
        ],
    }


def load(arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> tuple[Model, Any]:
    if arguments.tiny:
        return random_model(device, dtype), None
    if arguments.parts is None:
        return load_model(arguments.model, device, dtype)
    parts = sorted(arguments.parts.glob("*.gguf.[0-9][0-9]"))
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "model.gguf"
        with whole.open("wb") as sink:
            for part in parts:
                sink.write(part.read_bytes())
        return load_model(whole, device, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, help="a GGUF file")
    source.add_argument("--parts", type=Path, help="a folder with the file's parts")
    source.add_argument("--tiny", action="store_true", help="a small random model on the CPU, few tokens")
    arguments = parser.parse_args()
    device, plan = (torch.device("cpu"), REHEARSAL) if arguments.tiny else (torch.device("cuda", 0), Plan())
    graphs = (True, False) if can_capture(device) else (False,)
    name = "a small random model" if arguments.tiny else "SmolLM2-135M-Instruct"
    details: dict[str, Any] = {"model": name, "device": detect(device).device_name, "torch": torch.__version__, "runs": []}
    if arguments.out.exists():
        earlier = json.loads(arguments.out.read_text(encoding="utf-8"))["details"]
        if any(earlier[fact] != details[fact] for fact in ("model", "device", "torch")):
            raise SystemExit(f"{arguments.out}: was measured with another model, device or torch; name another file")
        details = earlier

    def save() -> None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({**headline(details), "details": details}, indent=1) + "\n", encoding="utf-8")

    for dtype in plan.dtypes:
        model, tokenizer = load(arguments, device, dtype)
        ids = tokens_of(tokenizer, model.config.vocabulary, plan.text)
        if dtype == plan.dtypes[0] and "agreement" not in details:
            layouts = {name: parse_kv_format(name, model.config.record_elements) for name in KV_FORMATS}
            details["perplexity"] = {name: perplexity(model, one, ids).perplexity for name, one in layouts.items()}
            details["agreement"] = compare_backends(model, ids, plan, graphs[0])
        for _ in measure(model, ids, plan, graphs, details["runs"]):
            save()
    if not all(row["equal"] for row in details["agreement"]):
        raise SystemExit("backends generate different tokens")


if __name__ == "__main__":
    main()
