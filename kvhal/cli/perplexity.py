"""`kvhal perplexity`: what a record costs a language model in quality."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from kvhal.cli.console import CommandError, JsonOption, parse_device, print_json, print_table, progress
from kvhal.cli.language_model import (
    FORMAT_HELP,
    BackendOption,
    BlockSizeOption,
    DeviceOption,
    ModelOption,
    SimulateOption,
    backend_context,
    serving_backends,
)

if TYPE_CHECKING:
    from kvhal.formats import KVCacheFormat
    from kvhal.llm import Model


def command(
    file: Annotated[Path, typer.Argument(help="A text, UTF-8; blank lines around it do not count.")],
    kv_format: Annotated[
        list[str] | None, typer.Option(help=f"{FORMAT_HELP}; repeatable.  [default: bf16, fp8, fp4 and mxfp4]")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text that count, from its beginning.")] = 1024,
    backend: BackendOption = None,
    simulate: SimulateOption = False,
    device: DeviceOption = "cpu",
    model: ModelOption = None,
    block_size: BlockSizeOption = 64,
    json: JsonOption = False,
) -> None:
    """How well the language model predicts a text when all it attends to comes out of the cache; lower is better."""
    from kvhal.llm import KV_FORMATS, load_model, parse_kv_format

    where = parse_device(device)
    text = _read(file)
    with backend_context(backend, simulate), progress() as bars:
        task = bars.add_task("loading the model", total=None)
        network, tokenizer = load_model(model, where)
        layouts = {name: parse_kv_format(name, network.config.record_elements) for name in kv_format or KV_FORMATS}
        ids = tokenizer.encode(text)[:tokens]
        rows = []
        bars.update(task, total=len(layouts))
        for name, layout in layouts.items():
            bars.update(task, description=f"{name}, {len(ids)} tokens")
            rows.append({"kv_format": name, **_measure(network, layout, ids, block_size, where)})
            bars.advance(task)
    if json:
        print_json({"file": str(file), "device": str(where), "results": rows})
        return
    columns = {
        "records": "kv_format",
        "perplexity": "perplexity",
        "cache bytes/token": "cache_bytes_per_token",
        "seconds": "seconds",
        "backend": "backends",
    }
    cells = [[f"{row[key]:.2f}" if key == "perplexity" else row[key] for key in columns.values()] for row in rows]
    title = f"Perplexity of {file.name}, {len(ids)} tokens"
    print_table(title, list(columns), cells, right=("perplexity", "cache bytes/token", "seconds"))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip("\n")
    except OSError as error:
        raise CommandError(f"FILE: cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"FILE: {file} is not UTF-8 text (byte {error.start})") from error


def _measure(model: Model, layout: KVCacheFormat, ids: list[int], block_size: int, device: torch.device) -> dict[str, Any]:
    from kvhal.llm import perplexity

    start = time.perf_counter()
    result = perplexity(model, layout, ids, block_size=block_size)
    return {
        "layout": layout.describe(),
        "perplexity": result.perplexity,
        "tokens": result.tokens,
        "cache_bytes_per_token": result.bytes_per_token,
        "seconds": round(time.perf_counter() - start, 2),
        "backends": serving_backends(layout, block_size, device),
    }
