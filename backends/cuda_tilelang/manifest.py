"""The cuda_tilelang backend's manifest: what it needs, and why it cannot serve. Imports no kernel language."""

from __future__ import annotations

from kvhal.backends.cuda_tilelang.tuned import TABLE
from kvhal.formats import KVCacheFormat
from kvhal.interface import FORMAT_OPS, Backend, Op, Reason, Request
from kvhal.platform import Platform
from kvhal.refusals import codec_reasons, hadamard_reasons

MIN_SM = 90
OCTET = 8  # elements a thread holds; codec.OCTET, which cannot be imported without tilelang
MAX_ELEMENTS = 2048  # a token's record lives in one warp's registers
MAX_SCALE_BYTES = 64  # a raw load copies a token's scales with one thread

_MODULE = "kvhal.backends.cuda_tilelang"


def check(request: Request) -> tuple[Reason, ...]:
    """Every reason against a request: the machine's, then the format's."""
    reasons = _check_platform(request.platform)
    if request.op in FORMAT_OPS and request.layout is not None:
        reasons += [*_check_format(request.layout), *hadamard_reasons(request)]
    return tuple(reasons)


def _check_platform(platform: Platform) -> list[Reason]:
    reasons = []
    if platform.kind != "cuda":
        reasons.append(Reason("device", platform.kind, "a CUDA device", "reference_torch runs on every torch device"))
    elif (platform.sm() or 0) < MIN_SM:
        reasons.append(Reason("architecture", platform.arch, f"sm_{MIN_SM} or newer", "portable_triton serves sm_80 and newer"))
    tilelang = platform.module("tilelang")
    if tilelang.version is None:
        reasons.append(
            Reason("tilelang", tilelang.error or "not installed", "an importable tilelang", "pip install kvhal[cuda]")
        )
    if platform.tool("nvcc") is None:
        reasons.append(Reason("nvcc", "not found", "the CUDA compiler on PATH or in CUDA_HOME/bin", "install the CUDA toolkit"))
    return reasons


def _check_format(layout: KVCacheFormat) -> list[Reason]:
    reasons = []
    if layout.elements % OCTET or layout.elements > MAX_ELEMENTS:
        need = f"a multiple of {OCTET}, at most {MAX_ELEMENTS}"
        reasons.append(Reason("elements", str(layout.elements), need, "reference_torch serves any count, portable_triton most"))
    if layout.quantized_dtype is None:
        return reasons
    reasons += codec_reasons(layout)
    octets, rest = divmod(layout.elements_per_sf, OCTET)
    if rest or octets & (octets - 1):
        need = f"{OCTET} times a power of two"
        hint = "reference_torch serves any group, portable_triton most"
        reasons.append(Reason("elements_per_sf", str(layout.elements_per_sf), need, hint))
    if layout.is_index and layout.sf_bytes > MAX_SCALE_BYTES:
        reasons.append(Reason("scale bytes of an index record", str(layout.sf_bytes), f"at most {MAX_SCALE_BYTES}"))
    return reasons


BACKEND = Backend(
    name="cuda_tilelang",
    runs_on="NVIDIA Hopper and newer (sm_90+)",
    check=check,
    tuned=TABLE,
    binders={
        Op.STORE: f"{_MODULE}.store:bind_store",
        Op.LOAD: f"{_MODULE}.load:bind_load",
        Op.LOAD_SLOTS: f"{_MODULE}.load:bind_load_slots",
        Op.CONVERT_INDEX: f"{_MODULE}.index:bind_convert_index",
        Op.INDEX_CAT: f"{_MODULE}.index:bind_index_cat",
        Op.EXPAND_SWA_INDEX: f"{_MODULE}.index:bind_expand_swa_index",
        Op.DECODE_SWA_INDEX: f"{_MODULE}.index:bind_decode_swa_index",
        Op.EXPAND_LOAD_PLAN: f"{_MODULE}.plan:bind_expand_load_plan",
        Op.FUSED_STORE: f"{_MODULE}.fused:bind_fused_store",
    },
)
