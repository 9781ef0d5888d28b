"""`kvhal explain`: the decision that a call would use, with every candidate's reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

import kvhal
from kvhal.cli.console import EXIT_NO, CommandError, JsonOption, parse_device, print_json, print_lines
from kvhal.config import check_name, current_policy
from kvhal.dispatcher import PREFERENCE, Policy
from kvhal.formats import KVCacheFormat, format_from_text
from kvhal.interface import FORMAT_OPS, Decision, Op, Reason
from kvhal.platform import LANGUAGES, TOOLS, Module, Platform, detect


def command(
    op: Annotated[str, typer.Argument(help="The operation's public name, such as store_kv_cache.")],
    layout: Annotated[
        str | None, typer.Option("--format", help="A built-in format's name, or a JSON object of a format's fields.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="A device of this machine.  [default: cpu]")] = None,
    platform: Annotated[str | None, typer.Option(help=f"Ask about another machine, by kind ({', '.join(PREFERENCE)}).")] = None,
    arch: Annotated[str | None, typer.Option(help="Its architecture (sm_90, ascend950, gfx942).")] = None,
    missing: Annotated[list[str] | None, typer.Option(help="Software that it lacks; repeatable.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens a block.")] = None,
    backend: Annotated[str | None, typer.Option(help="As if this backend were forced.")] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="As if simulators were allowed on CPU tensors.")] = False,
    json: JsonOption = False,
) -> None:
    """Which backend serves an operation, and why not the others; exit code 1 when none does."""
    operation = parse_op(op)
    record = parse_format(operation, layout)
    machine = _machine(device, platform, arch, missing or [])
    policy = _policy(operation, backend, simulate)
    decision = kvhal.explain(operation, layout=record, block_size=block_size, platform=machine, policy=policy)
    if json:
        print_json(decision_facts(decision))
    else:
        print_lines(*str(decision).splitlines())
    if decision.chosen is None:
        raise typer.Exit(EXIT_NO)


def parse_op(text: str, option: str = "OP") -> Op:
    """The operation of this name.

    Raises:
        CommandError: there is none; lists them.
    """
    try:
        return Op(text)
    except ValueError:
        raise CommandError(f"{option}: has {text!r}, needs one of {', '.join(Op)}") from None


def parse_format(op: Op, text: str | None) -> KVCacheFormat | None:
    """The record format of a question about `op`: required by some operations, senseless for the others.

    Raises:
        CommandError: unknown, contradictory, missing or superfluous.
    """
    if op not in FORMAT_OPS:
        if text is not None:
            raise CommandError(f"--format: has {text!r}, needs nothing: {op} handles no records")
        return None
    if text is None:
        raise CommandError(f"--format: is missing, {op} needs one; `kvhal formats` lists them")
    try:
        return format_from_text(text)
    except ValueError as error:
        raise CommandError(f"--format: {error}") from None


def _machine(device: str | None, kind: str | None, arch: str | None, missing: list[str]) -> Platform:
    if kind is None:
        if arch is not None or missing:
            raise CommandError("--arch and --missing: describe another machine, need --platform as well")
        return kvhal.binding.platform_of(parse_device(device or "cpu"))
    if device is not None:
        raise CommandError("--platform: describes another machine, leave --device out")
    if kind not in PREFERENCE:
        try:
            torch.device(kind)  # platforms of other names have torch's
        except RuntimeError:
            needed = f"one of {', '.join(PREFERENCE)}, or a device type of torch"
            raise CommandError(f"--platform: has {kind!r}, needs {needed}") from None
    if arch is None:
        raise CommandError("--platform: needs --arch as well (sm_90, ascend950, gfx942, ...)")
    unknown = [name for name in missing if name not in LANGUAGES + TOOLS]
    if unknown:
        raise CommandError(f"--missing: has {unknown[0]!r}, needs one of {', '.join(LANGUAGES + TOOLS)}")
    return imagine(kind, arch, missing)


def imagine(kind: str, arch: str, missing: list[str]) -> Platform:
    """A machine with every language and tool but the missing ones; versions are this machine's where it has them."""
    here = detect("cpu")
    modules = tuple(
        Module(name, None, "not installed") if name in missing else Module(name, here.module(name).version or "assumed")
        for name in LANGUAGES
    )
    tools = tuple((name, here.tool(name) or "assumed") for name in TOOLS if name not in missing)
    return Platform(kind, arch, "described by --platform", modules, tools)


def _policy(op: Op, backend: str | None, simulate: bool) -> Policy:
    policy = current_policy()
    if backend is not None:
        policy = replace(policy, forced=((op, check_name("--backend", backend), "--backend"),))
    return replace(policy, simulate=True) if simulate else policy


def reason_facts(reason: Reason) -> dict[str, str]:
    """A reason as JSON values."""
    return {"what": reason.what, "have": reason.have, "need": reason.need, "hint": reason.hint}


def decision_facts(decision: Decision) -> dict[str, Any]:
    """A decision as JSON values."""
    request = decision.request
    return {
        "op": str(request.op),
        "format": None if request.layout is None else str(request.layout),
        "block_size": request.block_size,
        "platform": {
            "kind": request.platform.kind,
            "arch": request.platform.arch,
            "name": request.platform.device_name,
        },
        "chosen": decision.chosen,
        "simulated": decision.simulated,
        "forced_by": decision.forced_by,
        "candidates": [
            {
                "backend": verdict.backend,
                "supported": verdict.supported,
                "simulated": verdict.simulated,
                "reasons": [reason_facts(reason) for reason in verdict.reasons],
            }
            for verdict in decision.trace
        ],
    }
