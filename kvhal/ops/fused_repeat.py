"""Whether a fused store is like one before, in one pass over its arguments, and that one repeated."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

from torch import Tensor, compiler

from kvhal.interface import CastArgs, HadamardArgs, KVCacheOutArgs, NormArgs, RopeArgs
from kvhal.ops.repeated import UNALIGNED, UNLIKE, UNTAKEN, Call


def repeater(scalars: tuple[Any, ...]) -> Callable[..., Any]:
    """A function of a remembered call with these scalars (see `scalars_of`) and of a public call's arguments: where the two are
    alike, it launches and returns the rows that go back, if any, and UNLIKE elsewhere.

    Numbers are mostly the same objects as before, and else compared by value and class.
    """
    (norm_kind, rope_kind, hadamard_kind, out_kind), known_cast, eps, rotation, layout = scalars
    with_norm, with_rope, with_out = norm_kind is not NoneType, rope_kind is not NoneType, out_kind is not NoneType
    width, neox, offset = rotation or (None, None, None)
    usual = with_norm and with_rope and with_out

    def repeat(call: Call, kv: Any, norm: Any, rope: Any, hadamard: Any, casting: Any, out: Any) -> Any:
        if type(norm) is not norm_kind or type(rope) is not rope_kind or type(out) is not out_kind:
            return UNLIKE
        if type(hadamard) is not hadamard_kind or (casting is not known_cast and not _same_cast(casting, known_cast)):
            return UNLIKE
        weight: Any = None
        positions = turns = cache = slots = weight
        if with_norm:
            weight = norm.weight
            if norm.eps is not eps and not _alike(norm.eps, eps):
                return UNLIKE
        if with_rope:
            positions, turns = rope.positions, rope.cos_sin_cache
            if rope.is_neox_style is not neox or (rope.rope_dim is not width and not _alike(rope.rope_dim, width)):
                return UNLIKE
            if rope.offset is not offset and not _alike(rope.offset, offset):
                return UNLIKE
        if with_out:
            cache, slots = out.kv_cache, out.slot_mapping
            if out.layout is not layout:
                return UNLIKE
        if call.checks:
            if usual:
                plain = type(kv) is type(weight) is type(positions) is type(turns) is type(cache) is type(slots) is Tensor
            else:
                plain = all(type(tensor) is Tensor for tensor in tensors_of(kv, norm, rope, out))
            try:
                took = (
                    plain
                    and not compiler._is_compiling_flag
                    and call.prepared(kv, weight, positions, turns, cache, slots, None) is None
                )
            except UNTAKEN:
                took = False
            return None if took else UNLIKE
        if not (
            call.same(kv, weight, positions, turns, cache, slots) if usual else call.same(*tensors_of(kv, norm, rope, out))
        ):
            return UNLIKE
        if (kv.data_ptr() | (weight.data_ptr() if with_norm else 0) | (turns.data_ptr() if with_rope else 0)) & UNALIGNED:
            return UNLIKE
        back = call.new() if call.fresh else None
        if call.prepared is call.launch:
            call.launch(kv, norm, rope, hadamard, cache, slots, back)
        else:
            call.prepared(kv, weight, positions, turns, cache, slots, back)
        return back

    return repeat


def tensors_of(kv: Any, norm: Any, rope: Any, out: Any) -> tuple[Any, ...]:
    """The tensors of a call's arguments, which are None or of their own classes."""
    return (
        kv,
        *(() if norm is None else (norm.weight,)),
        *(() if rope is None else (rope.positions, rope.cos_sin_cache)),
        *(() if out is None else (out.kv_cache, out.slot_mapping)),
    )


def _alike(have: Any, known: Any) -> bool:
    """Whether a number can stand for another one: True == 1 == 1.0."""
    return type(have) is type(known) and have == known


def _same_cast(casting: Any, known: CastArgs) -> bool:
    try:
        return type(casting) is CastArgs and casting == known and _is_plain(casting)
    except (RuntimeError, TypeError, ValueError):  # a field that cannot be compared; validation says what it is
        return False


def _is_plain(casting: CastArgs) -> bool:
    """Its flags are bools and its count an int, and not what only compares like one."""
    return type(casting.round_sf) is bool and type(casting.cast_back) is bool and type(casting.num_per_channels) is int


def scalars_of(norm: Any, rope: Any, hadamard: Any, casting: Any, out: Any) -> tuple[Any, ...] | None:
    """All of a call but its tensors; None when an argument is not of its own class, or a number is not of the class that
    launchers take."""
    kinds = (type(norm), type(rope), type(hadamard), type(out))
    allowed = (NormArgs, RopeArgs, HadamardArgs, KVCacheOutArgs)
    if any(kind not in (NoneType, own) for kind, own in zip(kinds, allowed, strict=True)) or type(casting) is not CastArgs:
        return None
    eps = None if norm is None else norm.eps
    rotation = None if rope is None else (rope.rope_dim, rope.is_neox_style, rope.offset)
    if type(eps) not in (NoneType, float) or not _is_plain(casting):
        return None
    if rotation is not None and (
        type(rotation[0]) is not int or type(rotation[1]) is not bool or type(rotation[2]) not in (NoneType, int)
    ):
        return None
    return kinds, casting, eps, rotation, None if out is None else out.layout
