"""Context parallelism: what each rank is given, and 2 and 4 processes that end with the bytes of one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvhal.engine import Caches, ContextParallel
from kvhal.engine.metadata import plan_prefill
from tests.context_parallel import config, texts

ROOT = Path(__file__).resolve().parents[2]


def as_rank(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> ContextParallel:
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: rank)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: size)
    return ContextParallel()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_share_the_queries_and_their_padding_sees_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = Caches(config("fp8"), torch.device("cpu"))
    chunks = [tokens for tokens in texts() if tokens]
    sequences, lengths = [caches.open() for _ in chunks], [len(tokens) for tokens in chunks]
    caches.reserve(sequences, lengths)
    whole = plan_prefill(caches, sequences, chunks)
    shares = [as_rank(rank, size, monkeypatch).share(whole, lengths) for rank in range(size)]
    assert len({share.tokens.shape for share in shares}) == 1, "ranks have equally many rows"
    assert all(share.chunk_rows == sum(lengths) for share in shares)
    order = shares[0].order
    assert order is not None
    for name in ("tokens", "positions", "swa_pivots", "visible_begin", "visible_end"):
        assert torch.equal(torch.cat([getattr(share, name) for share in shares])[order], getattr(whole, name))
    padding = torch.ones(size * shares[0].tokens.shape[0], dtype=torch.bool)
    padding[order] = False
    assert size == 1 or padding.any()
    pivots = torch.cat([share.swa_pivots for share in shares])[padding]
    assert not pivots[:, [1, 3]].any()
    assert torch.equal(
        *(torch.cat([getattr(share, f"visible_{end}") for share in shares])[padding] for end in ("begin", "end"))
    )


def test_two_and_four_processes_end_with_the_bytes_of_one() -> None:
    command = [sys.executable, "-m", "tests.context_parallel", "--processes", "2", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 and 4 processes on cpu: tokens, logits and caches of one process" in done.stdout
