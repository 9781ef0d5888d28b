"""Small kernels that exercise one feature of the simulator each."""

from typing import Any

from tilelang.ascend import language as T

ROWS, WIDTH = 8, 64


def scale_rows() -> Any:
    """y[slot[i], :] = 2 * x[i, :] for valid slots; y is [rows, WIDTH] inside wider records."""
    n, rows, step = T.dynamic("n"), T.dynamic("rows"), T.dynamic("step")

    @T.prim_func
    def main(
        x: T.Tensor((n, WIDTH), "float32"),
        slot: T.Tensor((n,), "int32"),
        y: T.StridedTensor((rows, WIDTH), (step, 1), "float32"),
    ):
        with T.Kernel(n) as block, T.SimtVF(threads=WIDTH):
            thread = T.get_thread_binding()
            row = slot[block]
            if row >= 0 and row < rows:
                y[row, thread] = x[block, thread] * 2.0

    return main


def reverse_row() -> Any:
    """y[i, :] = x[i, ::-1] through the unified buffer, with a barrier in between."""

    @T.prim_func
    def main(x: T.Tensor((ROWS, WIDTH), "float32"), y: T.Tensor((ROWS, WIDTH), "float32")):
        with T.Kernel(ROWS) as block, T.SimtVF(threads=WIDTH):
            staged = T.alloc_shared((WIDTH,), "float32")
            for c in T.Parallel(WIDTH):
                staged[c] = x[block, c]
            for c in T.Parallel(WIDTH):
                y[block, c] = staged[WIDTH - 1 - c]

    return main


def row_maximum() -> Any:
    """y[i] = max |x[i, :]| by a reduction across threads."""

    @T.prim_func
    def main(x: T.Tensor((ROWS, WIDTH), "float32"), y: T.Tensor((ROWS,), "float32")):
        with T.Kernel(ROWS) as block, T.SimtVF(threads=WIDTH):
            values = T.alloc_fragment((1, WIDTH), "float32")
            largest = T.alloc_fragment((1,), "float32")
            for i, c in T.Parallel(1, WIDTH):
                values[i, c] = x[block, c]
            T.reduce_absmax(values, largest, dim=1)
            for i in T.Parallel(1):
                y[block] = largest[i]

    return main


def copy_rows() -> Any:
    """y[i, :] = 2 * x[index[i], :] through DMA into the unified buffer and back."""
    n = T.dynamic("n")

    @T.prim_func
    def main(x: T.Tensor((n, WIDTH), "float32"), index: T.Tensor((n,), "int32"), y: T.Tensor((n, WIDTH), "float32")):
        with T.Kernel(n) as block:
            staged = T.alloc_shared((WIDTH,), "float32")
            row = index[block]
            T.copy(x[row, :], staged)
            with T.SimtVF(threads=WIDTH):
                for c in T.Parallel(WIDTH):
                    staged[c] = staged[c] * 2.0
            T.copy(staged, y[block, :])

    return main


def printing() -> Any:
    """Uses T.print, which the simulator does not model."""

    @T.prim_func
    def main(x: T.Tensor((WIDTH,), "int32"), y: T.Tensor((WIDTH,), "int32")):
        with T.Kernel(1) as block, T.SimtVF(threads=WIDTH):
            for i in T.Parallel(WIDTH):
                T.print(x[i])
                y[i + block] = x[i]

    return main


def quotient() -> Any:
    """z[i] = x[i] // y[i], rounding down."""

    @T.prim_func
    def main(x: T.Tensor((WIDTH,), "int32"), y: T.Tensor((WIDTH,), "int32"), z: T.Tensor((WIDTH,), "int32")):
        with T.Kernel(1) as block, T.SimtVF(threads=WIDTH):
            thread = T.get_thread_binding()
            z[thread + block] = T.truncdiv(x[thread], y[thread])

    return main


def wide_copy() -> Any:
    """y = x, two elements at a time."""

    @T.prim_func
    def main(x: T.Tensor((ROWS, 2 * WIDTH), "float32"), y: T.Tensor((ROWS, 2 * WIDTH), "float32")):
        with T.Kernel(ROWS) as block, T.SimtVF(threads=WIDTH):
            for c in T.Parallel(2 * WIDTH):
                y[block, c] = x[block, c]

    return main
