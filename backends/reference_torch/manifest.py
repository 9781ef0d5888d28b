"""The reference_torch backend's manifest: plain torch on any device, for every record the specification defines."""

from kvhal.interface import Backend, Op, Reason, Request
from kvhal.refusals import codec_reasons, hadamard_reasons

_PACKAGE = "kvhal.backends.reference_torch"


def check(request: Request) -> tuple[Reason, ...]:
    """Refuses codecs that docs/numerics.md does not define; no device, as torch runs on all of them."""
    return codec_reasons(request.layout) + hadamard_reasons(request)


BACKEND = Backend(
    name="reference_torch",
    runs_on="every torch device",
    check=check,
    binders={
        Op.STORE: f"{_PACKAGE}.store:bind_store",
        Op.LOAD: f"{_PACKAGE}.load:bind_load",
        Op.LOAD_SLOTS: f"{_PACKAGE}.load:bind_load_slots",
        Op.CONVERT_INDEX: f"{_PACKAGE}.index:bind_convert_index",
        Op.INDEX_CAT: f"{_PACKAGE}.index:bind_index_cat",
        Op.EXPAND_SWA_INDEX: f"{_PACKAGE}.index:bind_expand_swa_index",
        Op.DECODE_SWA_INDEX: f"{_PACKAGE}.index:bind_decode_swa_index",
        Op.EXPAND_LOAD_PLAN: f"{_PACKAGE}.plan:bind_expand_load_plan",
        Op.FUSED_STORE: f"{_PACKAGE}.fused:bind_fused_store",
    },
)
