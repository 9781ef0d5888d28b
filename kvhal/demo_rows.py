"""The first half of the demo: a real model's rows through every format, checked byte for byte against the reference."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.resources import as_file, files

import numpy as np
import torch

import kvhal
from kvhal import plan
from kvhal.formats import (
    BF16_FORMAT,
    FP4_INDEX_KV_FORMAT,
    FP8_FLOAT32_SF_INDEX_KV_FORMAT,
    MXFP8_INDEX_KV_FORMAT,
    V41_FORMAT,
    V41_FP4_FORMAT,
    KVCacheFormat,
)
from kvhal.interface import Op
from kvhal.layout import cache_view, min_block_stride

REFERENCE = "reference_torch"
SPARE_BLOCKS = 5  #: blocks that belong to nobody: their bytes must survive
SEED = 2026

#: the model's own KV row is 384 wide: formats a user would define for it
KV384_FORMAT = KVCacheFormat("e4m3", 384, 32, 0, True, "ue8m0", "K and V of a 384-wide model", token_interleaved=True)
KV384_FP4_FORMAT = KVCacheFormat("e2m1", 384, 16, 0, True, "e4m3", "the same in FP4", token_interleaved=True)


@dataclass(frozen=True)
class Test:
    """What is tested, and where.

    Args:
        device: where the backend under test works; the reference works on the CPU.
        block_size: tokens a block of the rows' caches.
        backend: the backend under test, None for the one that a call would get.
        simulate: it may run through its functional simulator.
    """

    device: torch.device
    block_size: int = 64
    backend: str | None = None
    simulate: bool = False

    def forced(self) -> AbstractContextManager[None]:
        """The context in which calls reach the backend under test."""
        return kvhal.use_backend(self.backend, simulate=self.simulate) if self.backend else nullcontext()


@dataclass(frozen=True, eq=False)
class RowsCase:
    """Rows to store: bf16 ``[sequences, tokens, elements]`` on the CPU."""

    name: str
    layout: KVCacheFormat
    source: str
    rows: torch.Tensor


@dataclass(frozen=True)
class RowsResult:
    """What became of one case.

    Attributes:
        backend: who stored and loaded, None when it was refused.
        simulated: through a functional simulator.
        snr_db: signal-to-noise ratio of the dequantised rows in decibels, None when they are exact.
        bytes_equal: the whole cache, spare blocks and padding included, and everything loaded equal the reference's.
        refused: why nothing ran.
    """

    name: str
    source: str
    tokens: int
    bytes_per_token: int
    compression: float
    backend: str | None = None
    simulated: bool = False
    snr_db: float | None = None
    bytes_equal: bool | None = None
    refused: str | None = None


def real_cases(tokens: int = 512) -> list[RowsCase]:
    """Every format with the rows that fit it, the first `tokens` of each layer; kvhal/data/README.md describes them."""
    with as_file(files("kvhal") / "data" / "real_rows.npz") as path, np.load(path) as archive:
        kv, hidden = (torch.from_numpy(archive[key][:, :tokens]).view(torch.bfloat16) for key in ("kv384", "hidden512"))
    keys = kv[..., :128]  # two heads of rotated keys: what an indexer's key is like
    table = (
        ("BF16_FORMAT", BF16_FORMAT, "hidden state", hidden),
        ("V41_FORMAT", V41_FORMAT, "hidden state", hidden),
        ("V41_FP4_FORMAT", V41_FP4_FORMAT, "hidden state", hidden),
        ("KV384_FORMAT", KV384_FORMAT, "keys and values", kv),
        ("KV384_FP4_FORMAT", KV384_FP4_FORMAT, "keys and values", kv),
        ("MXFP8_INDEX_KV_FORMAT", MXFP8_INDEX_KV_FORMAT, "rotated keys", keys),
        ("FP8_FLOAT32_SF_INDEX_KV_FORMAT", FP8_FLOAT32_SF_INDEX_KV_FORMAT, "rotated keys", keys),
        ("FP4_INDEX_KV_FORMAT", FP4_INDEX_KV_FORMAT, "rotated keys", keys),
    )
    return [RowsCase(*row) for row in table]


def run_case(case: RowsCase, test: Test) -> RowsResult:
    """Stores a case's rows in shuffled pages and reads them back, with the backend under test and the reference."""
    layout = case.layout
    facts = (case.name, case.source, case.rows.shape[0] * case.rows.shape[1], layout.bytes_per_token)
    compression = 2 * layout.elements / layout.bytes_per_token
    try:
        with test.forced():
            chosen = kvhal.explain(Op.STORE, layout=layout, device=test.device, block_size=test.block_size)
            tested = _write_and_read(case, test.device, test.block_size)
    except kvhal.UnsupportedError as error:
        return RowsResult(*facts, compression, refused=str(error))
    with kvhal.use_backend(REFERENCE):
        expected = _write_and_read(case, torch.device("cpu"), test.block_size)
    equal = all(_same_bytes(have, need) for have, need in zip(tested, expected, strict=True))
    snr = signal_to_noise(case.rows.flatten(0, 1), tested[1])
    return RowsResult(*facts, compression, chosen.chosen, chosen.simulated, snr, equal)


def _same_bytes(have: torch.Tensor, need: torch.Tensor) -> bool:
    return torch.equal(have.view(torch.uint8), need.view(torch.uint8))


def _write_and_read(case: RowsCase, device: torch.device, block_size: int) -> list[torch.Tensor]:
    """The whole cache, the rows by slot (bf16), and what a load plan returns (one or two tensors), all on the CPU."""
    sequences, tokens, _ = case.rows.shape
    width = -(-tokens // block_size)
    pages = torch.randperm(sequences * width + SPARE_BLOCKS, generator=torch.Generator().manual_seed(SEED))
    tables = pages[: sequences * width].view(sequences, width).to(torch.int32)
    lengths = [tokens] * sequences
    slots = plan.build_paged_slot_mapping(lengths, lengths, tables, block_size=block_size)
    load = plan.build_compressed_load_plan(lengths, tables, block_size=block_size, ratio=1)

    storage = _filled(len(pages), min_block_stride(case.layout, block_size), device)
    cache = cache_view(storage, block_size, case.layout)
    on_device = slots.to(device)
    kvhal.store_kv_cache(case.rows.flatten(0, 1).to(device), cache, on_device, layout=case.layout)
    by_slot = kvhal.load_kv_slots(cache, on_device, layout=case.layout)
    loaded = kvhal.load_paged_kv_cache(cache, load.segments.to(device), load.total_k, layout=case.layout)
    return [tensor.cpu() for tensor in (storage, by_slot, loaded.kv, loaded.sf) if tensor is not None]


def _filled(num_blocks: int, stride: int, device: torch.device) -> torch.Tensor:
    """Storage whose every byte depends on its address, so that a stray write or a copied block shows."""
    address = torch.arange(num_blocks * stride, dtype=torch.int64)
    return ((address * 0x9E3779B1 >> 13) & 0xFF).to(torch.uint8).view(num_blocks, stride).to(device)


def signal_to_noise(signal: torch.Tensor, restored: torch.Tensor) -> float | None:
    """10 log10 of signal power over error power; None without any error."""
    exact = signal.double()
    noise = float((exact - restored.double()).square().sum())
    return 10 * math.log10(float(exact.square().sum()) / noise) if noise else None
