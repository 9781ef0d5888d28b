"""The model file by default, and clear words when it or what reads it is missing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvhal.llm.errors import LLMError
from kvhal.llm.model import Model

if TYPE_CHECKING:
    from kvhal.llm.tokenizer import TextTokenizer


def load_model(
    path: Path | None = None, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Model, TextTokenizer]:
    """The model and the tokenizer of a GGUF file.

    Args:
        path: the file; None for the one that `scripts/get-model` fetches.
        device: where the weights go.
        dtype: what they are dequantised to, and what the model computes in.

    Raises:
        LLMError: the file is missing or not one that can be served, or the extra `llm` is not installed.
    """
    from kvhal.llm.fetch import default_model_path  # late, so that `python -m kvhal.llm.fetch` finds it not imported yet

    file = default_model_path() if path is None else path
    if not file.is_file():
        raise LLMError(
            f"model: no file {file}; `scripts/get-model` (or `python -m kvhal.llm.fetch`) fetches SmolLM2-135M-Instruct, "
            "--model names another file"
        )
    try:
        from kvhal.llm.gguf_file import load_gguf  # the only part that needs the extra
    except ImportError as error:
        raise LLMError(f"model: reading it needs the extra llm, pip install 'kvhal[llm]' ({error})") from error
    return load_gguf(file, device, dtype)
