"""`kvhal generate`: a language model answers, its KV cache in kvhal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.live import Live
from rich.text import Text

from kvhal.cli.console import CommandError, JsonOption, parse_device, print_json, print_lines, progress, stdout
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
    from kvhal.llm import Generation, Model, Step
    from kvhal.llm.tokenizer import TextTokenizer


def command(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Several are answered as one batch.")],
    kv_format: Annotated[str, typer.Option(help=f"The cache's records: {FORMAT_HELP}.")] = "fp8",
    backend: BackendOption = None,
    simulate: SimulateOption = False,
    device: DeviceOption = "cpu",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens an answer has at most.")] = 128,
    model: ModelOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")] = False,
    block_size: BlockSizeOption = 64,
    cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens the cache has room for.  [default: what the prompts need]")
    ] = None,
    graph: Annotated[bool | None, typer.Option(help="Replay decode steps as CUDA graphs.  [default: on cuda]")] = None,
    json: JsonOption = False,
) -> None:
    """Answers prompts with a small language model whose KV cache lives in kvhal; tokens appear as they are made."""
    from kvhal.llm import Generation, PagedCache, check_prompts, load_model, parse_kv_format

    where = parse_device(device)
    with backend_context(backend, simulate):
        network, tokenizer = _load(load_model, model, where)
        layout = parse_kv_format(kv_format, network.config.record_elements)
        ids = [tokenizer.encode(prompt) if raw else tokenizer.encode_chat(prompt) for prompt in prompts]
        check_prompts(ids, max_tokens, network)
        blocks = _blocks(ids, max_tokens, block_size, cache_tokens)
        cache = PagedCache(network.config.layers, blocks, block_size, layout, where)
        generation = Generation(network, cache, graph=where.type == "cuda" if graph is None else graph)
        steps = generation.run(ids, max_tokens, tokenizer.stop)
        answers = _collect(steps, len(ids)) if json else _show(steps, prompts, tokenizer)
        backends = serving_backends(layout, block_size, where)
    if json:
        print_json(_facts(generation, kv_format, backends, where, prompts, answers, tokenizer))
    else:
        _summary(generation, kv_format, backends, where)


def _load(load: Any, path: Any, device: torch.device) -> tuple[Model, TextTokenizer]:
    """The model, behind a bar that says why nothing happens yet."""
    with progress() as bars:
        bars.add_task("loading the model", total=None)
        network, tokenizer = load(path, device)
    return network, tokenizer


def _blocks(prompts: Sequence[Sequence[int]], max_tokens: int, block_size: int, cache_tokens: int | None) -> int:
    if cache_tokens is None:
        return sum(math.ceil((len(prompt) + max_tokens) / block_size) for prompt in prompts)
    if cache_tokens < block_size:
        raise CommandError(f"--cache-tokens: has {cache_tokens}, needs at least one block of {block_size}")
    return cache_tokens // block_size


def _collect(steps: Iterator[Step], count: int) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in range(count)]
    for step in steps:
        _extend(answers, step)
    return answers


def _extend(answers: list[list[int]], step: Step) -> None:
    for answer, token in zip(answers, step, strict=True):
        if token is not None:
            answer.append(token)


def _show(steps: Iterator[Step], prompts: Sequence[str], tokenizer: TextTokenizer) -> list[list[int]]:
    """Prints tokens as they come: one answer as running text, several side by side where there is a terminal."""
    if len(prompts) == 1:
        return _show_one(steps, tokenizer)
    answers: list[list[int]] = [[] for _ in prompts]

    def lines() -> list[str]:
        return [f"[{number}] {tokenizer.decode(answer)}" for number, answer in enumerate(answers, 1)]

    console = stdout()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for step in steps:
            _extend(answers, step)
            if console.is_terminal:
                live.update(Text("\n".join(lines())), refresh=True)
    print_lines(*lines())
    return answers


def _show_one(steps: Iterator[Step], tokenizer: TextTokenizer) -> list[list[int]]:
    answer: list[list[int]] = [[]]
    text = tokenizer.stream()
    for step in steps:
        _extend(answer, step)
        if step[0] is not None:
            typer.echo(text(step[0]), nl=False)
    typer.echo()
    return answer


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 2) if seconds else 0.0


def _summary(run: Generation, kv_format: str, backends: str, device: torch.device) -> None:
    """What it took, on stderr: stdout is the text."""
    cache = run.cache
    bf16 = run.model.config.layers * run.model.config.record_elements * 2
    lines = [
        f"prefill {run.prompt_tokens} tokens at {_rate(run.prompt_tokens, run.prefill_seconds)} tokens/s, "
        f"decode {run.decode_tokens} tokens at {_rate(run.decode_tokens, run.decode_seconds)} tokens/s"
        + (" (CUDA graph)" if run.graph else ""),
        f"cache {kv_format}: {cache.bytes_per_token:g} bytes/token, {cache.bytes_per_token / bf16:.1%} of bf16; "
        f"served by {backends} on {device}",
    ]
    for line in lines:
        typer.echo(line, err=True)


def _facts(
    run: Generation,
    kv_format: str,
    backends: str,
    device: torch.device,
    prompts: Sequence[str],
    answers: list[list[int]],
    tokenizer: TextTokenizer,
) -> dict[str, Any]:
    return {
        "kv_format": kv_format,
        "layout": run.cache.layout.describe(),
        "backends": backends,
        "device": str(device),
        "graph": run.graph,
        "cache_bytes_per_token": run.cache.bytes_per_token,
        "prompt_tokens": run.prompt_tokens,
        "prefill_tokens_per_second": _rate(run.prompt_tokens, run.prefill_seconds),
        "decode_tokens": run.decode_tokens,
        "decode_tokens_per_second": _rate(run.decode_tokens, run.decode_seconds),
        "answers": [
            {"prompt": prompt, "text": tokenizer.decode(answer), "tokens": answer}
            for prompt, answer in zip(prompts, answers, strict=True)
        ],
    }
