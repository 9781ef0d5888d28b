"""What a record costs a language model in quality, and that decoding equals a full pass; writes JSON for the README.

    python benchmarks/llm_perplexity.py [--out benchmarks/results/llm_perplexity.json] [--incremental]

Perplexity of SmolLM2-135M-Instruct on the first 1,024 tokens of the Apache-2.0 licence, all K and V through records. Rounding
alone moves it, since a value near the middle of two codes falls either way and every later layer sees that: so each format is
measured again with embeddings that differ by a relative 1e-6, and the spread is part of the result.

--incremental also decodes the text one token after another in float64, and compares every next token with one full pass without
a cache. It takes minutes; without it the result of the last run is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import torch

from kvhal.llm import KV_FORMATS, Model, PagedCache, load_model, parse_kv_format, perplexity
from kvhal.llm.decode import DecodeBatch
from kvhal.llm.model import dense_attention

ROOT = Path(__file__).resolve().parents[1]
TEXT, TOKENS, SEEDS, NOISE = ROOT / "LICENSE", 1024, 4, 1e-6


def measure(model: Model, ids: list[int]) -> list[dict[str, Any]]:
    """One row a format."""
    rows = []
    models = [model, *(perturbed(model, seed) for seed in range(SEEDS))]
    for name in KV_FORMATS:
        layout = parse_kv_format(name, model.config.record_elements)
        results = [perplexity(one, layout, ids) for one in models]
        row = {
            "kv_format": name,
            "layout": layout.describe(),
            "cache_bytes_per_token": results[0].bytes_per_token,
            "perplexity": round(results[0].perplexity, 4),
            "perturbed": [round(result.perplexity, 4) for result in results[1:]],
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def perturbed(model: Model, seed: int) -> Model:
    """The model with input embeddings that differ by rounding-sized noise; the output matrix stays."""
    generator = torch.Generator().manual_seed(seed)
    table = model.weights.embedding
    noise = torch.randn(table.shape, generator=generator).to(table)
    return Model(model.config, dataclasses.replace(model.weights, embedding=table * (1 + NOISE * noise)))


@torch.inference_mode()
def without_cache(model: Model, ids: list[int]) -> tuple[float, torch.Tensor]:
    """Perplexity and every next token of one full pass that uses K and V as computed, rounded to bf16."""
    hidden = model.hidden(torch.tensor(ids), torch.arange(len(ids)), dense_attention(model.config))
    logits = model.logits(hidden)
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    return math.exp(loss.item()), logits.argmax(-1)


@torch.inference_mode()
def incremental(ids: list[int]) -> dict[str, Any]:
    """Decodes the text token by token with bf16 records, in float64, where no near tie is decided by rounding."""
    model, _ = load_model(dtype=torch.float64)
    _, expected = without_cache(model, ids)
    layout = parse_kv_format("bf16", model.config.record_elements)
    cache = PagedCache(model.config.layers, math.ceil(len(ids) / 64), 64, layout, "cpu")
    decoder = DecodeBatch(model, cache, cache.reserve([len(ids)]), [0], torch.tensor(ids[:1]))
    equal = 0
    for token, following in zip(ids, expected.tolist(), strict=True):
        decoder.tokens.fill_(token)
        decoder.step()
        equal += int(decoder.tokens.item() == following)
    return {"dtype": "float64", "kv_format": "bf16", "positions": len(ids), "equal_next_tokens": equal}


def headline(details: dict[str, Any]) -> dict[str, Any]:
    """The table that scripts/perplexity-table puts into the documents."""
    formats = details["formats"]
    bf16 = next(row["cache_bytes_per_token"] for row in formats if row["kv_format"] == "bf16")
    rows: list[list[Any]] = [["no cache", None, None, f"{details['without_cache']:.2f}", None]]
    for row in formats:
        values = [row["perplexity"], *row["perturbed"]]
        size = row["cache_bytes_per_token"]
        label = f"{row['kv_format']} `{row['layout']}`"
        spread = f"{min(values):.2f} to {max(values):.2f}"
        rows.append([label, f"{size:,.0f}", f"{size / bf16:.0%}", f"{row['perplexity']:.2f}", spread])
    notes = [f"The last column: {SEEDS + 1} runs that differ by rounding noise only, explained in docs/llm.md."]
    if details["incremental"]:
        found = details["incremental"]
        notes.append(
            f"Decoding token by token with bf16 records gives the next token of one full pass at {found['equal_next_tokens']} "
            f"of {found['positions']} positions ({found['dtype']})."
        )
    return {
        "title": f"Perplexity of {details['model']}, {details['tokens']:,} tokens of {details['text']}",
        "machine": f"CPU, {details['machine']}, torch {details['torch']}",
        "columns": ["K/V records", "cache bytes/token", "of bf16", "perplexity", "under rounding noise"],
        "rows": rows,
        "notes": notes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "llm_perplexity.json")
    parser.add_argument("--incremental", action="store_true", help="compare decoding with a full pass as well (minutes)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="fewer make a quick rehearsal")
    arguments = parser.parse_args()
    start = time.perf_counter()
    model, tokenizer = load_model()
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8").strip("\n"))[: arguments.tokens]
    earlier = json.loads(arguments.out.read_text(encoding="utf-8"))["details"] if arguments.out.is_file() else {}
    details: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct",
        "text": "the Apache-2.0 licence",
        "tokens": len(ids),
        "noise": NOISE,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "without_cache": round(without_cache(model, ids)[0], 4),
        "formats": measure(model, ids),
        "incremental": incremental(ids) if arguments.incremental else earlier.get("incremental"),
    }
    details["seconds"] = round(time.perf_counter() - start)
    document = {**headline(details), "details": details}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
