"""The public operations: validate, look up the bound launcher, launch.

What an operation writes may share no byte with its other tensors. That is refused where a call is validated, always in strict
mode; a call otherwise like one before is not looked at, and what it writes is undefined then.
"""

from kvhal.ops.cache import KVCacheTensors, load_kv_slots, load_paged_kv_cache, store_kv_cache
from kvhal.ops.fused import fused_norm_rope_hadamard_cast_store_kvcache
from kvhal.ops.index import convert_kv_index, expand_swa_index, get_kv_swa_index_decode, kv_index_cat
from kvhal.ops.plan import expand_load_plan

__all__ = [
    "KVCacheTensors",
    "convert_kv_index",
    "expand_load_plan",
    "expand_swa_index",
    "fused_norm_rope_hadamard_cast_store_kvcache",
    "get_kv_swa_index_decode",
    "kv_index_cat",
    "load_kv_slots",
    "load_paged_kv_cache",
    "store_kv_cache",
]
