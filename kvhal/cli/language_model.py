"""What `kvhal generate` and `kvhal perplexity` share: their options, and which backends serve a record."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import torch
import typer

import kvhal
from kvhal.cli.console import CommandError
from kvhal.config import check_name
from kvhal.formats import KVCacheFormat
from kvhal.interface import Op

BackendOption = Annotated[str | None, typer.Option(help="Use this backend.  [default: whichever a call gets]")]
SimulateOption = Annotated[bool, typer.Option("--simulate", help="It may use its functional simulator.")]
DeviceOption = Annotated[str, typer.Option(help="Where the model and its cache live.")]
ModelOption = Annotated[Path | None, typer.Option(help="A GGUF file.  [default: what scripts/get-model fetched]")]
BlockSizeOption = Annotated[int, typer.Option(min=1, max=4096, help="Tokens a cache block.")]

FORMAT_HELP = "bf16, fp8, fp4, mxfp4, or a JSON object of KVCacheFormat's fields"
READS_AND_WRITES = (Op.STORE, Op.LOAD, Op.LOAD_SLOTS)


def backend_context(backend: str | None, simulate: bool) -> AbstractContextManager[None]:
    """Forces the backend inside.

    Raises:
        CommandError: --simulate without --backend. ConfigError: an unknown backend, or one without a simulator.
    """
    if backend is None:
        if simulate:
            raise CommandError("--simulate: needs --backend, the backend whose simulator to use")
        return nullcontext()
    return kvhal.use_backend(check_name("--backend", backend), simulate=simulate)


def serving_backends(layout: KVCacheFormat, block_size: int, device: torch.device) -> str:
    """Names of the backends that serve a record's reads and writes under the policy in force."""
    decisions = [kvhal.explain(op, layout=layout, block_size=block_size, device=device) for op in READS_AND_WRITES]
    return ", ".join(sorted({str(decision.chosen) for decision in decisions}))
