"""The one formatter of decisions, and what kind of error each error is."""

from __future__ import annotations

import pickle

import pytest

import kvhal
from kvhal import Decision, ForcedBackendError, Op, Reason, Request, UnsupportedError
from kvhal.errors import BackendFailure, describe, describe_reason, refusal
from kvhal.interface import Verdict
from kvhal.testing.platforms import machine

REQUEST = Request(Op.STORE, kvhal.V41_FORMAT, machine("cuda", "sm_80"))
REFUSED = Verdict(
    "cuda_tilelang",
    (Reason("architecture", "sm_80", "sm_90 or newer"), Reason("tilelang", "not installed", "tilelang", "pip install it")),
)


def test_a_reason_is_a_sentence() -> None:
    assert describe_reason(Reason("device", "cpu", "cuda")) == "device: has cpu, needs cuda"
    assert describe_reason(Reason("device", "cpu", "cuda", "move it")) == "device: has cpu, needs cuda (move it)"


def test_a_decision_is_a_page_with_every_reason() -> None:
    served = Decision(REQUEST, "portable_triton", (REFUSED, Verdict("portable_triton", ()), Verdict("reference_torch", ())))
    assert (
        describe(served)
        == str(served)
        == (
            "store_kv_cache of V41_FORMAT on cuda (sm_80): portable_triton\n"
            "  cuda_tilelang: architecture: has sm_80, needs sm_90 or newer\n"
            "  cuda_tilelang: tilelang: has not installed, needs tilelang (pip install it)\n"
            "  portable_triton: chosen\n"
            "  reference_torch: could serve"
        )
    )


def test_a_refusal_says_who_forced_it() -> None:
    forced = refusal(Decision(REQUEST, None, (REFUSED,), forced_by="KVHAL_BACKEND"))
    assert isinstance(forced, ForcedBackendError)
    assert str(forced).startswith(
        "store_kv_cache of V41_FORMAT on cuda (sm_80): no backend can serve it, forced by KVHAL_BACKEND"
    )
    assert forced.decision.trace == (REFUSED,)
    free = refusal(Decision(REQUEST, None, (REFUSED,)))
    assert type(free) is UnsupportedError
    assert "forced" not in str(free)


def test_index_operations_have_no_format_in_the_text() -> None:
    decision = Decision(Request(Op.INDEX_CAT, None, machine("cpu", "x86_64")), None, ())
    assert str(decision) == "kv_index_cat on cpu (x86_64): no backend can serve it"


def test_kinds_of_errors() -> None:
    assert issubclass(ForcedBackendError, UnsupportedError) and issubclass(UnsupportedError, RuntimeError)
    assert issubclass(kvhal.InvalidMetadata, ValueError) and issubclass(kvhal.ConfigError, ValueError)
    assert issubclass(kvhal.CaptureError, RuntimeError)
    for error in (kvhal.InvalidMetadata, kvhal.ConfigError, kvhal.CaptureError, UnsupportedError, BackendFailure):
        assert issubclass(error, kvhal.KVHalError)


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(refusal(Decision(REQUEST, None, (REFUSED,), forced_by="a test"))))
    assert isinstance(error, ForcedBackendError) and error.decision.trace == (REFUSED,)
    failure = pickle.loads(pickle.dumps(BackendFailure(REFUSED.reasons[0])))
    assert failure.reason == REFUSED.reasons[0]


@pytest.mark.parametrize("layout", [kvhal.V41_FORMAT, kvhal.BF16_FORMAT])
def test_formats_print_by_name(layout: kvhal.KVCacheFormat) -> None:
    assert str(layout).endswith("_FORMAT")
