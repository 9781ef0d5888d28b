"""cuda_tilelang's kernels as they ship on sm_90, in groups that are compiled together, and the safe defaults."""

from __future__ import annotations

from typing import Any

from kvhal.backends.cuda_tilelang import fused, index, load, load_bulk, plan, store
from kvhal.backends.cuda_tilelang.tuned import shape_of
from kvhal.formats import BUILTIN_FORMATS, V41_FORMAT, V41_FP4_FORMAT, KVCacheFormat
from kvhal.testing.formats import CONFORMANCE_FORMATS, USER_FORMATS
from tests.compile.cuda_sources import ARCH

FORMATS = {**BUILTIN_FORMATS, "MAIN_384": USER_FORMATS["MAIN_384"]}
PLAIN = fused.Stages("bfloat16", "bfloat16", fused.Rope(448, 64, False, "int64"), False, "int64", False, 16)
EVERYTHING = fused.Stages("float32", "float32", fused.Rope(32, 64, True, "int32"), True, "int32", True, 2)
NORM_ONLY = fused.Stages("bfloat16", "bfloat16", None, False, "int64", False, 16)
PADDED = ("MAIN_384", "ODD_MAIN_FP4_40")  #: formats that leave lanes without an octet
BACK_ONLY = fused.Stages("bfloat16", None, None, False, None, True, 16)
Job = tuple[Any, ...]  #: a factory and its arguments


def job(factory: Any, *arguments: Any, arch: str = ARCH) -> Job:
    """A factory with its arguments and, behind them, its launch shape on `arch`."""
    name = factory.__name__.removesuffix("_kernel")
    if factory is store.store_kernel and arguments[0].is_index:
        name = "store_index"
    if not arguments:
        return factory, *shape_of(arch, name, None)
    return factory, *arguments, shape_of(arch, name, arguments[0].quantized_dtype)


def _stores() -> dict[str, Job]:
    found = {f"store_{name}": job(store.store_kernel, layout, 64, "int64", 16) for name, layout in FORMATS.items()}
    for elements in (1024, 2048):  # more octets a lane than the records that tuned.py was measured with
        wide = KVCacheFormat("e2m1", elements, 16, 0, True, "e4m3", "a wide record", token_interleaved=True)
        found[f"store_FP4_{elements}"] = job(store.store_kernel, wide, 64, "int64", 16)
    found["store_default"] = job(store.store_kernel, V41_FP4_FORMAT, 64, "int64", 16, arch="none")
    return found | {"store_narrow": job(store.store_kernel, V41_FORMAT, 133, "int32", 2)}


def _loads() -> dict[str, Job]:
    found: dict[str, Job] = {}
    for name, layout in FORMATS.items():
        factory = load.raw_kernel if layout.is_index else load.load_kernel
        found[f"load_{name}"] = job(factory, layout, 64, 16)
    for name in ("V41_FORMAT", "V41_FP4_FORMAT"):
        found[f"load_bulk_{name}"] = job(load_bulk.load_bulk_kernel, FORMATS[name], 64, 16)
    found["load_bulk_narrow"] = job(load_bulk.load_bulk_kernel, V41_FP4_FORMAT, 133, 2)
    found["load_default"] = job(load.load_kernel, V41_FP4_FORMAT, 64, 16, arch="none")
    return found | {"load_narrow": job(load.load_kernel, V41_FP4_FORMAT, 133, 2)}


def _slots_and_indices() -> dict[str, Job]:
    found: dict[str, Job] = {}
    for name, layout in BUILTIN_FORMATS.items():
        found[f"slots_{name}"] = job(load.slots_kernel, layout, 64, "int64", 16)
    for factory in (index.convert_kernel, index.cat_kernel, index.expand_kernel, index.window_kernel):
        name = factory.__name__.removesuffix("_kernel")
        threads, entries, _ = shape_of(ARCH, name, None)
        found |= {name: (factory, threads, 1), f"{name}_many": (factory, threads, entries)}
    (threads,) = shape_of(ARCH, "plan", None)
    return found | {"plan": (plan.plan_kernel, 4, threads), "plan_narrow": (plan.plan_kernel, 1, threads)}


def _fused() -> dict[str, Job]:
    stages = {
        "V41_FORMAT": PLAIN,
        "V41_FP4_FORMAT": PLAIN,
        "FP4_INDEX_KV_FORMAT": EVERYTHING,
        "FP8_FLOAT32_SF_INDEX_KV_FORMAT": EVERYTHING,
        "MXFP8_INDEX_KV_FORMAT": EVERYTHING,
        "BF16_FORMAT": BACK_ONLY,
    }
    jobs = [(name, BUILTIN_FORMATS[name], on) for name, on in stages.items()]
    jobs += [(name, layout, NORM_ONLY) for name, layout in CONFORMANCE_FORMATS.items() if name in PADDED]
    found: dict[str, Job] = {}
    for name, layout, on in jobs:
        for factory, shape, (_, most) in fused.kernels_of(layout, ARCH):
            kind = "_few" if shape == fused.FEW else "" if most == fused.MAX_TOKENS else "_chunk"
            found[f"fused{kind}_{name}"] = (factory, layout, 3, on, shape)
    return found


GROUPS = {"stores": _stores, "loads": _loads, "slots and indices": _slots_and_indices, "fused": _fused}


def layout_of(name: str) -> KVCacheFormat:
    """The format that a kernel's name ends with."""
    return FORMATS[name.partition("_")[2].removeprefix("bulk_")]
