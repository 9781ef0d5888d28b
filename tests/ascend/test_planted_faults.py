"""Faults planted in the generated source of the kernels are found: the suite that passes on the kernels can also fail."""

import re
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("tilelang")

import kvhal
from kvhal import config
from kvhal.backends.ascend_tilelang import compiling, simulator
from kvhal.formats import V41_FORMAT
from kvhal.interface import CastArgs, HadamardArgs, KVCacheOutArgs, NormArgs, Op, RopeArgs
from kvhal.testing.conformance import cases, run_case

if (reason := simulator.why_unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)


@dataclass(frozen=True)
class Fault:
    """A replacement in the source of one operation's kernels."""

    name: str
    op: Op
    pattern: str
    replacement: str

    def plant(self, source: str) -> str:
        return re.sub(self.pattern, self.replacement, source, count=1)


CAPACITY = r"\(slot < \(\(\(int64_t\)blocks\) \* \(\(int64_t\)tokens\)\)\)"
FAULTS = [
    Fault("row off by one", Op.STORE, r"(int64_t token = \w+)", r"\1 + 1"),
    Fault("no upper bound", Op.STORE, CAPACITY, "true"),
    Fault("no lower bound", Op.STORE, r"\(\(int64_t\)0 <= slot\)", "true"),
    Fault("scale one byte off", Op.STORE, r"sf\[", "sf[1 + "),
    Fault("stray write into another record", Op.STORE, r"(int2\*\)\(data [^;]*;)", r"\1 data[block * data_step] = 0;"),
    Fault("code off by one", Op.STORE, r"\(uint32_t\)bits\[", "1 ^ (uint32_t)bits["),
    Fault("block out of range", Op.LOAD, r"\(block < blocks\)", "true"),
    Fault("row behind the output", Op.LOAD, r"\(row < \(\(int64_t\)rows\)\)", "true"),
    Fault("row before the output", Op.LOAD, r"\(\(int64_t\)0 <= row\)", "true"),
    Fault("token behind the block", Op.LOAD, r"\(token < \(\(int64_t\)tokens\)\)", "true"),
    Fault("slot out of range", Op.LOAD_SLOTS, CAPACITY, "true"),
    Fault("entry behind the context", Op.CONVERT_INDEX, r"\(entry < ", "(entry <= "),
    Fault("column behind the table", Op.CONVERT_INDEX, r"column < \(\(int64_t\)width\)", "true"),
    Fault("segment behind the plan", Op.EXPAND_LOAD_PLAN, r"segment < \(\(int64_t\)count\)", "true"),
    Fault("column behind the table of a plan", Op.EXPAND_LOAD_PLAN, r"column < \(\(int64_t\)width\)", "true"),
    Fault("column off by one", Op.EXPAND_SWA_INDEX, r"(int64_t behind = \w+)", r"\1 + 1"),
]


@pytest.fixture
def plant(monkeypatch):
    """Makes every kernel that is built from now on pass through a function of its source."""

    def start(change):
        def build(prim_func):
            return simulator.build(prim_func, pass_configs=compiling.PASS_CONFIGS, mutate=change)

        monkeypatch.setattr(compiling, "_simulated", build)
        config.forget()  # launchers that are bound already keep their kernels

    yield start
    config.forget()


def complaint(case) -> str | None:
    """What the suite says to a case, None when it is content."""
    try:
        return "; ".join(str(p) for p in run_case("ascend_tilelang", case, simulate=True).problems) or None
    except simulator.SimulatorFault as fault:
        return str(fault)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.op}: {fault.name}")
def test_suite_finds(fault, plant):
    plant(fault.plant)
    tried = [case for case in cases(fault.op) if case.layout in (None, V41_FORMAT)]
    assert tried
    assert any(complaint(case) for case in tried)


def fused_call() -> torch.Tensor:
    """Every stage on enough rows for each core to go round twice; the rows as they are read back."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn((60, V41_FORMAT.elements), generator=generator).to(torch.bfloat16)
    cache = kvhal.alloc_kv_cache(2, 64, V41_FORMAT, "cpu").zero_()
    rope = RopeArgs(torch.arange(60), torch.randn((60, 64), generator=generator), 64, is_neox_style=True)
    back = kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
        rows,
        norm_args=NormArgs(torch.ones(V41_FORMAT.elements)),
        rope_args=rope,
        hadamard_args=HadamardArgs(),
        cast_args=CastArgs.for_layout(V41_FORMAT, cast_back=True),
        out_args=KVCacheOutArgs(cache, torch.arange(60), V41_FORMAT),
    )
    assert back is not None
    return back


BARRIERS = 7


def without_barrier(number: int):
    """Removes one barrier of a source that has BARRIERS of them."""

    def change(source: str) -> str:
        parts = source.split("asc_syncthreads();")
        assert len(parts) == BARRIERS + 1
        return "asc_syncthreads();".join(parts[: number + 1]) + "asc_syncthreads();".join(parts[number + 1 :])

    return change


@pytest.mark.parametrize("number", range(BARRIERS))
def test_every_barrier_is_needed(number, plant):
    with kvhal.use_backend("reference_torch"):
        expected = fused_call()
    plant(without_barrier(number))
    found = 0
    for order in ("forward", "reverse", "shuffle"):
        with kvhal.use_backend("ascend_tilelang", simulate=True), simulator.schedule(order):
            found += not torch.equal(fused_call().view(torch.int16), expected.view(torch.int16))
    assert found
