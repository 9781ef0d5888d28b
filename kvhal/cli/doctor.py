"""`kvhal doctor`: what this machine has, and which backend can serve what on which device."""

from __future__ import annotations

import os
import platform as host
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import typer

from kvhal.cli.console import EXIT_NO, JsonOption, print_json, print_lines, print_table, progress
from kvhal.cli.explain import reason_facts
from kvhal.config import ENV_BACKEND, ENV_CONFIG, ENV_STRICT, current_policy
from kvhal.dispatcher import Policy, resolve
from kvhal.errors import describe_reason
from kvhal.formats import BUILTIN_FORMATS
from kvhal.interface import FORMAT_OPS, Backend, Op, Reason, Request
from kvhal.platform import TOOLS, Module, Platform, available_devices, detect
from kvhal.registry import backends, refused
from kvhal.version import __version__

IMPORT_SECONDS = 120  #: a language that takes longer to import is reported as broken


def command(json: JsonOption = False) -> None:
    """What this machine has, which backends can serve on it, and why not; exit code 1 when an operation has none."""
    report = examine()
    if json:
        print_json(report)
    else:
        _show(report)
    if any(device["unserved"] for device in report["devices"]):
        raise typer.Exit(EXIT_NO)


def examine() -> dict[str, Any]:
    """Everything `kvhal doctor` says, as JSON values."""
    policy = current_policy()
    devices = available_devices()
    modules = try_imports(detect(devices[0]).modules)
    tools = dict(detect(devices[0]).tools)
    return {
        "kvhal": __version__,
        "python": host.python_version(),
        "system": host.platform(),
        "modules": [{"name": module.name, "version": module.version, "error": module.error} for module in modules],
        "tools": [{"name": tool, "path": tools.get(tool)} for tool in TOOLS],
        "config": _config_facts(policy),
        "refused_backends": [reason_facts(reason) for reason in refused()],
        "devices": [_device_facts(device, modules, policy) for device in devices],
    }


def try_imports(modules: Iterable[Module]) -> tuple[Module, ...]:
    """The modules with the error of those that are installed but do not import.

    Each is imported in a process of its own: a broken one may abort, and this process must not start any device.
    """
    modules = tuple(modules)
    started = {
        module.name: subprocess.Popen(
            [sys.executable, "-c", f"import {module.name}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for module in modules
        if module.version is not None and module.name not in sys.modules
    }
    with progress() as bars:
        task = bars.add_task("importing the kernel languages", total=len(started))
        errors = {}
        for name, process in started.items():
            errors[name] = _import_error(process)
            bars.advance(task)
    return tuple(
        replace(module, version=None, error=f"{module.version} is installed: {error}")
        if (error := errors.get(module.name))
        else module
        for module in modules
    )


def _import_error(process: subprocess.Popen[str]) -> str | None:
    try:
        _, text = process.communicate(timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"importing it takes longer than {IMPORT_SECONDS} s"
    if process.returncode == 0:
        return None
    lines = text.strip().splitlines()
    return lines[-1] if lines else f"importing it ends the process with exit code {process.returncode}"


def _config_facts(policy: Policy) -> dict[str, Any]:
    return {
        "environment": {name: os.environ.get(name) for name in (ENV_CONFIG, ENV_BACKEND, ENV_STRICT)},
        "strict": policy.strict,
        "simulate": policy.simulate,
        "preference": None if policy.preference is None else list(policy.preference),
        "forced": [{"op": str(op), "backend": name, "by": source} for op, name, source in policy.forced],
    }


def _device_facts(device: torch.device, modules: tuple[Module, ...], policy: Policy) -> dict[str, Any]:
    platform = replace(detect(device), modules=modules, simulate=policy.simulate)
    native = [_backend_facts(backend, platform) for backend in backends().values()]
    # What simulators and interpreters would add, were they switched on.
    everything = replace(platform, interpreted=True, simulate=True)
    simulated = [_backend_facts(backend, everything) for backend in backends().values()]
    decisions = [resolve(request, policy, backends()) for request in questions(platform)]
    return {
        "device": str(device),
        "kind": platform.kind,
        "arch": platform.arch,
        "name": platform.device_name,
        "backends": native,
        "with_simulators": [more for plain, more in zip(native, simulated, strict=True) if more["served"] > plain["served"]],
        "default": {str(op): sorted({d.chosen for d in decisions if d.chosen and d.request.op == op}) for op in Op},
        "unserved": [_cell_name(decision.request) for decision in decisions if decision.chosen is None],
    }


def questions(platform: Platform) -> list[Request]:
    """Every operation, those on records once for each built-in format."""
    return [
        Request(op, layout, platform) for op in Op for layout in (BUILTIN_FORMATS.values() if op in FORMAT_OPS else (None,))
    ]


def _cell_name(request: Request) -> str:
    return str(request.op) + (f" of {request.layout}" if request.layout else "")


def _backend_facts(backend: Backend, platform: Platform) -> dict[str, Any]:
    asked = questions(platform)
    against: dict[Reason, list[str]] = {}
    served = 0
    for request in asked:
        reasons = backend.why_not(request)
        served += not reasons
        for reason in reasons:
            against.setdefault(reason, []).append(_cell_name(request))
    return {
        "backend": backend.name,
        "runs_on": backend.runs_on,
        "served": served,
        "asked": len(asked),
        "reasons": [{**reason_facts(reason), "against": cells} for reason, cells in against.items()],
        "tuning": _tuning_facts(backend, platform) if served else None,
    }


def _tuning_facts(backend: Backend, platform: Platform) -> dict[str, Any] | None:
    """Where the launch shapes come from; None where there are none, as on a CPU, which no kernel is tuned for."""
    table = backend.tuned
    if table is None or platform.kind == "cpu":
        return None
    files = table.files(platform.arch)
    return {
        "tuned": bool(files),
        "files": list(files),
        "safe_defaults": list(table.untuned(platform.arch)),
        "run": table.command,
    }


def _show(report: dict[str, Any]) -> None:
    print_lines(f"kvhal {report['kvhal']}, Python {report['python']}, {report['system']}", "")
    software = [(module["name"], module["version"] or "-", module["error"] or "") for module in report["modules"]]
    software += [(tool["name"], "found" if tool["path"] else "-", tool["path"] or "not on PATH") for tool in report["tools"]]
    print_table("Software", ("name", "version", "remark"), software)
    rows = []
    for device in report["devices"]:
        for label, key in (("", "backends"), (", simulators on", "with_simulators")):
            rows += [(device["device"] + label, *_serves(row)) for row in device[key]]
    print_table("Backends", ("device", "backend", "serves", "made for"), rows)
    if report["refused_backends"]:
        print_lines("refused: other packages' backends", *(f"  {_text(reason)}" for reason in report["refused_backends"]), "")
    for device in report["devices"]:
        _show_device(device)
    _show_config(report["config"])


def _serves(row: dict[str, Any]) -> tuple[str, str, str]:
    words = {0: "nothing", row["asked"]: "everything"}
    return row["backend"], words.get(row["served"], f"{row['served']} of {row['asked']}"), row["runs_on"]


def _show_device(device: dict[str, Any]) -> None:
    print_lines(f"{device['device']}: {device['kind']}, {device['arch']}, {device['name']}")
    for row in device["backends"]:
        if row["reasons"]:
            print_lines(f"  {row['backend']} cannot serve {'anything' if row['served'] == 0 else 'some of it'}:")
        for reason in row["reasons"]:
            print_lines(f"    {_describe(reason, row['asked'])}")
    for row in device["backends"]:
        if row["tuning"] is not None:
            print_lines(f"  {row['backend']} {_describe_tuning(row['tuning'], device['arch'])}")
    chosen = {name for names in device["default"].values() for name in names}
    print_lines(f"  a call is served by: {', '.join(sorted(chosen)) or 'nothing'}")
    if device["unserved"]:
        print_lines(f"  nothing serves: {', '.join(device['unserved'])}")
    print_lines("")


def _text(facts: dict[str, Any]) -> str:
    return describe_reason(Reason(facts["what"], facts["have"], facts["need"], facts["hint"]))


def _describe_tuning(facts: dict[str, Any], arch: str) -> str:
    if not facts["tuned"]:
        return f"is untuned on {arch}: safe defaults; run {facts['run']} to tune"
    rest = f"; safe defaults for {', '.join(facts['safe_defaults'])}" if facts["safe_defaults"] else ""
    return f"is tuned on {arch} by {', '.join(facts['files'])} in benchmarks/results{rest}"


def _describe(facts: dict[str, Any], asked: int) -> str:
    cells = facts["against"]
    if len(cells) == asked:
        return _text(facts)
    scope = cells[0] if len(cells) == 1 else f"{len(cells)} of {asked}, such as {cells[0]}"
    return f"{_text(facts)} [{scope}]"


def _show_config(config: dict[str, Any]) -> None:
    environment = ", ".join(f"{name}={value}" for name, value in config["environment"].items() if value)
    order = "the platform's own" if config["preference"] is None else ", ".join(config["preference"])
    print_lines(f"config: {environment or 'nothing set in the environment'}; order: {order}; strict: {config['strict']}")
    forced = {(entry["backend"], entry["by"]) for entry in config["forced"]}
    for backend, source in sorted(forced):
        ops = [entry["op"] for entry in config["forced"] if (entry["backend"], entry["by"]) == (backend, source)]
        print_lines(f"  {backend} is forced by {source} for {', '.join(ops)}")
