"""A second implementation of the codecs, in numpy and ml_dtypes, written from the definitions: logarithms instead of
exponent tricks, library casts instead of integer rounding. It takes nothing from kvhal but the descriptor's fields."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

F32 = np.float32
LARGEST_BF16 = float(np.uint16(0x7F7F).view(ml_dtypes.bfloat16))
QMAX = {"e4m3": 448.0, "e2m1": 6.0}
FLOOR = {"e4m3": 1e-4, "e2m1": 6 * 2.0**-126}


def groups_of(layout: Any) -> list[slice]:
    size, elements = layout.elements_per_sf, layout.quantized_elements
    return [slice(begin, min(begin + size, elements)) for begin in range(0, elements, size)]


def ceil_log2(value: float) -> int:
    mantissa, exponent = np.frexp(value)
    return int(exponent) - int(mantissa == 0.5)


def cast(value: Array, dtype: str) -> Array:
    """Codes of fp32 values, saturating; NaN must have been dealt with by the caller of e2m1."""
    limit = QMAX[dtype]
    target = ml_dtypes.float8_e4m3fn if dtype == "e4m3" else ml_dtypes.float4_e2m1fn
    codes = np.clip(value, -limit, limit).astype(target).view(np.uint8)
    return np.where(np.isnan(value), 0x7F, codes).astype(np.uint8) if dtype == "e4m3" else codes & 0xF


def scale_of(amax: float, layout: Any) -> tuple[bytes, Any]:
    """A group's scale bytes and its fp32 multiplier."""
    dtype = layout.quantized_dtype
    if layout.sf_format == "ue8m0":
        byte = ceil_log2(max(amax, FLOOR[dtype]) / QMAX[dtype]) + 127
        return bytes([byte]), F32(2.0 ** (127 - byte))
    if layout.sf_format == "e4m3":
        scaled = F32(max(amax, 6 * 2.0**-9)) * (F32(1) / F32(6))
        code = cast(np.array([min(scaled, F32(448))], F32), "e4m3")
        return code.tobytes(), F32(1) / code.view(ml_dtypes.float8_e4m3fn).astype(F32)[0]
    scale = max(F32(amax), F32(1e-4)) / F32(448)
    return np.array([scale], "<f4").tobytes(), F32(1) / scale


def quantize_group(bits: Array, layout: Any) -> tuple[Array, bytes]:
    x = bits.view(ml_dtypes.bfloat16).astype(F32)
    nan = np.isnan(x)
    x = np.clip(x, -LARGEST_BF16, LARGEST_BF16)
    amax = float(np.abs(np.where(nan, 0, x)).max())
    sf, multiplier = scale_of(amax, layout)
    if layout.quantized_dtype == "e2m1" and nan.any():
        return np.zeros(x.shape, np.uint8), bytes([0xFF if layout.sf_format == "ue8m0" else 0x7F])
    with np.errstate(invalid="ignore"):  # signalling NaN
        return cast(x * multiplier, layout.quantized_dtype), sf


def quantize(bits: Array, layout: Any) -> tuple[Array, Array]:
    """bf16 bits uint16 ``[n, elements]`` to record bytes ``(data, sf)``."""
    data, sf = [], []
    for row in bits:
        parts = [quantize_group(row[group], layout) for group in groups_of(layout)]
        codes = np.concatenate([part[0] for part in parts])
        data.append(codes if layout.quantized_dtype == "e4m3" else codes[0::2] + 16 * codes[1::2])
        sf.append(np.frombuffer(b"".join(part[1] for part in parts), np.uint8))
    return np.array(data, np.uint8), np.array(sf, np.uint8)


def dequantize(data: Array, sf: Array, layout: Any) -> Array:
    """Record bytes to bf16 bits uint16 ``[n, elements]``; NaN is 0x7FFF."""
    if layout.quantized_dtype == "e4m3":
        values = data.view(ml_dtypes.float8_e4m3fn).astype(F32)
    else:
        codes = np.stack((data % 16, data // 16), -1).reshape(len(data), -1).astype(np.uint8)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(F32)
    if layout.sf_format == "ue8m0":
        powers = np.ldexp(1.0, sf.astype(np.int32) - 127)
        scales = np.where(sf == 0, 0.0, np.where(sf == 255, np.inf, powers))
    elif layout.sf_format == "e4m3":
        scales = sf.view(ml_dtypes.float8_e4m3fn)
    else:
        scales = np.ascontiguousarray(sf).view("<f4")
    scales = scales.astype(F32)
    out = np.empty(values.shape, np.uint16)
    with np.errstate(invalid="ignore", over="ignore"):
        for index, group in enumerate(groups_of(layout)):
            out[:, group] = round_bf16(values[:, group] * scales[:, index : index + 1])
    return out


def round_bf16(value: Array) -> Array:
    """bf16 bits of fp32 values; NaN is 0x7FFF."""
    return np.where(np.isnan(value), np.uint16(0x7FFF), value.astype(ml_dtypes.bfloat16).view(np.uint16))
