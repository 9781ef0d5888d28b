"""Prefill shared between processes, held to one process: the same tokens, logit bits, cache bytes and pending rows.

    python -m tests.context_parallel --processes 2 4                  # gloo on the CPU
    python -m tests.context_parallel --processes 2 --device cuda      # NCCL, a GPU for each process

Every rank checks all that it holds; the exit code is 0 when nothing differs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import kvhal
from kvhal.engine import BOS, ContextParallel, Engine, EngineConfig

FORMATS = {
    "fp8": {},
    "fp4": {"main_format": kvhal.V41_FP4_FORMAT, "index_format": kvhal.FP4_INDEX_KV_FORMAT},
}
#: no length divides into 4 or 8 equal parts; one is shorter than the ranks are many, one is empty
LENGTHS = (29, 3, 0, 18)
NEW_TOKENS = 2
#: several chunks, the last of other lengths; everything at once
CASES = (("fp8", 11), ("fp4", 64))


def config(formats: str) -> EngineConfig:
    """Two groups of layers, windows and blocks that chunks cross."""
    return EngineConfig(
        num_layers=3,
        layers_per_group=2,
        hidden_size=64,
        ffn_size=64,
        window_size=12,
        swa_block_size=14,
        block_size=16,
        top_k=4,
        max_seq_len=64,
        **FORMATS[formats],
    )


def texts() -> list[list[int]]:
    """Tokens of each sequence."""
    generator = torch.Generator().manual_seed(7)
    return [[BOS, *torch.randint(0, 256, (length,), generator=generator).tolist()][:length] for length in LENGTHS]


def run(engine: Engine, chunk_size: int) -> dict[str, Tensor]:
    """Everything that a prefill and a few decode steps leave, by name, on the CPU."""
    sequences, logits = engine.prefill(texts(), chunk_size)
    found = {f"logits of sequence {i}": rows for i, rows in enumerate(logits)}
    tokens = torch.arange(len(sequences), device=engine.device)
    for step in range(NEW_TOKENS):
        rows, tokens = engine.decode(sequences, tokens)
        found |= {f"logits of step {step}": rows.clone(), f"tokens of step {step}": tokens.clone()}
    found |= engine.caches.tensors()
    found |= {f"pending.{layer}": source.pending for layer, source in engine.caches.sources.items()}
    return {name: tensor.cpu() for name, tensor in found.items()}


def differences(device: torch.device, parallel: ContextParallel, wanted: list[dict[str, Tensor]]) -> list[str]:
    """What differs between prefills shared by some ranks and those of one process."""
    found = []
    for (formats, chunk_size), need in zip(CASES, wanted, strict=True):
        shared = run(Engine(config(formats), device, parallel=parallel), chunk_size)
        case = f"rank {parallel.rank} of {parallel.size}, {formats}, chunks of {chunk_size}"
        found += [f"{case}: {name}" for name, have in shared.items() if not same(have, need[name])]
    return found


def same(have: Tensor, need: Tensor) -> bool:
    """Equal bytes."""
    return have.shape == need.shape and torch.equal(have.contiguous().view(torch.uint8), need.contiguous().view(torch.uint8))


def alone(device: torch.device) -> list[dict[str, Tensor]]:
    """The results of one process."""
    return [run(Engine(config(formats), device), chunk_size) for formats, chunk_size in CASES]


def process(rank: int, sizes: list[int], device: str, meeting: str, wanted: list[dict[str, Tensor]] | None) -> None:
    """One rank: checks a group of each size that it belongs to; raises when anything differs."""
    torch.set_num_threads(1)
    where, backend = torch.device("cpu"), "gloo"
    if device == "cuda":
        where, backend = torch.device("cuda", rank), "nccl"
        torch.cuda.set_device(where)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=max(sizes))
    wanted = alone(where) if wanted is None else wanted
    found = []
    for size in sizes:
        group = dist.new_group(list(range(size)))
        if rank < size:
            found += differences(where, ContextParallel(group), wanted)
    dist.barrier()
    dist.destroy_process_group()
    if found:
        raise SystemExit("\n".join(found))


def main() -> None:
    """Runs the processes and waits for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2], help="sizes of the groups to check")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a process that has threads cannot be forked
    start, sizes, device = time.perf_counter(), sorted(arguments.processes), arguments.device
    # A forked process has torch and the expected results already; CUDA does not survive a fork.
    method, wanted = ("spawn", None) if device == "cuda" else ("fork", alone(torch.device("cpu")))
    with tempfile.TemporaryDirectory() as folder:
        given = (sizes, device, str(Path(folder) / "meeting"), wanted)
        mp.start_processes(process, given, nprocs=max(sizes), start_method=method)
    who, seconds = " and ".join(map(str, sizes)), time.perf_counter() - start
    print(f"{who} processes on {device}: tokens, logits and caches of one process ({seconds:.1f} s)")


if __name__ == "__main__":
    main()
