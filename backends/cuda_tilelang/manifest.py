"""The cuda_tilelang backend's manifest; its operations are not built yet, so every request is refused."""

from kvhal.interface import Backend, Reason, Request


def check(request: Request) -> tuple[Reason, ...]:
    return ()


BACKEND = Backend("cuda_tilelang", "not built yet", (), (), check)
