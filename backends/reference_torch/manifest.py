"""The reference_torch backend's manifest: plain torch on any device, for every record the specification defines."""

from kvhal.formats import SPECIFIED_CODECS, KVCacheFormat
from kvhal.interface import Backend, Op, Reason, Request

_PACKAGE = "kvhal.backends.reference_torch"


def check(request: Request) -> tuple[Reason, ...]:
    """Refuses codecs that docs/numerics.md does not define; no device, as torch runs on all of them."""
    return _codec_reasons(request.layout) + _stage_reasons(request)


def _codec_reasons(layout: KVCacheFormat | None) -> tuple[Reason, ...]:
    if layout is None or layout.quantized_dtype is None:
        return ()
    if (layout.quantized_dtype, layout.sf_format) in SPECIFIED_CODECS:
        return ()
    known = ", ".join(sorted(f"{data} with {scale}" for data, scale in SPECIFIED_CODECS))
    hint = "docs/numerics.md defines no other pair"
    return (Reason("codec", f"{layout.quantized_dtype} data with {layout.sf_format} scales", known, hint),)


def _stage_reasons(request: Request) -> tuple[Reason, ...]:
    elements = request.layout.elements if request.layout else 0
    if "hadamard" not in request.stages or elements & (elements - 1) == 0:
        return ()
    return (Reason("hadamard", f"{elements} elements", "a power of two"),)


BACKEND = Backend(
    name="reference_torch",
    runs_on="every torch device",
    language=("torch",),
    platforms=("cpu", "cuda", "rocm", "npu", "xpu", "mps"),
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
