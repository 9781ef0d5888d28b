"""Arguments that nearly fit: numbers of other types, devices that are not there, threads in an interpreter, gradients."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import kvhal
from kvhal import plan
from kvhal.interface import Op
from kvhal.platform import detect
from kvhal.testing.case import PUBLIC
from tests.faults.calls import good

LAYOUT = kvhal.V41_FORMAT
TABLE = torch.zeros((1, 1), dtype=torch.int32)
interpreted = pytest.mark.skipif(not detect("cpu").interpreted, reason="Triton's interpreter is off")


def stored(eps: Any = 1e-6, rope_dim: Any = 64, offset: Any = None, backend: str = "reference_torch", **grad: bool) -> bytes:
    """The cache after a fused store of three rows."""
    random = torch.Generator().manual_seed(1)
    rows, table = torch.randn((3, 512), generator=random).bfloat16(), torch.randn((4, 64), generator=random)
    cache, slots = kvhal.alloc_kv_cache(1, 4, LAYOUT, "cpu").zero_(), torch.arange(3)
    with kvhal.use_backend(backend):
        kvhal.fused_norm_rope_hadamard_cast_store_kvcache(
            rows.requires_grad_(grad.get("rows", False)),
            norm_args=kvhal.NormArgs(torch.ones(512, requires_grad=grad.get("weight", False)), eps),
            rope_args=kvhal.RopeArgs(slots, table.requires_grad_(grad.get("table", False)), rope_dim, offset=offset),
            cast_args=kvhal.CastArgs.for_layout(LAYOUT),
            out_args=kvhal.KVCacheOutArgs(cache, slots, LAYOUT),
        )
    return cache.numpy().tobytes()


@pytest.mark.parametrize("eps", [1e39, 10**400, float("nan"), float("inf"), -1, True, "x", torch.tensor(1e-6), None])
def test_an_eps_that_is_no_fp32_is_refused(eps: Any) -> None:
    with pytest.raises(ValueError, match=r"norm_args\.eps"):
        stored(eps)


@pytest.mark.parametrize("backend", ["reference_torch", pytest.param("portable_triton", marks=interpreted)])
def test_numbers_of_numpy_are_numbers(backend: str) -> None:
    assert stored(np.float32(0.25), backend=backend) == stored(0.25)
    assert stored(1, backend=backend) == stored(1.0)
    assert stored(rope_dim=np.int64(64), offset=np.int32(0), backend=backend) == stored(offset=0)


@pytest.mark.parametrize("what", ["rows", "weight", "table"])
def test_gradients_change_nothing(what: str) -> None:
    assert stored(**{what: True}) == stored()


def test_an_output_with_a_gradient_is_written() -> None:
    cache = kvhal.alloc_kv_cache(1, 4, LAYOUT, "cpu").zero_()
    out = torch.ones((2, 512), dtype=torch.bfloat16, requires_grad=True)
    kvhal.load_kv_slots(cache, torch.arange(2), out)
    assert not out.any()


@pytest.mark.parametrize("op", Op)
def test_inference_tensors_are_written_in_any_mode(op: Op) -> None:
    """And what is made is no inference tensor where it is asked for outside that mode."""
    with torch.inference_mode():
        inside = good(op)
    call = good(op)
    with kvhal.use_backend("reference_torch"):
        inside()
        call()
        for name, buffer in call.buffers.items():
            assert np.array_equal(inside.buffers[name].bytes(), buffer.bytes()), name
        made = PUBLIC[op](**{name: value for name, value in call.arguments.items() if name != "out"})
    assert made is None or not (made.kv if op == Op.LOAD else made).is_inference()


@interpreted
def test_threads_share_tritons_interpreter() -> None:
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: stored(backend="portable_triton"), range(8))) == {stored()}


@interpreted
def test_warmup_in_tritons_interpreter() -> None:
    with kvhal.use_backend("portable_triton"):
        kvhal.warmup([Op.STORE, Op.INDEX_CAT], layouts=[LAYOUT])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: kvhal.warmup(fused=[None]), TypeError, "fused: has a NoneType, needs a FusedStages"),
        (lambda: kvhal.warmup(layouts=["V41_FORMAT"]), TypeError, "layouts: has a str"),
        (lambda: kvhal.warmup(block_size=True), TypeError, "block_size"),
        (lambda: kvhal.warmup("nothing"), ValueError, "op: has 'nothing'"),
        (lambda: kvhal.warmup(device="mps:7"), ValueError, "device: has 'mps:7'"),
        (lambda: kvhal.FusedStages(rope_dim=-2), ValueError, "rope_dim: has -2"),
        (lambda: kvhal.FusedStages(norm=torch.float16), ValueError, "norm: has torch.float16"),
        (lambda: kvhal.FusedStages(positions=torch.int8), ValueError, "positions: has torch.int8"),
    ],
)
def test_warmup_names_what_does_not_fit(call: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def compressed(table: Any = TABLE, block_size: Any = 64, device: Any = None) -> plan.CompressedLoadPlan:
    return plan.build_compressed_load_plan([3], table, block_size=block_size, ratio=1, device=device)


@pytest.mark.parametrize("device", ["nope", "", "mps:7", 1.5])
def test_plans_are_made_on_devices_that_are_there(device: Any) -> None:
    with pytest.raises(ValueError, match="device: has"):
        compressed(device=device)
    with pytest.raises(ValueError, match="device: has"):
        plan.build_swa_load_plan([3], [1], [0], window_size=2, swa_block_size=2, device=device)


def test_a_plan_on_the_only_cpu() -> None:
    assert torch.equal(compressed(device="cpu:0").segments, compressed().segments)


@pytest.mark.parametrize(("change", "words"), [({"block_size": True}, "block_size"), ({"table": TABLE.to_sparse()}, "layout")])
def test_plans_take_dense_integers(change: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        compressed(**change)
