"""Context parallelism through NCCL, a GPU for each process; the script that it runs prints what differs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.gpu


def test_two_gpus_end_with_the_bytes_of_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device, needs two")
    command = [sys.executable, "-m", "tests.context_parallel", "--processes", "2", "--device", "cuda"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 processes on cuda: tokens, logits and caches of one process" in done.stdout
