"""Building: what is refused, what is cached, and that TileLang is left as it was."""

import concurrent.futures
import subprocess
import sys

import pytest
import torch

tilelang = pytest.importorskip("tilelang")
import tvm_ffi  # noqa: E402

from kvhal.backends.ascend_tilelang import simulator  # noqa: E402
from kvhal.backends.ascend_tilelang.simulator import source, toolchain  # noqa: E402
from kvhal.backends.ascend_tilelang.simulator.arguments import legal_bytes  # noqa: E402
from tests.ascend import simulator_kernels as kernels  # noqa: E402

if (reason := simulator.why_unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvhal" / "ascend-sim"


def test_unsupported_intrinsic_is_named():
    with pytest.raises(simulator.UnsupportedSource, match="debug_print_var"):
        simulator.build(kernels.printing())


def test_unsupported_header_and_core_are_named():
    with pytest.raises(simulator.UnsupportedSource, match=r"gemm\.h"):
        source.translate("#include <tl_templates/ascend/gemm.h>\n", ())
    with pytest.raises(simulator.UnsupportedSource, match="cube"):
        source.translate('extern "C" __global__ __cube__ void k() {}', ())


def test_mutation_that_changes_nothing_is_refused():
    with pytest.raises(ValueError, match="mutate"):
        simulator.build(kernels.quotient(), mutate=lambda text: text)


def test_tilelang_is_left_as_it_was(empty_cache):
    caching = tilelang.env.is_cache_enabled()
    simulator.build(kernels.quotient())
    assert tilelang.env.is_cache_enabled() == caching
    callback = tvm_ffi.get_global_func("tilelang_callback_ascend_compile")
    # The genuine callback looks for the device compiler, which no machine of this test has.
    with pytest.raises(RuntimeError, match="bisheng"):
        callback("", tilelang.tvm.target.Target({"kind": "ascend"}), {})


def test_second_build_comes_from_the_cache(empty_cache, monkeypatch):
    simulator.build(kernels.quotient())
    entries = sorted(p.name for p in empty_cache.iterdir())

    def refuse(*_):
        pytest.fail("compiled again")

    monkeypatch.setattr(toolchain, "Compilation", refuse)
    simulator.build(kernels.quotient())
    assert sorted(p.name for p in empty_cache.iterdir()) == entries


def test_failed_build_leaves_nothing(empty_cache):
    with pytest.raises(simulator.UnsupportedSource):
        simulator.build(kernels.printing())
    assert list(empty_cache.iterdir()) == []


def test_concurrent_builds_of_one_kernel(empty_cache):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda _: simulator.build(kernels.scale_rows()), range(2)))
    for kernel in built:
        y = torch.zeros(2, kernels.WIDTH)
        kernel(torch.ones(1, kernels.WIDTH), torch.tensor([1], dtype=torch.int32), y)
        assert y[1].eq(2).all() and y[0].eq(0).all()


def test_arguments_are_checked_by_tilelang_and_by_device():
    kernel = simulator.build(kernels.quotient())
    good = torch.ones(kernels.WIDTH, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        kernel(good.float(), good, good)
    with pytest.raises(RuntimeError, match="shape"):
        kernel(good[:5], good, good)
    with pytest.raises(ValueError, match="argument y is on meta"):
        kernel(good, good.to("meta"), good)
    with pytest.raises(ValueError, match="takes 3 tensors"):
        kernel(good, good)


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((4, 8), (8, 1), (64, [])),
        ((3, 4, 8), (64, 16, 1), (16, [(3, 128), (4, 32)])),
        ((3, 1, 8), (64, 999, 1), (16, [(3, 128)])),
        ((5,), (3,), (2, [(5, 6)])),
        ((2, 0), (4, 1), (0, [])),
        ((4, 8), (0, 1), (16, [])),
        ((4, 8), (4, 1), (40, [])),
    ],
)
def test_legal_bytes(shape, stride, expected):
    assert legal_bytes(shape, stride, 2) == expected


def test_import_of_the_package_loads_no_kernel_language():
    code = "import sys, kvhal.backends.ascend_tilelang.simulator; print('tilelang' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
