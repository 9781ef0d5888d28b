"""cuda_tilelang's kernels as they ship on sm_90, in groups that are compiled together, and the safe defaults."""

from __future__ import annotations

from typing import Any

from kvhal.backends.cuda_tilelang import fused, index, load, plan, store
from kvhal.backends.cuda_tilelang.tuned import shape_of
from kvhal.formats import BUILTIN_FORMATS, V41_FORMAT, V41_FP4_FORMAT, KVCacheFormat
from kvhal.testing.formats import USER_FORMATS
from tests.compile.cuda_sources import ARCH

FORMATS = {**BUILTIN_FORMATS, "MAIN_384": USER_FORMATS["MAIN_384"]}
PLAIN = fused.Stages("bfloat16", "bfloat16", fused.Rope(448, 64, False, "int64"), False, "int64", False, 16)
EVERYTHING = fused.Stages("float32", "float32", fused.Rope(32, 64, True, "int32"), True, "int32", True, 2)
BACK_ONLY = fused.Stages("bfloat16", None, None, False, None, True, 16)
Job = tuple[Any, ...]  #: a factory and its arguments


def job(factory: Any, *arguments: Any, arch: str = ARCH) -> Job:
    """A factory with its arguments and, behind them, its launch shape on `arch`."""
    name = factory.__name__.removesuffix("_kernel")
    if not arguments:
        return factory, *shape_of(arch, name, None)
    return factory, *arguments, shape_of(arch, name, arguments[0].quantized_dtype)


def _stores() -> dict[str, Job]:
    found = {f"store_{name}": job(store.store_kernel, layout, 64, "int64", 16) for name, layout in FORMATS.items()}
    found["store_default"] = job(store.store_kernel, V41_FP4_FORMAT, 64, "int64", 16, arch="none")
    return found | {"store_narrow": job(store.store_kernel, V41_FORMAT, 133, "int32", 2)}


def _loads() -> dict[str, Job]:
    found: dict[str, Job] = {}
    for name, layout in FORMATS.items():
        factory = load.raw_kernel if layout.is_index else load.load_kernel
        found[f"load_{name}"] = job(factory, layout, 64, 16)
    found["load_default"] = job(load.load_kernel, V41_FP4_FORMAT, 64, 16, arch="none")
    return found | {"load_narrow": job(load.load_kernel, V41_FP4_FORMAT, 133, 2)}


def _slots_and_indices() -> dict[str, Job]:
    found: dict[str, Job] = {}
    for name, layout in BUILTIN_FORMATS.items():
        shape = shape_of(ARCH, "slots_index" if layout.is_index else "slots", layout.quantized_dtype)
        found[f"slots_{name}"] = (load.slots_kernel, layout, 64, "int64", 16, shape)
    for factory in (index.convert_kernel, index.cat_kernel, index.expand_kernel, index.window_kernel):
        found[factory.__name__.removesuffix("_kernel")] = job(factory)
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
    found = {f"fused_{name}": job(fused.fused_kernel, BUILTIN_FORMATS[name], 3, on) for name, on in stages.items()}
    return found | {f"fused_few_{name}": (fused.few_kernel, BUILTIN_FORMATS[name], 3, on) for name, on in stages.items()}


GROUPS = {"stores": _stores, "loads": _loads, "slots and indices": _slots_and_indices, "fused": _fused}


def layout_of(name: str) -> KVCacheFormat:
    """The format that a kernel's name ends with."""
    return FORMATS[name.partition("_")[2]]
