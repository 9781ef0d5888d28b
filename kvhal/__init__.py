"""kvhal: one interface for quantised paged KV caches on NVIDIA, Ascend and anything that runs Triton or torch."""

from kvhal import library as _library  # noqa: F401  registers torch.ops.kvhal.*
from kvhal.binding import explain
from kvhal.config import configure, use_backend
from kvhal.errors import (
    CaptureError,
    ConfigError,
    ForcedBackendError,
    InvalidMetadata,
    KVHalError,
    UnsupportedError,
)
from kvhal.formats import (
    BF16_FORMAT,
    FP4_INDEX_KV_FORMAT,
    FP8_FLOAT32_SF_INDEX_KV_FORMAT,
    MXFP8_INDEX_KV_FORMAT,
    SUPPORTED_KV_CACHE_FORMATS,
    V41_FORMAT,
    V41_FP4_FORMAT,
    KVCacheFormat,
)
from kvhal.interface import (
    CastArgs,
    Decision,
    HadamardArgs,
    KVCacheOutArgs,
    NormArgs,
    Op,
    Reason,
    Request,
    RopeArgs,
)
from kvhal.layout import alloc_kv_cache, resolve_kv_cache_layout, sf_data_as_int32, split_kv_cache
from kvhal.ops import (
    KVCacheTensors,
    convert_kv_index,
    expand_load_plan,
    expand_swa_index,
    fused_norm_rope_hadamard_cast_store_kvcache,
    get_kv_swa_index_decode,
    kv_index_cat,
    load_kv_slots,
    load_paged_kv_cache,
    store_kv_cache,
)
from kvhal.platform import Platform, detect
from kvhal.version import __version__
from kvhal.warm import FusedStages, warmup

__all__ = [
    "BF16_FORMAT",
    "FP4_INDEX_KV_FORMAT",
    "FP8_FLOAT32_SF_INDEX_KV_FORMAT",
    "MXFP8_INDEX_KV_FORMAT",
    "SUPPORTED_KV_CACHE_FORMATS",
    "V41_FORMAT",
    "V41_FP4_FORMAT",
    "CaptureError",
    "CastArgs",
    "ConfigError",
    "Decision",
    "ForcedBackendError",
    "FusedStages",
    "HadamardArgs",
    "InvalidMetadata",
    "KVCacheFormat",
    "KVCacheOutArgs",
    "KVCacheTensors",
    "KVHalError",
    "NormArgs",
    "Op",
    "Platform",
    "Reason",
    "Request",
    "RopeArgs",
    "UnsupportedError",
    "__version__",
    "alloc_kv_cache",
    "configure",
    "convert_kv_index",
    "detect",
    "expand_load_plan",
    "expand_swa_index",
    "explain",
    "fused_norm_rope_hadamard_cast_store_kvcache",
    "get_kv_swa_index_decode",
    "kv_index_cat",
    "load_kv_slots",
    "load_paged_kv_cache",
    "resolve_kv_cache_layout",
    "sf_data_as_int32",
    "split_kv_cache",
    "store_kv_cache",
    "use_backend",
    "warmup",
]
