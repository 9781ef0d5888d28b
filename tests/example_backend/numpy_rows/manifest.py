"""Who this backend is and what it refuses; read on every machine."""

from kvhal.interface import Backend, Op, Reason, Request


def check(request: Request) -> tuple[Reason, ...]:
    """All reasons against a request."""
    reasons = []
    if request.platform.kind != "cpu":
        reasons.append(Reason("device", request.platform.kind, "cpu"))
    if request.layout is not None and request.layout.quantized_dtype is not None:
        reasons.append(Reason("record", request.layout.describe(), "bf16 records: nothing is quantised here"))
    return tuple(reasons)


BACKEND = Backend(
    name="numpy_rows",
    runs_on="CPUs, as an example",
    check=check,
    binders={
        Op.STORE: "numpy_rows.operations:bind_store",
        Op.LOAD: "numpy_rows.operations:bind_load",
        Op.LOAD_SLOTS: "numpy_rows.operations:bind_load_slots",
        Op.INDEX_CAT: "numpy_rows.operations:bind_index_cat",
    },
)
