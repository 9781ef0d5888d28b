"""What a launcher's arguments become for what its `prepare` returned (docs/adding_a_backend.md, "Host time")."""

from __future__ import annotations

from typing import Any

from kvhal.interface import NormArgs, RopeArgs


def as_they_are(*arguments: Any) -> tuple[Any, ...]:
    """Of every operation but the fused store."""
    return arguments


def tensors_only(kv: Any, norm: NormArgs | None, rope: RopeArgs | None, _: Any, *into: Any) -> tuple[Any, ...]:
    """Of a fused store: ``(kv, weight, positions, cos_sin_cache, cache, slots, back)``, None for what is left out."""
    turns = (None, None) if rope is None else (rope.positions, rope.cos_sin_cache)
    return (kv, None if norm is None else norm.weight, *turns, *into)
