"""Pure resolution: made-up machines and made-up backends, every reason, every kind of forcing."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from types import MappingProxyType

import pytest

from kvhal import BF16_FORMAT, V41_FORMAT, Op, Platform, Reason, Request
from kvhal.dispatcher import PREFERENCE, Policy, resolve
from kvhal.interface import Backend
from kvhal.platform import Module
from kvhal.testing.platforms import PLATFORMS, machine

ALL_OPS = dict.fromkeys(Op, "nowhere:nothing")


def backend(name: str, *platforms: str, simulator: bool = False, ops: dict[Op, str] | None = None) -> Backend:
    """A backend that serves the given platform kinds and no bf16 records, and says both when both are wrong."""

    def check(request: Request) -> tuple[Reason, ...]:
        kind = request.platform.kind
        reasons = []
        if kind not in platforms and not (simulator and kind == "cpu" and request.platform.simulate):
            reasons.append(Reason("device", kind, " or ".join(platforms)))
        if request.layout == BF16_FORMAT:
            reasons.append(Reason("format", str(request.layout), "a quantised one", "use another"))
        return tuple(reasons)

    return Backend(name, "a test", check, ALL_OPS if ops is None else ops, simulator)


BACKENDS = MappingProxyType(
    {
        "slow": backend("slow", "cpu", "cuda", "npu"),
        "cuda_tilelang": backend("cuda_tilelang", "cuda"),
        "ascend_tilelang": backend("ascend_tilelang", "npu", simulator=True),
        "stores_only": backend("stores_only", "cpu", ops={Op.STORE: "nowhere:nothing"}),
    }
)
CPU = machine("cpu", "x86_64")
CUDA = machine("cuda", "sm_90")


def request(platform: Platform = CPU, op: Op = Op.STORE, layout: object = V41_FORMAT) -> Request:
    return Request(op, layout, platform)  # type: ignore[arg-type]


def test_the_first_backend_of_the_platforms_order_wins() -> None:
    assert resolve(request(CUDA), Policy(), BACKENDS).chosen == "cuda_tilelang"
    assert resolve(request(CPU), Policy(), BACKENDS).chosen == "slow"
    assert resolve(request(machine("npu", "ascend950")), Policy(), BACKENDS).chosen == "ascend_tilelang"


def test_an_unknown_kind_of_device_is_a_question_like_any_other() -> None:
    decision = resolve(request(machine("xpu", "b580")), Policy(), BACKENDS)
    assert decision.chosen is None
    assert {verdict.backend for verdict in decision.trace} == set(BACKENDS)


def test_the_trace_has_every_backend_with_all_of_its_reasons() -> None:
    decision = resolve(request(CUDA, Op.LOAD, BF16_FORMAT), Policy(), BACKENDS)
    assert decision.chosen is None
    assert [verdict.backend for verdict in decision.trace] == ["cuda_tilelang", "slow", "ascend_tilelang", "stores_only"]
    verdicts = {verdict.backend: [reason.what for reason in verdict.reasons] for verdict in decision.trace}
    assert verdicts == {
        "cuda_tilelang": ["format"],
        "slow": ["format"],
        "ascend_tilelang": ["device", "format"],
        "stores_only": ["device", "format", "operation"],
    }


def test_a_forced_backend_is_the_only_candidate() -> None:
    policy = Policy(forced=((Op.STORE, "ascend_tilelang", "a test"),))
    decision = resolve(request(CUDA), policy, BACKENDS)
    assert (decision.chosen, decision.forced_by) == (None, "a test")
    assert [verdict.backend for verdict in decision.trace] == ["ascend_tilelang"]
    assert resolve(request(CUDA, Op.LOAD), policy, BACKENDS).chosen == "cuda_tilelang"  # another operation is free


def test_a_forced_backend_need_not_be_preferred() -> None:
    policy = Policy(forced=((Op.STORE, "slow", "a test"),), preference=("cuda_tilelang",))
    assert resolve(request(CUDA), policy, BACKENDS).chosen == "slow"


def test_a_preference_reorders_and_excludes() -> None:
    policy = Policy(preference=("slow", "cuda_tilelang"))
    decision = resolve(request(CUDA), policy, BACKENDS)
    assert decision.chosen == "slow"
    left_out = {verdict.backend: verdict.reasons for verdict in decision.trace}["stores_only"]
    assert [reason.what for reason in left_out] == ["device", "preference"]
    only = resolve(request(CPU), Policy(preference=("cuda_tilelang",)), BACKENDS)
    assert only.chosen is None, "a backend outside the preference must never serve"


def test_simulation_is_a_matter_of_policy_and_is_said() -> None:
    forced = Policy(forced=((Op.STORE, "ascend_tilelang", "a test"),))
    assert resolve(request(CPU), forced, BACKENDS).chosen is None
    decision = resolve(request(CPU), replace(forced, simulate=True), BACKENDS)
    assert decision.chosen == "ascend_tilelang"
    assert decision.simulated and "ascend_tilelang (simulated)" in str(decision)
    native = resolve(request(machine("npu", "ascend950", simulate=True)), replace(forced, simulate=True), BACKENDS)
    assert native.chosen == "ascend_tilelang" and not native.simulated
    overruled = resolve(request(machine("cpu", "x86_64", simulate=True)), forced, BACKENDS)
    assert overruled.chosen is None, "the platform's own flag is not a permission"


def test_failures_of_the_platform_are_reasons() -> None:
    failed = replace(CUDA, failures=(("cuda_tilelang", Reason("import", "ImportError: no tvm", "an importable language")),))
    decision = resolve(request(failed), Policy(), BACKENDS)
    assert decision.chosen == "slow"
    assert "cuda_tilelang: import: has ImportError: no tvm, needs an importable language" in str(decision)


def test_equal_questions_have_equal_answers_and_nothing_is_mutable() -> None:
    first, second = (resolve(request(CUDA), Policy(), BACKENDS) for _ in range(2))
    assert first == second and hash(first) == hash(second)
    for value in (first, first.request, first.request.platform, first.trace[0], Policy()):
        with pytest.raises(FrozenInstanceError):
            value.chosen = "another"  # type: ignore[misc, union-attr]


def test_the_orders_of_preference_name_backends_of_the_registry() -> None:
    from kvhal.registry import BUILTIN_BACKENDS

    assert {name for names in PREFERENCE.values() for name in names} == set(BUILTIN_BACKENDS)


@pytest.mark.parametrize("name", PLATFORMS)
def test_the_built_in_backends_answer_for_every_machine(name: str) -> None:
    from kvhal.registry import backends

    for op in Op:
        layout = V41_FORMAT if op.value in ("store_kv_cache", "load_paged_kv_cache", "load_kv_slots") else None
        decision = resolve(Request(op, layout, PLATFORMS[name]), Policy(), backends())
        assert decision.chosen is not None, str(decision)  # the reference runs everywhere
        for verdict in decision.trace:
            assert all(reason.what and reason.have and reason.need for reason in verdict.reasons)


def test_no_backend_serves_a_pair_that_the_specification_does_not_define() -> None:
    from kvhal import KVCacheFormat
    from kvhal.formats import SPECIFIED_CODECS
    from kvhal.registry import backends

    for data, scale in (("e4m3", "e4m3"), ("e2m1", "fp32")):
        assert (data, scale) not in SPECIFIED_CODECS
        layout = KVCacheFormat(data, 128, 32, 0, True, scale, "", token_interleaved=True)  # type: ignore[arg-type]
        for platform in PLATFORMS.values():
            for op in (Op.STORE, Op.LOAD, Op.LOAD_SLOTS, Op.FUSED_STORE):
                decision = resolve(Request(op, layout, platform, 16), Policy(), backends())
                assert decision.chosen is None, f"{decision.chosen} would serve {layout}"
                codec = {reason for verdict in decision.trace for reason in verdict.reasons if reason.what == "codec"}
                assert len(codec) == 1, "every backend says so, in the same words"


#: records that not every backend serves: elements, data, group
ODD_RECORDS = [(64, "e4m3", 12), (100, "e4m3", 32), (96, "e4m3", 32), (4, "e2m1", 4), (50, "e2m1", 5), (32768, "e4m3", 32)]


@pytest.mark.parametrize(("elements", "data", "group"), ODD_RECORDS)
def test_reasons_are_true(elements: int, data: str, group: int) -> None:
    """A way out that names a backend leads to one that serves; the Hadamard stage is refused for what does not suit it."""
    from kvhal import KVCacheFormat
    from kvhal.registry import backends

    layout = KVCacheFormat(data, elements, group, 0, True, "ue8m0", "", token_interleaved=True)  # type: ignore[arg-type]
    for platform in PLATFORMS.values():
        for backend in backends().values():
            asked = Request(Op.FUSED_STORE, layout, platform, 16)
            for reason in backend.why_not(asked):
                words = reason.hint.partition(",")[0].split()  # a second backend comes with its own condition
                if words[1:2] == ["serves"] and reason.what != "architecture":
                    assert not backends()[words[0]].why_not(asked), (backend.name, reason)
            whole = elements & (elements - 1) == 0
            reasons = [reason for reason in backend.why_not(replace(asked, stages=("hadamard",))) if reason.what == "hadamard"]
            if whole and (elements >= 8 or backend.name != "portable_triton"):
                assert reasons == []
            else:
                (reason,) = reasons
                assert reason.need == ("at least 8" if whole else "a power of two")


def test_sm_is_a_number_on_cuda_only() -> None:
    assert CUDA.sm() == 90
    assert [machine("rocm", "gfx942").sm(), CPU.sm(), machine("cuda", "not available").sm()] == [None] * 3
    assert CPU.module("triton") == Module("triton", None, "not installed")
