"""Dispatch as calls use it: forcing, binding, failures, threads and tasks; the decision explained is the decision taken."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvhal
from kvhal import ForcedBackendError, KVCacheFormat, Op, Reason, Request, UnsupportedError, binding, registry
from kvhal.errors import BackendFailure
from kvhal.interface import Backend

LOG: list[str] = []


def make(name: str, bind: Any = None, refuse: str = "") -> Backend:
    """A backend for pivots on the CPU whose launcher notes its name; `bind` may raise instead."""

    def check(request: Request) -> tuple[Reason, ...]:
        return (Reason("mood", refuse, "a better one"),) if refuse else ()

    class Made(Backend):
        def bind(self, request: Request) -> Any:
            if bind:
                bind(request)
            return lambda *arguments: LOG.append(name)

    return Made(name, "a test", check, dict.fromkeys(Op, "nowhere:nothing"))


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Backend]]:
    """Three made-up backends instead of the registry's; the order on a CPU starts with reference_torch."""
    found = {name: make(name) for name in ("reference_torch", "portable_triton", "third")}
    for module in ("kvhal.binding", "kvhal.config"):
        monkeypatch.setattr(f"{module}.backends", lambda: found)
    monkeypatch.setattr(binding, "_failures", [])
    LOG.clear()
    kvhal.configure()
    yield found


def call() -> str:
    """One call; which backend served it."""
    kvhal.expand_swa_index(torch.zeros(1, 4, dtype=torch.int32), 4)
    assert LOG, "no launcher ran"
    served = LOG.pop()
    assert not LOG
    assert kvhal.explain("expand_swa_index").chosen == served, "explain disagrees with the call"
    return served


def test_order_of_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    file = tmp_path / "kvhal.toml"
    file.write_text('[backends]\nforce = "portable_triton"\n')
    assert call() == "reference_torch"
    monkeypatch.setenv("KVHAL_CONFIG", str(file))
    assert call() == "portable_triton"
    monkeypatch.setenv("KVHAL_BACKEND", "third")
    assert call() == "third"
    kvhal.configure(backend="portable_triton")
    assert call() == "portable_triton"
    with kvhal.use_backend("reference_torch"):
        assert call() == "reference_torch"
    assert call() == "portable_triton"
    kvhal.configure()
    assert call() == "third"
    monkeypatch.delenv("KVHAL_BACKEND")
    assert call() == "portable_triton"
    file.write_text('[backends]\npreference = ["third"]\n')
    assert call() == "third"
    monkeypatch.setenv("KVHAL_BACKEND", "portable_triton")
    assert call() == "portable_triton"
    kvhal.configure(preference=["third"], ops={"kv_index_cat": "reference_torch"})
    assert call() == "third", "a preference overrules what is forced below it"
    assert kvhal.explain("kv_index_cat").chosen == "reference_torch", "but not what is forced beside it"
    kvhal.configure(strict=False)
    assert call() == "portable_triton", "another setting overrules nothing"
    kvhal.configure()
    for name in ("KVHAL_CONFIG", "KVHAL_BACKEND"):
        monkeypatch.delenv(name)
    assert call() == "reference_torch"


def test_forcing_one_operation_by_each_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def decode() -> str:
        kvhal.get_kv_swa_index_decode(torch.zeros(1, 2, dtype=torch.int32), 4, 4)
        return LOG.pop()

    file = tmp_path / "kvhal.toml"
    file.write_text('[backends.ops]\nexpand_swa_index = "portable_triton"\n')
    kvhal.configure(path=file)
    assert (call(), decode()) == ("portable_triton", "reference_torch")
    kvhal.configure(ops={"expand_swa_index": "third"}, path=file)
    assert (call(), decode()) == ("third", "reference_torch")
    monkeypatch.setenv("KVHAL_BACKEND", "portable_triton")
    assert (call(), decode()) == ("third", "portable_triton")  # configure is above the environment
    with kvhal.use_backend("reference_torch", ops=["expand_swa_index"]):
        assert (call(), decode()) == ("reference_torch", "portable_triton")
    kvhal.configure(backend="third", ops={"get_kv_swa_index_decode": "reference_torch"})
    assert (call(), decode()) == ("third", "reference_torch")  # within one source the operation's own choice wins


def test_contexts_nest_and_end_with_an_exception() -> None:
    with kvhal.use_backend("third"):
        with kvhal.use_backend("portable_triton", ops=["store_kv_cache"]):
            assert call() == "third"
        with pytest.raises(ZeroDivisionError), kvhal.use_backend("portable_triton"):
            assert call() == "portable_triton"
            raise ZeroDivisionError
        assert call() == "third"
    assert call() == "reference_torch"


def test_a_context_is_local_to_its_thread() -> None:
    seen: list[str] = []
    with kvhal.use_backend("third"):
        thread = threading.Thread(target=lambda: seen.append(kvhal.explain("expand_swa_index").chosen or ""))
        thread.start()
        thread.join()
        assert call() == "third"
    assert seen == ["reference_torch"]


def test_a_context_is_local_to_its_task() -> None:
    async def forced(name: str, turns: int) -> None:
        with kvhal.use_backend(name):
            for _ in range(turns):
                await asyncio.sleep(0)
                assert call() == name

    async def free() -> None:
        for _ in range(6):
            await asyncio.sleep(0)
            assert call() == "reference_torch"

    async def main() -> None:
        await asyncio.gather(forced("third", 5), forced("portable_triton", 7), free())

    asyncio.run(main())


def test_a_forced_backend_never_falls_back(table: dict[str, Backend]) -> None:
    table["third"] = make("third", refuse="a bad one")
    with kvhal.use_backend("third"), pytest.raises(ForcedBackendError) as raised:
        call()
    assert str(raised.value) == (
        f"expand_swa_index on cpu ({kvhal.detect().arch}): no backend can serve it, forced by use_backend\n"
        "  third: mood: has a bad one, needs a better one"
    )
    assert raised.value.decision == kvhal_explain_under("third")
    assert not LOG


def kvhal_explain_under(name: str) -> Any:
    with kvhal.use_backend(name):
        return kvhal.explain("expand_swa_index")


def test_when_nothing_serves_every_candidate_says_why(table: dict[str, Backend]) -> None:
    for number, name in enumerate(table):
        table[name] = make(name, refuse=f"mood {number}")
    with pytest.raises(UnsupportedError) as raised:
        call()
    assert not isinstance(raised.value, ForcedBackendError)
    for number, name in enumerate(table):
        assert f"{name}: mood: has mood {number}, needs a better one" in str(raised.value)


def test_a_failing_import_becomes_a_reason(table: dict[str, Backend], caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: Request) -> None:
        raise ImportError("libcuda.so.1: cannot open shared object file")

    table["reference_torch"] = make("reference_torch", bind=fail)
    with kvhal.use_backend("reference_torch"), pytest.raises(ForcedBackendError) as raised:
        call()
    assert "reference_torch: import: has ImportError: libcuda.so.1: cannot open shared object file" in str(raised.value)
    assert "reference_torch cannot be bound" in caplog.text  # never silently
    assert call() == "portable_triton"
    assert "libcuda.so.1" in str(kvhal.explain("expand_swa_index"))
    assert "libcuda.so.1" not in str(kvhal.explain("kv_index_cat")), "another operation has not been tried yet"


def test_a_failure_to_build_concerns_what_was_built(table: dict[str, Backend]) -> None:
    other = KVCacheFormat("e4m3", 64, 64, 0, True, "fp32", "", token_interleaved=True)

    def fail(request: Request) -> None:
        if request.layout == other and request.block_size == 4:
            raise BackendFailure(Reason("registers", "too many", "fewer"))

    table["reference_torch"] = make("reference_torch", bind=fail)

    def store(layout: KVCacheFormat, block_size: int) -> str:
        cache = kvhal.alloc_kv_cache(1, block_size, layout, "cpu")
        rows = torch.zeros(1, layout.elements, dtype=torch.bfloat16)
        kvhal.store_kv_cache(rows, cache, torch.zeros(1, dtype=torch.int64), layout=layout)
        served = LOG.pop()
        assert kvhal.explain(Op.STORE, layout=layout, block_size=block_size).chosen == served
        return served

    assert store(other, 4) == "portable_triton"
    assert store(other, 8) == "reference_torch"
    assert store(kvhal.V41_FORMAT, 4) == "reference_torch"
    assert store(other, 4) == "portable_triton"
    assert "registers: has too many, needs fewer" in str(kvhal.explain(Op.STORE, layout=other))


def test_a_launcher_is_bound_once_a_configuration(table: dict[str, Backend]) -> None:
    bound: list[Op] = []
    table["reference_torch"] = make("reference_torch", bind=lambda request: bound.append(request.op))
    for _ in range(3):
        call()
    with kvhal.use_backend("reference_torch"):
        call()
    with kvhal.use_backend("reference_torch"):
        call()
    assert len(bound) == 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"stages": "hadamard"}, ValueError("stages: has 'hadamard', needs a tuple of names out of norm, rope, hadamard")),
        ({"stages": ("hadamrd",)}, ValueError("stages: has ('hadamrd',), needs a tuple of names")),
        ({"stages": None}, ValueError("stages: has None, needs a tuple of names")),
        ({"op": Op.STORE, "stages": ("norm",)}, ValueError("stages: has ('norm',), needs (): only fused_norm_rope")),
        ({"layout": "V41_FORMAT"}, TypeError("layout: has a str, needs a KVCacheFormat")),
        ({"device": "xpu:7"}, ValueError("device: has 'xpu:7', needs a torch device of this machine")),
        ({"device": "toaster"}, ValueError("device: has 'toaster', needs a torch device of this machine")),
        ({"block_size": 0}, ValueError("block_size: has 0, needs 1 <= block_size")),
        ({"block_size": "64"}, TypeError("block_size: has '64', needs an int")),
        ({"platform": "cuda"}, TypeError("platform: has a str, needs a Platform")),
        ({"policy": "reference_torch"}, TypeError("policy: has a str, needs a Policy")),
    ],
)
def test_explain_answers_no_question_that_it_does_not_understand(arguments: Any, error: Exception) -> None:
    with pytest.raises(type(error), match=re.escape(str(error))):
        kvhal.explain(**{"op": Op.FUSED_STORE, "layout": kvhal.V41_FORMAT, **arguments})


def test_explain_checks_its_question() -> None:
    with pytest.raises(ValueError, match=r"op: has 'store', needs one of store_kv_cache, load_paged_kv_cache"):
        kvhal.explain("store")
    with pytest.raises(ValueError, match=r"layout: has None, needs the record's format for store_kv_cache"):
        kvhal.explain("store_kv_cache")
    with pytest.raises(ValueError, match=r"layout: has V41_FORMAT, needs None: index operations handle no records"):
        kvhal.explain("kv_index_cat", layout=kvhal.V41_FORMAT)


def test_reload_forgets_what_was_bound(table: dict[str, Backend]) -> None:
    assert call() == "reference_torch"
    table["reference_torch"] = make("reference_torch", refuse="gone")
    registry.reload()
    assert call() == "portable_triton"
