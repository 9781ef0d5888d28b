"""Configuration: context, call, environment and TOML, in this order of precedence, merged into a Policy."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvhal.dispatcher import Policy
from kvhal.errors import ConfigError
from kvhal.interface import Op
from kvhal.registry import backends

ENV_CONFIG, ENV_BACKEND, ENV_STRICT = "KVHAL_CONFIG", "KVHAL_BACKEND", "KVHAL_STRICT"


@dataclass(frozen=True)
class Layer:
    """What one source of configuration sets; None and () leave a setting to the sources below."""

    source: str
    backend: str | None = None
    ops: tuple[tuple[Op, str], ...] = ()
    preference: tuple[str, ...] | None = None
    strict: bool | None = None
    simulate: bool | None = None


@dataclass(frozen=True, eq=False)
class Scope:
    """The policy in force, the launchers bound under it and the calls validated. A change means another object.

    Attributes:
        policy: what configuration asks for.
        table: (operation, format, block size, device) -> launcher.
        calls, near: see `kvhal.ops.repeated`.
    """

    policy: Policy
    table: dict[Any, Any] = field(default_factory=dict)
    calls: dict[Any, Any] = field(default_factory=dict)
    near: tuple[dict[Any, Any], ...] = field(default_factory=lambda: tuple({} for _ in Op))


@dataclass(frozen=True, eq=False)
class _Override:
    """Layers compared by identity, so that they are a cheap key.

    `use_backend` stacks them, outermost first, and interns the stack: entering the same context again reuses its Scope.
    """

    layers: tuple[Layer, ...] = ()


_NO_OVERRIDE = _Override()
_override: ContextVar[_Override] = ContextVar("kvhal_override", default=_NO_OVERRIDE)
_configured = _Override()  # the layers of `configure`, highest precedence first
_scopes: dict[Any, Scope] = {}
#: what the scope before was made of, and the scope: (override, configured, KVHAL_BACKEND, KVHAL_STRICT, scope)
_before: tuple[Any, Any, Any, Any, Scope | None] = (None, None, None, None, None)

# The environment is looked at on every call, so that a change takes effect on the next one. os.environ.get costs microseconds
# (it encodes, decodes and raises inside); the mapping beneath it costs a tenth of one.
_variable: Any = os.environ._data.get  # type: ignore[attr-defined]
_CONFIG_KEY, _BACKEND_KEY, _STRICT_KEY = (
    os.environ.encodekey(name)  # type: ignore[attr-defined]
    for name in (ENV_CONFIG, ENV_BACKEND, ENV_STRICT)
)


def current() -> Scope:
    """The scope that the next call uses; when nothing has changed since the call before, a few comparisons by identity."""
    override, configured, backend, strict, scope = _before
    if (
        scope is not None
        and _override.get() is override
        and _configured is configured
        and _variable(_BACKEND_KEY) is backend
        and _variable(_STRICT_KEY) is strict
        and _variable(_CONFIG_KEY) is None  # a file may have changed: its time is looked at
    ):
        return scope
    return _look_again()


def _look_again() -> Scope:
    global _before
    override, configured, path = _override.get(), _configured, _variable(_CONFIG_KEY)
    backend, strict = _variable(_BACKEND_KEY), _variable(_STRICT_KEY)
    key = (override, configured, backend, strict, path and (path, _stamp(path)))
    scope = _scopes.get(key)
    if scope is None:
        scope = _scopes[key] = Scope(merge(_layers(override, configured)))
    if path is None:
        _before = (override, configured, backend, strict, scope)
    return scope


def current_policy() -> Policy:
    """The policy that the next call uses."""
    return current().policy


def _stamp(path: Any) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _layers(override: _Override, configured: _Override) -> list[Layer]:
    path = os.environ.get(ENV_CONFIG)
    environment = environment_layer(os.environ.get(ENV_BACKEND), os.environ.get(ENV_STRICT))
    file = [file_layer(Path(path), ENV_CONFIG)] if path else []
    return [*reversed(override.layers), *configured.layers, environment, *file]


def merge(layers: Iterable[Layer]) -> Policy:
    """One policy out of layers, highest precedence first.

    A layer's own operation beats its global backend, which beats its preference; any statement of a higher layer beats every
    statement of a lower one: a preference keeps the layers below it from forcing a backend.
    """
    layers = list(layers)
    forced = []
    for op in Op:
        for layer in layers:
            name = dict(layer.ops).get(op, layer.backend)
            if name:
                forced.append((op, name, layer.source))
            if name or layer.preference is not None:
                break

    def first(setting: str, default: Any) -> Any:
        return next((value for layer in layers if (value := getattr(layer, setting)) is not None), default)

    return Policy(tuple(forced), first("preference", None), first("strict", False), first("simulate", False))


def make_layer(
    source: str,
    backend: str | None = None,
    ops: Mapping[str, str] | None = None,
    preference: Iterable[str] | str | None = None,
    strict: bool | None = None,
    simulate: bool | None = None,
) -> Layer:
    """A checked layer.

    Raises:
        ConfigError: an unknown backend or operation (the message lists the known ones), operations that are no mapping, a
            preference that is empty or names a backend twice, or a flag that is neither True, False nor None.
    """
    for name, flag in (("strict", strict), ("simulate", simulate)):
        if flag is not None and type(flag) is not bool:
            raise ConfigError(f"{source}: {name} has {flag!r}, needs True or False")
    if not isinstance(ops, Mapping | None):
        raise ConfigError(f"{source}: ops has {ops!r}, needs a mapping of operations to backends")
    pairs = tuple((check_op(source, op), check_name(source, name)) for op, name in (ops or {}).items())
    order = None if preference is None else tuple(check_name(source, name) for name in several(preference))
    if order is not None and len(set(order)) != max(len(order), 1):
        raise ConfigError(f"{source}: preference has {list(order)}, needs at least one backend, each once")
    return Layer(source, None if backend is None else check_name(source, backend), pairs, order, strict, simulate)


def several(values: Any) -> tuple[Any, ...]:
    """The values where several may be given; one that is given alone counts as several."""
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else (values,)


def check_name(source: str, name: str) -> str:
    known = backends()
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"{source}: backend has {name!r}, needs one of {', '.join(known)}")
    return name


def check_op(source: str, op: str) -> Op:
    try:
        return Op(op)
    except ValueError:
        raise ConfigError(f"{source}: operation has {op!r}, needs one of {', '.join(Op)}") from None


@contextmanager
def use_backend(name: str, ops: Iterable[str] | str | None = None, simulate: bool = False) -> Iterator[None]:
    """Forces a backend for the calls inside, in this thread or task only; nests, the innermost wins.

    Args:
        name: the backend.
        ops: operation names it is forced for, or one; None for all of them.
        simulate: let `ascend_tilelang` serve CPU tensors through its functional simulator.

    Raises:
        ConfigError: unknown backend or operation, no operation at all, or `simulate` for a backend without a simulator.
    """
    source = "use_backend"
    check_name(source, name)
    forced: dict[str, str] | None = None if ops is None else {check_op(source, op): name for op in several(ops)}
    if forced is not None and not forced:
        raise ConfigError(f"{source}: ops is empty, needs at least one operation, or None for all of them")
    layer = make_layer(source, name if forced is None else None, forced, simulate=None if simulate is False else simulate)
    if layer.simulate and not backends()[name].simulator:
        raise ConfigError(f"{source}: simulate has True, needs False: {name} has no simulator")
    token = _override.set(_push(_override.get(), layer))
    try:
        yield
    finally:
        _override.reset(token)


@lru_cache(maxsize=1024)
def _push(override: _Override, layer: Layer) -> _Override:
    return _Override((*override.layers, layer))


def configure(
    *,
    backend: str | None = None,
    ops: Mapping[str, str] | None = None,
    preference: Iterable[str] | str | None = None,
    strict: bool | None = None,
    simulate: bool | None = None,
    path: str | Path | None = None,
) -> None:
    """Replaces the process-wide settings; effective on the next call. Without arguments it clears them.

    Args:
        backend: forced for every operation.
        ops: operation name -> backend, forced for these.
        preference: the only backends to consider, in this order, or one; settings further down force no other.
        strict: check metadata values before every launch.
        simulate: functional simulators may serve CPU tensors.
        path: a TOML file whose settings stand where no argument does; what it forces, where there is no `preference` either.

    Raises:
        ConfigError: unknown backend, operation or key, or an unreadable file.
    """
    global _configured
    layer = make_layer("configure", backend, ops, preference, strict, simulate)
    _configured = _Override((layer,) if path is None else (layer, file_layer(Path(path), "configure")))
    forget()


def forget() -> None:
    """Drops every merged policy and bound launcher; the next call decides anew."""
    global _before, _configured
    _configured = _Override(_configured.layers)  # a scope that another thread is still making belongs to the one before
    _before = (None, None, None, None, None)
    _scopes.clear()


def environment_layer(backend: str | None, strict: str | None) -> Layer:
    """The layer of KVHAL_BACKEND and KVHAL_STRICT; empty values count as unset."""
    flags = {"1": True, "true": True, "0": False, "false": False}
    if strict and strict.lower() not in flags:
        raise ConfigError(f"{ENV_STRICT}: has {strict!r}, needs 1, true, 0 or false")
    return make_layer(ENV_BACKEND, backend or None, strict=flags[strict.lower()] if strict else None)


def file_layer(path: Path, named_by: str) -> Layer:
    """The layer of a TOML file.

    Raises:
        ConfigError: the file cannot be read, is no TOML, or has an unknown key, a wrong type or an unknown name.
    """
    from kvhal.config_file import read  # pydantic is imported only where a file is read

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no path at all
        raise ConfigError(f"{named_by}: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error
    settings = read(document, str(path))
    return make_layer(
        str(path),
        settings.backends.force,
        settings.backends.ops,
        settings.backends.preference,
        settings.strict,
        settings.ascend.simulate,
    )
