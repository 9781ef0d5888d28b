"""The portable_triton backend's manifest: anything that runs Triton, and CPU tensors through Triton's interpreter."""

from __future__ import annotations

from kvhal.backends.portable_triton.record import E2M1_WORD, MAX_TILE_ELEMENTS, ragged, tile_elements
from kvhal.backends.portable_triton.tuned import TABLE
from kvhal.interface import Backend, Op, Reason, Request
from kvhal.platform import Platform
from kvhal.refusals import codec_reasons, hadamard_reasons

_PACKAGE = "kvhal.backends.portable_triton"
_KINDS = ("cuda", "rocm", "cpu")
_OLDEST_CUDA = 80  #: bf16 arithmetic


def check(request: Request) -> tuple[Reason, ...]:
    """Refuses a machine without a working Triton, and the few records whose groups do not fit a kernel's tile."""
    shared = codec_reasons(request.layout) + hadamard_reasons(request)
    return _platform_reasons(request.platform) + shared + _shape_reasons(request)


def _platform_reasons(platform: Platform) -> tuple[Reason, ...]:
    reasons = []
    triton = platform.module("triton")
    if triton.version is None:
        reasons.append(Reason("triton", triton.error or "not installed", "an importable triton", "pip install triton"))
    if platform.kind not in _KINDS:
        reasons.append(Reason("device", platform.kind, "a CUDA or ROCm device, or the CPU with Triton's interpreter"))
    sm = platform.sm()
    if platform.kind == "cuda" and (sm is None or sm < _OLDEST_CUDA):
        reasons.append(Reason("architecture", platform.arch, f"sm_{_OLDEST_CUDA} or newer"))
    if platform.kind == "cpu" and not platform.interpreted:
        hint = "set it before Python starts; the interpreter is exact but slow"
        reasons.append(Reason("device", "cpu, where Triton does not compile", "TRITON_INTERPRET=1", hint))
    return tuple(reasons)


def _shape_reasons(request: Request) -> tuple[Reason, ...]:
    layout = request.layout
    if layout is None:
        return ()
    reasons = []
    tile = tile_elements(layout)
    if tile > MAX_TILE_ELEMENTS:
        have = f"{layout.elements} elements, {tile} with groups padded to powers of two"
        reasons.append(Reason("record size", have, f"at most {MAX_TILE_ELEMENTS}"))
    if layout.quantized_dtype == "e2m1" and layout.elements_per_sf % 2 and layout.num_scales > 1:
        have = f"{layout.elements_per_sf} e2m1 elements a scale"
        reasons.append(Reason("scale group", have, "an even count", "two elements of one byte would have two scales"))
    if request.op == Op.FUSED_STORE and ragged(layout):
        have = f"{layout.elements_per_sf} elements a scale"
        need = "a power of two (at least 8 for e2m1), or one scale for the whole record"
        reasons.append(Reason("scale group of a fused store", have, need, "reference_torch serves any group"))
    if "hadamard" in request.stages and layout.quantized_dtype == "e2m1" and layout.elements < E2M1_WORD:
        reasons.append(Reason("hadamard", f"{layout.elements} e2m1 elements", f"at least {E2M1_WORD}"))
    return tuple(reasons)


BACKEND = Backend(
    name="portable_triton",
    runs_on="NVIDIA sm_80+, AMD CDNA, and the CPU through Triton's interpreter",
    check=check,
    tuned=TABLE,
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
