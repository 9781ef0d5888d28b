"""The fused store: RMSNorm, rotary embedding, Hadamard, cast and scatter in one pass over the rows."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from kvhal.config import current
from kvhal.interface import CastArgs, HadamardArgs, KVCacheOutArgs, NormArgs, RopeArgs
from kvhal.ops.fused_calls import fused
from kvhal.ops.repeated import FUSED_STORE, UNLIKE, UNTAKEN


def fused_norm_rope_hadamard_cast_store_kvcache(
    kv: torch.Tensor,
    *,
    norm_args: NormArgs | None = None,
    rope_args: RopeArgs | None = None,
    hadamard_args: HadamardArgs | None = None,
    cast_args: CastArgs,
    out_args: KVCacheOutArgs | None = None,
) -> torch.Tensor | None:
    """RMSNorm -> RoPE -> Hadamard in fp32, one rounding to bf16, then exactly `store_kv_cache` of that bf16.

    Args:
        kv: bf16 or fp32 ``[n, ...]``; the trailing dimensions flatten to one record; any row stride.
        norm_args, rope_args, hadamard_args: the stages; None leaves one out.
        cast_args: what the cast produces; must agree with the cache's layout.
        out_args: the cache and its slots (as in `store_kv_cache`); None stores nothing, which needs cast_back.

    Returns:
        With ``cast_args.cast_back`` the dequantised bf16 ``[n, elements]``, rows of skipped slots too; otherwise None.

    Raises:
        ValueError: a dtype, shape, stride or device does not fit, cast_args contradicts the cache, or memory is shared (see
            `kvhal.ops`); nothing was written.
        InvalidMetadata: strict mode, a slot or position is out of range, or a slot occurs twice.
        UnsupportedError: no backend can serve; ForcedBackendError when one was forced.

    The order of every fp32 operation is fixed (docs/numerics.md), so that all backends write the same bytes.
    """
    if is_dynamo_compiling():
        from kvhal import library

        return library.fused_store(kv, norm_args, rope_args, hadamard_args, cast_args, out_args)
    scope = current()
    try:
        call = scope.near[FUSED_STORE].get(0 if out_args is None else out_args.kv_cache.data_ptr())
    except UNTAKEN:
        call = None
    if call is not None:
        back = call.repeat(call, kv, norm_args, rope_args, hadamard_args, cast_args, out_args)
        if back is not UNLIKE:
            return back  # type: ignore[no-any-return]
    return fused(scope, kv, norm_args, rope_args, hadamard_args, cast_args, out_args)
