"""The fused store's reciprocal root against the two correctly rounded operations, for every fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
THREADS, EACH = 256, 1 << 12

COUNT = """
__device__ __forceinline__ void count(int* wrong, int block) {
  for (unsigned i = 0; i < EACH; ++i) {
    const float x = __uint_as_float((block * THREADS + threadIdx.x) * EACH + i);
    if (__float_as_uint(inverse_root(x)) != __float_as_uint(__frcp_rn(__fsqrt_rn(x)))) atomicAdd(wrong, 1);
  }
}
"""


def root_kernel() -> Any:
    """Counts the inputs whose results differ."""
    import tilelang.language as T

    from kvhal.backends.cuda_tilelang.build import call
    from kvhal.backends.cuda_tilelang.codec_cuda import FLOATS
    from kvhal.backends.cuda_tilelang.fused_cuda import ROOT

    names = f"typedef unsigned int u32; typedef unsigned short u16; constexpr unsigned THREADS = {THREADS}, EACH = {EACH};"
    prelude = f"namespace kv {{ {names} {FLOATS} {ROOT} {COUNT} }}\n"

    @T.prim_func
    def compare(wrong: T.Tensor((1,), "int32")):
        with T.Kernel(2**32 // THREADS // EACH, threads=THREADS, prelude=prelude) as block:
            call("kv::count", T.address_of(wrong[0]), block)

    return compare


def test_every_fp32() -> None:
    pytest.importorskip("tilelang")
    from kvhal.backends.cuda_tilelang.build import PASS_CONFIGS, target, tilelang

    run = tilelang.compile(root_kernel(), target=target("sm_90"), pass_configs=PASS_CONFIGS)
    wrong = torch.zeros(1, dtype=torch.int32, device="cuda")
    run(wrong)
    assert int(wrong) == 0
