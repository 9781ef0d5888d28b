"""The reference's codec is the specification itself."""

from kvhal.formats import KVCacheFormat
from kvhal.interface import Request
from kvhal.numerics import dequantize, quantize, round_bf16, row_chunks, widen

__all__ = ["dequantize", "layout_of", "quantize", "round_bf16", "row_chunks", "widen"]


def layout_of(request: Request) -> KVCacheFormat:
    """The record format of a request.

    Raises:
        ValueError: the request has none, so it is not one of `kvhal.interface.FORMAT_OPS`.
    """
    if request.layout is None:
        raise ValueError(f"request.layout: has None, {request.op} needs a KVCacheFormat")
    return request.layout
