"""The ascend_tilelang backend's manifest: Ascend 950, and CPU tensors through the functional simulator."""

from kvhal.formats import KVCacheFormat
from kvhal.interface import Backend, Op, Reason, Request
from kvhal.refusals import codec_reasons, hadamard_reasons

_PACKAGE = "kvhal.backends.ascend_tilelang"
_TILELANG = "0.1.15"  # the release whose Ascend dialect and generated source this backend is written for

#: elements of a record that fit the unified buffer of a core as fp32, beside the rest of a fused store
MAX_FUSED_ELEMENTS = 32768


def check(request: Request) -> tuple[Reason, ...]:
    """Refuses other devices, missing tools, and the few records that the kernels cannot address."""
    return (*_platform_reasons(request), *_record_reasons(request.layout), *_fused_reasons(request))


def _platform_reasons(request: Request) -> list[Reason]:
    platform = request.platform
    reasons = []
    tilelang = platform.module("tilelang")
    if tilelang.error is not None:
        hint = "pip install 'kvhal[ascend]'"
        reasons.append(Reason("tilelang", tilelang.error, f"tilelang {_TILELANG}", hint))
    if platform.kind == "cpu":
        if not platform.simulate:
            hint = "use_backend('ascend_tilelang', simulate=True), or [ascend] simulate = true"
            reasons.append(Reason("device", "cpu", "an Ascend 950 (npu), or the simulator", hint))
        elif platform.tool("g++") is None:
            reasons.append(Reason("g++", "not on PATH", "g++, which compiles simulated kernels", "apt install g++"))
        return reasons
    if platform.kind != "npu":
        reasons.append(Reason("device", platform.kind, "an Ascend 950 (npu)"))
        return reasons
    if "950" not in platform.arch:
        reasons.append(Reason("SoC", platform.device_name or platform.arch, "Ascend 950 (dav-3510)"))
    torch_npu = platform.module("torch_npu")
    if torch_npu.error is not None:
        hint = "libhccl.so is CANN's: source its set_env.sh" if "libhccl" in torch_npu.error else "pip install torch_npu"
        reasons.append(Reason("torch_npu", torch_npu.error, "an importable torch_npu", hint))
    if platform.tool("bisheng") is None:
        hint = "source CANN's set_env.sh"
        reasons.append(Reason("bisheng", "not on PATH", "the device compiler of CANN", hint))
    return reasons


def _record_reasons(layout: KVCacheFormat | None) -> list[Reason]:
    reasons = [*codec_reasons(layout)]
    if layout is not None and layout.quantized_dtype == "e2m1" and layout.elements_per_sf % 2 and layout.num_scales > 1:
        have = f"{layout.elements_per_sf} e2m1 elements a scale"
        reasons.append(Reason("elements_per_sf", have, "an even count: two threads would share a byte"))
    return reasons


def _fused_reasons(request: Request) -> list[Reason]:
    reasons = [*hadamard_reasons(request)]
    if request.op == Op.FUSED_STORE and request.layout is not None and request.layout.elements > MAX_FUSED_ELEMENTS:
        need = f"at most {MAX_FUSED_ELEMENTS}: a row is kept on the core"
        reasons.append(Reason("elements", str(request.layout.elements), need))
    return reasons


BACKEND = Backend(
    name="ascend_tilelang",
    runs_on="Ascend 950 (dav-3510); CPU tensors through its functional simulator",
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
    simulator=True,
)
