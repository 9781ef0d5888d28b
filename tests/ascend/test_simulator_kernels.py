"""Kernels run in the simulator give the right values in every order, and misbehaviour is reported where it happens."""

import pytest
import torch

tilelang = pytest.importorskip("tilelang")

from kvhal.backends.ascend_tilelang import simulator  # noqa: E402
from tests.ascend import simulator_kernels as kernels  # noqa: E402

if (reason := simulator.why_unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

ORDERS = ("forward", "reverse", "shuffle")
ROWS, WIDTH = kernels.ROWS, kernels.WIDTH


def records(rows: int, step: int = WIDTH + 16) -> torch.Tensor:
    """[rows, WIDTH] float32 inside records of `step` elements, all zero."""
    return torch.zeros(rows * step).as_strided((rows, WIDTH), (step, 1))


@pytest.mark.parametrize("order", ORDERS)
def test_strided_scatter(order):
    x, slot, y = torch.randn(5, WIDTH), torch.tensor([3, -1, 0, 99, 7], dtype=torch.int32), records(8)
    with simulator.schedule(order):
        simulator.build(kernels.scale_rows())(x, slot, y)
    expected = torch.zeros(8, WIDTH)
    expected[[3, 0, 7]] = 2 * x[[0, 2, 4]]
    assert torch.equal(y, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_barriers_and_reductions(order):
    x = torch.randn(ROWS, WIDTH)
    y, largest, doubled = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS), torch.zeros(ROWS, WIDTH)
    with simulator.schedule(order):
        simulator.build(kernels.reverse_row())(x, y)
        simulator.build(kernels.row_maximum())(x, largest)
        simulator.build(kernels.copy_rows())(x, torch.arange(ROWS, dtype=torch.int32).flip(0), doubled)
    assert torch.equal(y, x.flip(1))
    assert torch.equal(largest, x.abs().amax(1))
    assert torch.equal(doubled, 2 * x.flip(0))


def test_removed_barrier_changes_the_result_in_some_order():
    broken = simulator.build(kernels.reverse_row(), mutate=lambda source: source.replace("asc_syncthreads();", ""))
    x = torch.randn(ROWS, WIDTH)
    wrong = 0
    for order in ORDERS:
        y = torch.zeros(ROWS, WIDTH)
        with simulator.schedule(order):
            broken(x, y)
        wrong += not torch.equal(y, x.flip(1))
    assert wrong


def test_divergent_barrier_is_a_fault():
    broken = simulator.build(
        kernels.reverse_row(),
        mutate=lambda source: source.replace("asc_syncthreads();", "if (threadIdx.x != 5) asc_syncthreads();"),
    )
    with pytest.raises(simulator.SimulatorFault, match="divergent barrier"):
        broken(torch.randn(ROWS, WIDTH), torch.zeros(ROWS, WIDTH))
    # The abandoned fibres must not disturb the next launch.
    y = torch.zeros(ROWS, WIDTH)
    simulator.build(kernels.reverse_row())(x := torch.randn(ROWS, WIDTH), y)
    assert torch.equal(y, x.flip(1))


def test_access_outside_the_argument_names_place_and_argument():
    broken = simulator.build(kernels.scale_rows(), mutate=lambda source: source.replace("0 <= row", "true"))
    with pytest.raises(simulator.SimulatorFault) as caught:
        broken(torch.randn(3, WIDTH), torch.tensor([1, 2, -1], dtype=torch.int32), records(4))
    assert (caught.value.kernel, caught.value.block, caught.value.thread) == ("main_kernel", 2, (0, 0, 0))
    assert "'y'" in str(caught.value) and "block 2, thread 0" in str(caught.value)


def test_bytes_between_the_rows_of_a_view_are_not_the_arguments():
    broken = simulator.build(kernels.scale_rows(), mutate=lambda source: source.replace("y[", "y[1 + "))
    with pytest.raises(simulator.SimulatorFault, match=f"thread {WIDTH - 1}: access of 4 bytes .* outside argument 'y'"):
        broken(torch.randn(1, WIDTH), torch.tensor([0], dtype=torch.int32), records(2))


def test_dma_outside_the_argument_is_a_fault():
    kernel = simulator.build(kernels.copy_rows(), pass_configs={"tl.disable_safe_memory_legalize": True})
    with pytest.raises(simulator.SimulatorFault, match="outside argument 'x'"):
        kernel(torch.randn(2, WIDTH), torch.tensor([0, -1], dtype=torch.int32), torch.zeros(2, WIDTH))


def test_division_by_zero_is_a_fault_and_not_a_signal():
    x, y = torch.full((WIDTH,), 7, dtype=torch.int32), torch.full((WIDTH,), 2, dtype=torch.int32)
    kernel, z = simulator.build(kernels.quotient()), torch.zeros(WIDTH, dtype=torch.int32)
    kernel(x, y, z)
    assert z.eq(3).all()
    y[9] = 0
    with pytest.raises(simulator.SimulatorFault, match="thread 9: division by zero"):
        kernel(x, y, z)


def test_sanitised_build_reports_signed_overflow():
    kernel = simulator.build(
        kernels.quotient(), sanitize=True, mutate=lambda source: source.replace("x[", "2147483647 + x[", 1)
    )
    ones = torch.ones(WIDTH, dtype=torch.int32)
    with pytest.raises(simulator.SimulatorFault, match="signed addition overflows"):
        kernel(ones, ones, ones.clone())


def test_misaligned_wide_access_is_a_fault():
    kernel = simulator.build(kernels.wide_copy())
    storage, y = torch.randn(ROWS * 2 * WIDTH + 1), torch.zeros(ROWS, 2 * WIDTH)
    kernel(storage[:-1].view(ROWS, 2 * WIDTH), y)
    assert torch.equal(y.flatten(), storage[:-1])
    with pytest.raises(simulator.SimulatorFault, match="misaligned access of 8 bytes to argument 'x'"):
        kernel(storage[1:].view(ROWS, 2 * WIDTH), y)
