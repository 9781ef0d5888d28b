"""Division and square root are correctly rounded whatever the device's own operations give."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tilelang")

from tilelang.ascend import language as T

from kvhal.backends.ascend_tilelang import simulator
from kvhal.backends.ascend_tilelang.codec import bits_of_fp32, fp32_of_bits, pinned, reciprocal_of_e4m3
from kvhal.backends.ascend_tilelang.compiling import PASS_CONFIGS
from kvhal.backends.ascend_tilelang.exact import divided_by, fp32_of_amax, reciprocal, square_root
from kvhal.numerics import decode_e4m3

if (reason := simulator.why_unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

THREADS = 256


def elementwise(function: Any) -> Any:
    """y[i] = function(x[i]) on fp32 bits."""
    n = T.dynamic("n")

    @T.prim_func
    def main(x: T.Tensor((n,), "int32"), y: T.Tensor((n,), "int32")):
        with T.Kernel(T.ceildiv(n, THREADS)) as block, T.SimtVF(threads=THREADS):
            i = block * THREADS + T.get_thread_binding()
            if i < n:
                y[i] = bits_of_fp32(function(pinned(fp32_of_bits(x[i]), "float32")))

    return main


def run(function: Any, values: np.ndarray, mutate: Any = None) -> np.ndarray:
    kernel = simulator.build(elementwise(function), pass_configs=PASS_CONFIGS, mutate=mutate)
    result = np.zeros_like(values)
    kernel(torch.from_numpy(values.view(np.int32)), torch.from_numpy(result.view(np.int32)))
    return result


def positive(lowest: int, highest: int) -> np.ndarray:
    """fp32 values between two exponent fields: random, powers of two and their neighbours."""
    random = np.random.default_rng(1).integers(lowest << 23, highest << 23, 100_000, dtype=np.int64)
    edges = (np.arange(lowest + 1, highest)[:, None] << 23) + np.arange(-2, 3)
    return np.concatenate([random, edges.ravel()]).astype(np.int32).view(np.float32)


def test_square_root():
    values = positive(1, 255)
    np.testing.assert_array_equal(run(square_root, values), np.sqrt(values))


def test_square_root_on_a_device_with_a_poor_one():
    def poor(source: str) -> str:
        last = "#include <tl_templates/ascend/debug.h>\n"
        return source.replace(last, last + "#define sqrtf(x) (1.00001f * (sqrtf)(x))\n")

    values = positive(1, 255)
    np.testing.assert_array_equal(run(square_root, values, poor), np.sqrt(values))


def test_reciprocal():
    values = positive(1, 252)
    np.testing.assert_array_equal(run(reciprocal, values), np.float32(1) / values)


@pytest.mark.parametrize("divisor", [3, 48, 100, 384, 512, 32767])
def test_division_by_an_integer(divisor):
    values = positive(20, 255)
    quotient = run(lambda value: divided_by(value, divisor), values)
    np.testing.assert_array_equal(quotient, values / np.float32(divisor))


def test_special_values():
    special = np.array([0, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(run(square_root, special), np.sqrt(special))
    np.testing.assert_array_equal(run(reciprocal, special), [np.inf, 0, np.nan])
    np.testing.assert_array_equal(run(lambda value: divided_by(value, 48), special), special)


def test_fp32_scale_of_every_amax():
    amax = np.arange(0x7F80, dtype=np.int32)
    scales = run(lambda value: fp32_of_bits(fp32_of_amax(bits_of_fp32(value))), amax.view(np.float32))
    widened = (amax << 16).view(np.float32)
    np.testing.assert_array_equal(scales, np.maximum(widened, np.float32(1e-4)) / np.float32(448))


def test_reciprocal_of_every_e4m3_scale():
    codes = np.arange(1, 0x7F, dtype=np.int32)
    values = decode_e4m3(torch.from_numpy(codes).to(torch.uint8)).numpy()
    reciprocals = run(lambda value: reciprocal_of_e4m3(bits_of_fp32(value)), codes.view(np.float32))
    np.testing.assert_array_equal(reciprocals, np.float32(1) / values)
