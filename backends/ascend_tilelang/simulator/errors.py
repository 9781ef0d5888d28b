"""What can go wrong in the simulator, one type for each cause."""

from __future__ import annotations


class SimulatorError(RuntimeError):
    """Base of every error that the simulator itself raises."""


class SimulatorUnavailable(SimulatorError):
    """This machine or process cannot simulate; the text is the reason."""


class UnsupportedSource(SimulatorError):
    """The generated source uses something that the simulator does not model; the text names it."""


class SimulatorFault(SimulatorError):
    """A kernel did something that is an error on the device.

    Attributes:
        kernel: name of the kernel.
        block: index of the block that was running.
        thread: `(x, y, z)` index of the simulated thread.
        reason: what it did, without the location.
    """

    def __init__(self, kernel: str, block: int, thread: tuple[int, int, int], reason: str) -> None:
        at = str(thread[0]) if thread[1:] == (0, 0) else str(thread)
        super().__init__(f"{kernel}, block {block}, thread {at}: {reason}")
        self.kernel = kernel
        self.block = block
        self.thread = thread
        self.reason = reason
