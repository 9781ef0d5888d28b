"""The table of backends: the four built-in ones, those of other packages, and what a broken one does."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import MappingProxyType

import pytest

from kvhal import Op, Request, registry
from kvhal.interface import Backend, Reason
from kvhal.testing.platforms import PLATFORMS


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    registry.reload()


def install(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    found = [EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in points]
    monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.ENTRY_POINT_GROUP else [])
    registry.reload()


EXTERNAL = Backend("external", "a test", lambda request: ())
WRONG = "no backend"


def test_the_four_backends_are_there_in_order() -> None:
    names = ["cuda_tilelang", "ascend_tilelang", "portable_triton", "reference_torch"]
    assert list(registry.BUILTIN_BACKENDS) == names
    assert list(registry.backends())[:4] == names
    assert isinstance(registry.backends(), MappingProxyType)


@pytest.mark.parametrize("name", registry.BUILTIN_BACKENDS)
def test_a_built_in_manifest_is_complete(name: str) -> None:
    backend = registry.backends()[name]
    assert backend.name == name
    assert backend.runs_on
    for op, target in backend.binders.items():
        assert isinstance(op, Op)
        module, _, function = target.partition(":")
        assert module.startswith(f"kvhal.backends.{name}."), target
        assert function.isidentifier()


@pytest.mark.parametrize("name", registry.BUILTIN_BACKENDS)
def test_checks_are_pure(name: str) -> None:
    backend = registry.backends()[name]
    for platform in PLATFORMS.values():
        request = Request(Op.CONVERT_INDEX, None, platform)
        assert backend.why_not(request) == backend.why_not(request)


def test_the_reference_can_be_bound_for_every_operation() -> None:
    backend = registry.backends()["reference_torch"]
    for target in backend.binders.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
    assert set(backend.binders) == set(Op)


def test_another_packages_backend_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("external", f"{__name__}:EXTERNAL"))
    found = registry.backends()["external"]
    assert (found.name, found.runs_on) == ("external", "a test")
    assert found.why_not(Request(Op.STORE, None, PLATFORMS["cpu"]))[0].what == "operation", "its own check has no reason"
    assert list(registry.backends())[-1] == "external"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("no_such_package:BACKEND", "ModuleNotFoundError: No module named 'no_such_package'"),
        (f"{__name__}:NOTHING", "AttributeError"),
        (f"{__name__}:WRONG", "a str"),
        (f"{__name__}:EXTERNAL", "a backend called external"),
    ],
)
def test_a_broken_one_stays_in_the_table_and_says_why(value: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("broken", value))
    backend = registry.backends()["broken"]
    reasons = backend.why_not(Request(Op.STORE, None, PLATFORMS["cpu"]))
    assert reasons[0].what == "entry point"
    assert text in reasons[0].have and value in reasons[0].have
    assert "called broken" in reasons[0].need


@pytest.mark.parametrize("name", ["reference_torch", "my-backend"])
def test_a_name_that_cannot_be_used_is_refused_alone(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = registry.backends().get(name)
    install(monkeypatch, (name, f"{__name__}:EXTERNAL"), ("external", f"{__name__}:EXTERNAL"))
    assert registry.backends().get(name) is own
    assert registry.backends()["external"].name == "external"
    (reason,) = registry.refused()
    assert reason.have == f"{name} = {__name__}:EXTERNAL"
    assert reason.need == "an identifier that no built-in backend has for a name"
    assert reason.have in caplog.text


def test_a_name_that_two_packages_register_serves_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("external", f"{__name__}:EXTERNAL"), ("external", "other:BACKEND"))
    (reason, _) = registry.backends()["external"].why_not(Request(Op.STORE, None, PLATFORMS["cpu"]))
    assert reason.have == f"external = {__name__}:EXTERNAL and external = other:BACKEND"
    assert reason.need == "one package that registers this name"


def fails(request: Request) -> tuple[Reason, ...]:
    raise KeyError(request.op)


FAILING = Backend("failing", "a test", fails)


def test_a_check_that_raises_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("failing", f"{__name__}:FAILING"))
    request = Request(Op.CONVERT_INDEX, None, PLATFORMS["cpu"])
    (reason, _) = registry.backends()["failing"].why_not(request)
    assert reason.what == "check" and reason.have.startswith("KeyError: ")


def test_a_manifest_checks_itself() -> None:
    with pytest.raises(ValueError, match="backend name has 'my-backend', needs an identifier"):
        Backend("my-backend", "", lambda request: ())
    with pytest.raises(ValueError, match="binders has 'store': 'm:f', needs Op: 'module:function'"):
        Backend("mine", "", lambda request: (), {"store": "m:f"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="needs Op: 'module:function'"):
        Backend("mine", "", lambda request: (), {Op.STORE: "module.function"})
