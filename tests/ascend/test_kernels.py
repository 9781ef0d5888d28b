"""The Ascend kernels against the golden tables, in caches beyond 4 GiB, and what the manifest refuses."""

import pathlib

import numpy as np
import pytest
import torch

import kvhal
from kvhal.formats import (
    FP4_INDEX_KV_FORMAT,
    SUPPORTED_KV_CACHE_FORMATS,
    V41_FORMAT,
    KVCacheFormat,
)
from kvhal.interface import Op, Request
from kvhal.layout import min_block_stride, split_kv_cache
from kvhal.platform import Module, Platform, detect
from kvhal.registry import backends

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"


@pytest.fixture
def simulated():
    pytest.importorskip("tilelang")
    from kvhal.backends.ascend_tilelang import simulator

    if (reason := simulator.why_unavailable()) is not None:
        pytest.skip(reason)
    with kvhal.use_backend("ascend_tilelang", simulate=True):
        yield


def table(layout: KVCacheFormat) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{layout}.npz") as arrays:
        return {key: arrays[key] for key in arrays}


def rows_of(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("layout", SUPPORTED_KV_CACHE_FORMATS, ids=str)
def test_store_writes_and_load_reads_the_golden_bytes(layout, simulated):
    golden = table(layout)
    n, block_size = golden["x"].shape[0], 16
    cache = kvhal.alloc_kv_cache(-(-n // block_size), block_size, layout, "cpu")
    kvhal.store_kv_cache(rows_of(golden["x"]), cache, torch.arange(n), layout=layout)
    data, sf = split_kv_cache(cache, layout)
    np.testing.assert_array_equal(data.contiguous().view(torch.uint8).flatten(0, 1)[:n].numpy(), golden["data"])
    np.testing.assert_array_equal(sf.contiguous().view(torch.uint8).flatten(0, 1)[:n].numpy(), golden["sf"])
    back = kvhal.load_kv_slots(cache, torch.arange(n), layout=layout).view(torch.int16).numpy().view(np.uint16)
    nan = (golden["back"] & 0x7FFF) > 0x7F80
    np.testing.assert_array_equal(back, np.where(nan, 0x7FFF, golden["back"]))


@pytest.mark.parametrize("layout", [V41_FORMAT, FP4_INDEX_KV_FORMAT], ids=str)
def test_blocks_beyond_4_gib_are_addressed(layout, simulated):
    block_size = 64
    blocks = (1 << 32) // min_block_stride(layout, block_size) + 2
    cache = kvhal.alloc_kv_cache(blocks, block_size, layout, "cpu")  # only the pages that are touched become real
    rows = torch.randn((3, layout.elements)).to(torch.bfloat16)
    slots = torch.tensor([5, blocks // 2 * block_size + 7, blocks * block_size - 1])
    kvhal.store_kv_cache(rows, cache, slots, layout=layout)
    with kvhal.use_backend("reference_torch"):
        small = kvhal.alloc_kv_cache(1, block_size, layout, "cpu")
        kvhal.store_kv_cache(rows, small, torch.arange(3), layout=layout)
        expected = kvhal.load_kv_slots(small, torch.arange(3), layout=layout)
    assert torch.equal(kvhal.load_kv_slots(cache, slots, layout=layout), expected)
    for slot, row in zip(slots.tolist(), range(3), strict=True):
        data, sf = split_kv_cache(cache, layout)
        block, token = divmod(slot, block_size)
        small_data, small_sf = split_kv_cache(small, layout)
        assert torch.equal(data[block, token].view(torch.uint8), small_data[0, row].view(torch.uint8))
        assert torch.equal(sf[block, token], small_sf[0, row])


def reasons(platform: Platform, layout: KVCacheFormat | None = V41_FORMAT, op: Op = Op.STORE) -> dict[str, str]:
    found = backends()["ascend_tilelang"].why_not(Request(op, layout, platform, 64))
    return {reason.what: reason.have for reason in found}


MODULES = (Module("tilelang", "0.1.15"), Module("torch_npu", "2.11"))


def test_npu_needs_the_right_chip_and_its_toolchain():
    good = Platform("npu", "ascend950pr", modules=MODULES, tools=(("bisheng", "/opt/bisheng"),))
    assert reasons(good) == {}
    bare = Platform("npu", "ascend910b", "Ascend910B3", (MODULES[0], Module("torch_npu", None, "ImportError: libhccl.so")))
    assert set(reasons(bare)) == {"SoC", "torch_npu", "bisheng"}
    assert reasons(bare)["SoC"] == "Ascend910B3"


def test_cpu_needs_the_simulator():
    cpu = Platform("cpu", "x86_64", modules=MODULES)
    assert set(reasons(cpu)) == {"device"}
    assert set(reasons(cpu.with_simulation(True))) == {"g++"}
    assert set(reasons(Platform("cpu", "x86_64", tools=(("g++", "/usr/bin/g++"),), simulate=True))) == {"tilelang"}
    assert set(reasons(Platform("cuda", "sm_90", modules=MODULES))) == {"device"}


def test_records_that_threads_would_share_bytes_of_are_refused():
    odd = KVCacheFormat("e2m1", 66, 3, 0, False, "ue8m0", "")
    assert set(reasons(detect("cpu").with_simulation(True), odd)) == {"elements_per_sf"}
    huge = KVCacheFormat("e4m3", 1 << 16, 32, 0, False, "ue8m0", "")
    assert set(reasons(detect("cpu").with_simulation(True), huge, Op.FUSED_STORE)) == {"elements"}


def test_simulated_decisions_say_so(simulated):
    decision = kvhal.explain("store_kv_cache", layout=V41_FORMAT)
    assert decision.simulated and "simulated" in str(decision)


@pytest.mark.parametrize("skip", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("width", [512, 513, 514])
def test_one_row_of_any_alignment(skip, width, simulated):
    storage = torch.randn(2048).to(torch.bfloat16)
    row = storage.as_strided((1, 512), (width, 1), skip)
    cache = kvhal.alloc_kv_cache(1, 1, V41_FORMAT, "cpu")
    kvhal.store_kv_cache(row, cache, torch.zeros(1, dtype=torch.int32))
    out = torch.zeros(2048).to(torch.bfloat16).as_strided((1, 512), (width, 1), skip)
    kvhal.load_kv_slots(cache, torch.zeros(1, dtype=torch.int32), out)
    with kvhal.use_backend("reference_torch"):
        assert torch.equal(out, kvhal.load_kv_slots(cache, torch.zeros(1, dtype=torch.int32)))
