"""The fused store refuses bad arguments and contradictions with a text that names them, and writes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kvhal
from kvhal import MXFP8_INDEX_KV_FORMAT, CastArgs, HadamardArgs, KVCacheFormat, Op
from tests.faults.calls import Change, good, refuse

Entry = tuple[Change, type[Exception], tuple[str, ...]]


def part(name: str, **changes: Any) -> Change:
    """Replaces fields of one argument object; a callable maps the old field to the new one."""

    def change(arguments: dict[str, Any]) -> dict[str, Any]:
        old = arguments[name]
        new = {field: value(getattr(old, field)) if callable(value) else value for field, value in changes.items()}
        return {name: replace(old, **new)}

    return change


REFUSED: dict[str, Entry] = {
    "kv-dtype": (
        lambda c: {"kv": c["kv"].half()},
        ValueError,
        ("kv: has dtype torch.float16, needs torch.bfloat16 or torch.float32",),
    ),
    "kv-width": (lambda c: {"kv": c["kv"][:, :256]}, ValueError, ("kv: has shape (5, 256): 256 elements a record, needs 512",)),
    "kv-stride": (lambda c: {"kv": c["kv"].t().contiguous().t()}, ValueError, ("kv: has strides (1, 5), needs",)),
    "kv-device": (lambda c: {"kv": c["kv"].to("meta")}, ValueError, ("norm_args.weight: has device cpu, needs meta",)),
    "kv-count": (lambda c: {"kv": c["kv"][:4]}, ValueError, ("rope_args.positions: has 5 entries, needs 4, one a token",)),
    "norm-type": (lambda c: {"norm_args": c["norm_args"].weight}, TypeError, ("norm_args: has a Tensor, needs a NormArgs",)),
    "rope-type": (lambda c: {"rope_args": 3}, TypeError, ("rope_args: has a int, needs a RopeArgs",)),
    "hadamard-type": (lambda c: {"hadamard_args": True}, TypeError, ("hadamard_args: has a bool, needs a HadamardArgs",)),
    "cast-type": (lambda c: {"cast_args": None}, TypeError, ("cast_args: has a NoneType, needs a CastArgs",)),
    "out-type": (lambda c: {"out_args": ()}, TypeError, ("out_args: has a tuple, needs a KVCacheOutArgs",)),
    **{
        f"{field}-{value!r}": (
            part(name, **{field: value}),
            TypeError,
            (f"{name}.{field}: has {value!r}, needs True or False",),
        )
        for name, field in (("rope_args", "is_neox_style"), ("cast_args", "round_sf"), ("cast_args", "cast_back"))
        for value in (1, 0.0, "yes", None, [])
    },
    "weight-dtype": (
        part("norm_args", weight=torch.Tensor.double),
        ValueError,
        ("norm_args.weight: has dtype torch.float64, needs torch.bfloat16 or torch.float32",),
    ),
    "weight-count": (
        part("norm_args", weight=lambda t: t[:500]),
        ValueError,
        ("norm_args.weight: has 500 elements, needs 512, one an element of the record",),
    ),
    "weight-stride": (
        part("norm_args", weight=lambda t: t.repeat(2)[::2]),
        ValueError,
        ("norm_args.weight: has strides (2,), needs a contiguous tensor",),
    ),
    "eps-negative": (
        part("norm_args", eps=-1e-6),
        ValueError,
        ("norm_args.eps: has -1e-06, needs a number in [0, 3.4028235e+38]",),
    ),
    "eps-nan": (
        part("norm_args", eps=float("nan")),
        ValueError,
        ("norm_args.eps: has nan, needs a number in [0, 3.4028235e+38]",),
    ),
    "positions-dtype": (
        part("rope_args", positions=torch.Tensor.float),
        ValueError,
        ("rope_args.positions: has dtype torch.float32, needs torch.int32 or torch.int64",),
    ),
    "positions-device": (
        part("rope_args", positions=lambda t: t.to("meta")),
        ValueError,
        ("rope_args.positions: has device meta, needs cpu, where kv is",),
    ),
    "rope-odd": (part("rope_args", rope_dim=15), ValueError, ("rope_args.rope_dim: has 15, needs an even count",)),
    "rope-wide": (part("rope_args", rope_dim=514), ValueError, ("rope_args.rope_dim: has 514, needs 2 <= ", "<= 512")),
    "rope-table": (
        part("rope_args", rope_dim=32),
        ValueError,
        ("rope_args.cos_sin_cache: has shape (6, 16), needs 32 columns",),
    ),
    "rope-offset": (part("rope_args", offset=500), ValueError, ("rope_args.offset: has 500, needs 0 <=", "<= 496")),
    "table-dtype": (
        part("rope_args", cos_sin_cache=torch.Tensor.bfloat16),
        ValueError,
        ("rope_args.cos_sin_cache: has dtype torch.bfloat16, needs torch.float32",),
    ),
    "cast-format": (
        part("cast_args", fmt="e2m1"),
        ValueError,
        ("cast_args: has (fmt, num_per_channels, sf_format) = ('e2m1', 32, 'ue8m0'), needs ('e4m3', 32, 'ue8m0')",),
    ),
    "cast-group": (part("cast_args", num_per_channels=16), ValueError, ("cast_args: has", "('e4m3', 16, 'ue8m0')")),
    "cast-sf": (
        part("cast_args", sf_format="fp32", round_sf=False),
        ValueError,
        ("cast_args: has", "('e4m3', 32, 'fp32'), needs ('e4m3', 32, 'ue8m0'), as the cache's layout V41_FORMAT"),
    ),
    "cast-round": (
        part("cast_args", round_sf=False),
        ValueError,
        ("cast_args.round_sf: has False with sf_format 'ue8m0', needs True exactly for 'ue8m0'",),
    ),
    "cache-rank": (
        part("out_args", kv_cache=lambda t: t[0]),
        ValueError,
        ("out_args.kv_cache: has shape (4, 1, 528), needs 4 dimensions",),
    ),
    "cache-format": (
        part("out_args", layout=kvhal.V41_FP4_FORMAT),
        ValueError,
        ("kv_cache: has dtype torch.uint8 and last dimension 528, needs torch.uint8 and 288",),
    ),
    "cache-device": (
        part("out_args", kv_cache=lambda t: t.to("meta")),
        ValueError,
        ("out_args.kv_cache: has device meta, needs cpu, where kv is",),
    ),
    "slots-dtype": (
        part("out_args", slot_mapping=torch.Tensor.short),
        ValueError,
        ("out_args.slot_mapping: has dtype torch.int16, needs torch.int32 or torch.int64",),
    ),
    "slots-count": (
        part("out_args", slot_mapping=lambda t: t[:4]),
        ValueError,
        ("out_args.slot_mapping: has 4 slots, needs 5, one a token",),
    ),
    "nothing-to-do": (
        lambda c: {"out_args": None},
        ValueError,
        ("out_args: has None without cast_args.cast_back, needs a KVCacheOutArgs, or cast_back=True",),
    ),
    "cast-nonsense": (
        lambda c: {"out_args": None, "cast_args": CastArgs("e4m3", 0, True, "ue8m0", cast_back=True)},
        ValueError,
        ("cast_args: quantized_elements has 512 and elements_per_sf has 0",),
    ),
    "cast-unknown": (
        lambda c: {"out_args": None, "cast_args": CastArgs("e5m2", 32, True, "ue8m0", cast_back=True)},
        ValueError,
        ("cast_args: quantized_dtype has 'e5m2', needs 'e4m3', 'e2m1' or None",),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    change, error, fragments = REFUSED[what]
    refuse(good(Op.FUSED_STORE), change, error, *fragments)


def test_hadamard_needs_a_power_of_two() -> None:
    layout = KVCacheFormat("e4m3", 384, 32, 0, True, "ue8m0", "", token_interleaved=True)
    text = "hadamard_args: has records of 384 elements, needs a power of two"
    refuse(good(Op.FUSED_STORE, layout), lambda c: {"hadamard_args": HadamardArgs()}, ValueError, text)


def test_the_scale_format_of_the_cast_tells_132_byte_records_apart() -> None:
    call = good(Op.FUSED_STORE, MXFP8_INDEX_KV_FORMAT)
    arguments = {**call.arguments, "out_args": replace(call.arguments["out_args"], layout=None)}
    kvhal.fused_norm_rope_hadamard_cast_store_kvcache(**arguments)
