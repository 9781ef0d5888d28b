"""The codecs as executable specification: the exact numbers of docs/numerics.md in torch operations.

No float8 cast and no operation whose rounding depends on the device: integers on bit patterns, and fp32 additions,
multiplications and divisions, each rounded to nearest even on its own. Scalar divisors are made tensors, because
torch's CUDA kernels multiply by the reciprocal of a scalar one. Nothing here reads a tensor's value on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvhal.formats import (
    BF16_INF,
    BF16_MAGNITUDE,
    BF16_MANTISSA_BITS,
    BF16_MAX_FINITE,
    BF16_NAN,
    BF16_SHIFT,
    E4M3_MAX,
    E4M3_NAN,
    E4M3_SF_AMAX_FLOOR,
    E4M3_SF_RECIPROCAL,
    FP32_BIAS,
    FP32_INF,
    FP32_MAGNITUDE,
    FP32_MANTISSA_BITS,
    FP32_SF_AMAX_FLOOR,
    MINIFLOAT_BIAS,
    MINIFLOAT_BITS,
    MINIFLOAT_MAX_CODE,
    UE8M0_NAN,
    UE8M0_RULES,
    KVCacheFormat,
    QuantizedDtype,
)
from kvhal.refusals import codec_reasons

#: elements worked on at a time, to bound the temporaries (a dozen int32 tensors of this size): small ones stay in a
#: CPU's cache and its allocator's pool, while a device wants few launches
_CPU_CHUNK = 1 << 18
_DEVICE_CHUNK = 1 << 24


def check_codec(layout: KVCacheFormat) -> None:
    """Raises ValueError when the specification does not define the layout's pair of data and scale formats."""
    reasons = codec_reasons(layout)
    if reasons:
        raise ValueError(f"layout: has {reasons[0].have}, needs {reasons[0].need}")


def quantize(x: Tensor, layout: KVCacheFormat) -> tuple[Tensor, Tensor]:
    """Records of bf16 rows (docs/numerics.md, "Quantisation").

    Args:
        x: bf16 ``[n, elements]``, any strides.
        layout: the record's format.

    Returns:
        ``(data, sf)``: uint8 ``[n, data_bytes]`` and uint8 ``[n, sf_bytes]``, the record's bytes in cache order.

    Raises:
        ValueError: dtype or shape do not fit, or the codec is not specified.
    """
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != layout.elements:
        raise ValueError(f"x: has {x.dtype} {tuple(x.shape)}, needs torch.bfloat16 [n, {layout.elements}]")
    check_codec(layout)
    n = x.shape[0]
    if layout.quantized_dtype is None:
        return x.contiguous().view(torch.uint8), x.new_empty((n, 0), dtype=torch.uint8)
    data = x.new_empty((n, layout.data_bytes), dtype=torch.uint8)
    sf = x.new_empty((n, layout.sf_bytes), dtype=torch.uint8)
    for rows in row_chunks(n, layout.elements, x.device):
        data[rows], sf[rows] = _quantize_rows(x[rows], layout)
    return data, sf


def dequantize(data: Tensor, sf: Tensor, layout: KVCacheFormat) -> Tensor:
    """bf16 rows of records (docs/numerics.md, "Dequantisation"); any byte values are defined.

    Args:
        data: uint8 ``[n, data_bytes]``.
        sf: uint8 ``[n, sf_bytes]``.
        layout: the record's format.

    Returns:
        bf16 ``[n, elements]``; a NaN is 0x7FFF, except in bf16 records, which are copied bit by bit.

    Raises:
        ValueError: dtypes or shapes do not fit, or the codec is not specified.
    """
    for name, value, width in (("data", data, layout.data_bytes), ("sf", sf, layout.sf_bytes)):
        if value.dtype != torch.uint8 or value.dim() != 2 or value.shape != (data.shape[0], width):
            raise ValueError(f"{name}: has {value.dtype} {tuple(value.shape)}, needs torch.uint8 [n, {width}]")
    check_codec(layout)
    if layout.quantized_dtype is None:
        return data.contiguous().view(torch.bfloat16)
    out = data.new_empty((data.shape[0], layout.elements), dtype=torch.bfloat16)
    for rows in row_chunks(data.shape[0], layout.elements, data.device):
        out[rows] = _dequantize_rows(data[rows], sf[rows], layout)
    return out


def row_chunks(n: int, elements: int, device: torch.device) -> list[slice]:
    """Slices of ``n`` rows of ``elements`` elements, each small enough to work on at once on this device."""
    step = max(1, (_CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK) // elements)
    return [slice(begin, min(begin + step, n)) for begin in range(0, n, step)]


def _quantize_rows(x: Tensor, layout: KVCacheFormat) -> tuple[Tensor, Tensor]:
    dtype, elements = _codec(layout), layout.elements
    groups = _grouped(x.view(torch.int16), layout)
    amax = amax_bits(groups)
    poisoned = ((groups & BF16_MAGNITUDE).amax(-1) > BF16_INF) if dtype == "e2m1" else None
    sf, multiplier = _scales(amax, dtype, str(layout.sf_format), poisoned)
    value = _finite(groups) * multiplier.unsqueeze(-1)
    code = encode_e4m3(value) if dtype == "e4m3" else encode_e2m1(value)
    if poisoned is not None:  # e2m1 has no NaN: the scale says it, and the codes are zero
        code = code.masked_fill(poisoned.unsqueeze(-1), 0)
    code = code.flatten(1)[:, :elements]
    return (code if dtype == "e4m3" else code[:, 0::2] | code[:, 1::2] << 4), sf


def _dequantize_rows(data: Tensor, sf: Tensor, layout: KVCacheFormat) -> Tensor:
    if layout.quantized_dtype == "e4m3":
        value = decode_e4m3(data)
    else:
        value = decode_e2m1(torch.stack((data & 0xF, data >> 4), -1).flatten(1))
    if layout.sf_format == "ue8m0":
        scale = decode_ue8m0(sf)
    elif layout.sf_format == "e4m3":
        scale = decode_e4m3(sf)
    else:  # a float32 view needs a 4-byte address, which a slice of record bytes need not have: hence the copy
        scale = sf.clone(memory_format=torch.contiguous_format).view(torch.float32)
    product = _grouped(value, layout) * scale.unsqueeze(-1)
    return round_bf16(product.flatten(1)[:, : layout.elements])


def _codec(layout: KVCacheFormat) -> QuantizedDtype:
    return "e4m3" if layout.quantized_dtype == "e4m3" else "e2m1"


def _grouped(rows: Tensor, layout: KVCacheFormat) -> Tensor:
    """``[n, elements]`` as ``[n, num_scales, elements_per_sf]``; zeros fill the last group and change no amax."""
    shape = (rows.shape[0], layout.num_scales, layout.elements_per_sf)
    missing = layout.num_scales * layout.elements_per_sf - layout.elements
    if missing:
        rows = torch.cat((rows, rows.new_zeros((rows.shape[0], missing))), 1)
    return rows.reshape(shape)


def _finite(bits: Tensor) -> Tensor:
    """fp32 of bf16 bits (int16), with +-Inf as +-(largest finite bf16), whose bits are one less; NaN stays."""
    infinite = (bits & BF16_MAGNITUDE) == BF16_INF
    return _widen(bits - infinite.to(torch.int16))


def _widen(bits: Tensor) -> Tensor:
    return (bits.to(torch.int32) << BF16_SHIFT).view(torch.float32)


def amax_bits(bits: Tensor) -> Tensor:
    """Largest magnitude of each group, as bf16 bits: NaN skipped, Inf taken as the largest finite value.

    Args:
        bits: bf16 bits as int16 ``[..., group]``.

    Returns:
        int32 ``[...]`` in [0, 0x7F7F].
    """
    magnitude = bits & BF16_MAGNITUDE
    magnitude = magnitude.clamp(max=BF16_MAX_FINITE).masked_fill(magnitude > BF16_INF, 0)
    return magnitude.amax(-1).to(torch.int32)


def ue8m0_exponent(amax: Tensor, dtype: QuantizedDtype) -> Tensor:
    """Scale byte of an amax (int32 bf16 bits), int32 of the same shape: ceil(log2(max(amax, floor) / qmax)) + 127."""
    floor, shift, mantissa = UE8M0_RULES[dtype]
    above = (amax & ((1 << BF16_MANTISSA_BITS) - 1)) > mantissa
    return ((amax >> BF16_MANTISSA_BITS) - shift + above.to(torch.int32)).clamp(min=floor)


def _scales(amax: Tensor, dtype: QuantizedDtype, sf_format: str, poisoned: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scale bytes ``[n, sf_bytes]`` and fp32 multipliers ``[n, num_scales]`` of amax ``[n, num_scales]``."""
    if sf_format == "ue8m0":
        exponent = ue8m0_exponent(amax, dtype)
        multiplier = ((2 * FP32_BIAS - exponent) << FP32_MANTISSA_BITS).view(torch.float32)
        sf, nan = exponent.to(torch.uint8), UE8M0_NAN
    elif sf_format == "e4m3":
        largest = _widen(amax).clamp(min=E4M3_SF_AMAX_FLOOR)
        sf, nan = encode_e4m3((largest * E4M3_SF_RECIPROCAL).clamp(max=E4M3_MAX)), E4M3_NAN
        multiplier = torch.ones_like(largest) / decode_e4m3(sf)
    else:
        largest = _widen(amax).clamp(min=FP32_SF_AMAX_FLOOR)
        scale = largest / torch.full_like(largest, E4M3_MAX)
        return scale.view(torch.uint8), torch.ones_like(scale) / scale
    return (sf if poisoned is None else sf.masked_fill(poisoned, nan)), multiplier


def encode_e4m3(value: Tensor) -> Tensor:
    """e4m3fn codes (uint8) of any fp32: nearest even, saturating at +-448, sign of zero kept, NaN 0x7F."""
    nan = (value.view(torch.int32) & FP32_MAGNITUDE) > FP32_INF
    return _encode(value, "e4m3").masked_fill(nan, E4M3_NAN)


def encode_e2m1(value: Tensor) -> Tensor:
    """e2m1fn codes (uint8 in [0, 15]) of any fp32 but NaN: nearest even, saturating at +-6, sign of zero kept."""
    return _encode(value, "e2m1")


def _encode(value: Tensor, dtype: QuantizedDtype) -> Tensor:
    """Codes of a small float. Where the code is normal, its bits are rounded as an integer; where it is subnormal, by
    adding the power of two whose unit in the last place is the code's step. No subnormal fp32 decides anything."""
    width, mantissa = MINIFLOAT_BITS[dtype]
    bias, shift = MINIFLOAT_BIAS[dtype], FP32_MANTISSA_BITS - mantissa
    rebias = (FP32_BIAS - bias) << mantissa
    bits = value.view(torch.int32)
    magnitude = (bits & FP32_MAGNITUDE).clamp_(max=(MINIFLOAT_MAX_CODE[dtype] + rebias) << shift)
    half_even = ((magnitude >> shift) & 1).add_((1 << (shift - 1)) - 1)
    normal = half_even.add_(magnitude).bitwise_right_shift_(shift).sub_(rebias)
    anchor = shift + 1 - bias
    anchored = (magnitude.view(torch.float32) + 2.0**anchor).view(torch.int32)
    subnormal = anchored.sub_((anchor + FP32_BIAS) << FP32_MANTISSA_BITS)
    code = torch.where(magnitude < (1 << FP32_MANTISSA_BITS) + (rebias << shift), subnormal, normal)
    return code.bitwise_or_((bits >> (32 - width)) & (1 << (width - 1))).to(torch.uint8)


def decode_e4m3(code: Tensor) -> Tensor:
    """fp32 of e4m3fn codes (uint8), exact; 0x7F and 0xFF are NaN."""
    return _decode(code, "e4m3").masked_fill_((code & E4M3_NAN) == E4M3_NAN, float("nan"))


def decode_e2m1(code: Tensor) -> Tensor:
    """fp32 of e2m1fn codes (uint8 in [0, 15]), exact."""
    return _decode(code, "e2m1")


def _decode(code: Tensor, dtype: QuantizedDtype) -> Tensor:
    width, mantissa = MINIFLOAT_BITS[dtype]
    bias = MINIFLOAT_BIAS[dtype]
    magnitude = (code & ((1 << (width - 1)) - 1)).to(torch.int32)
    normal = (magnitude << (FP32_MANTISSA_BITS - mantissa)).add_((FP32_BIAS - bias) << FP32_MANTISSA_BITS)
    subnormal = (magnitude.to(torch.float32) * 2.0 ** (1 - bias - mantissa)).view(torch.int32)
    bits = torch.where(magnitude < 1 << mantissa, subnormal, normal)
    return bits.bitwise_or_((code.to(torch.int32) >> (width - 1)) << 31).view(torch.float32)


def decode_ue8m0(sf: Tensor) -> Tensor:
    """fp32 of ue8m0 bytes (uint8): the byte as fp32's exponent field, so 0 is zero and 255 is Inf."""
    return (sf.to(torch.int32) << FP32_MANTISSA_BITS).view(torch.float32)


def round_bf16(value: Tensor) -> Tensor:
    """bf16 of fp32, nearest even; every NaN becomes 0x7FFF, whatever its sign and payload."""
    bits = value.view(torch.int32)
    odd = (bits >> BF16_SHIFT) & 1
    rounded = odd.add_(bits).add_((1 << (BF16_SHIFT - 1)) - 1).bitwise_right_shift_(BF16_SHIFT)
    nan = (bits & FP32_MAGNITUDE) > FP32_INF
    return rounded.masked_fill_(nan, BF16_NAN).to(torch.int16).view(torch.bfloat16)


def widen(x: Tensor) -> Tensor:
    """fp32 of bf16 or fp32, exact."""
    return _widen(x.view(torch.int16)) if x.dtype == torch.bfloat16 else x.to(torch.float32)
