"""Whole operations as loops over tokens, in Python integers and numpy: what `reference_torch` is held to on the CPU.

Byte addresses are written out here once more, from DESIGN's description of a block, and not taken from kvhal.layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvhal import KVCacheTensors, Op
from tests.oracle import codec, stages

F32 = np.float32


def to_int32(number: int) -> int:
    """The low 32 bits, signed."""
    return (number + 2**31) % 2**32 - 2**31


class Records:
    """A paged cache's bytes, one record at a time."""

    def __init__(self, cache: torch.Tensor, layout: Any) -> None:
        self.blocks, self.block_size = cache.shape[:2]
        self.layout = layout
        item = cache.element_size()
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).numpy()
        self.base, self.stride = cache.storage_offset() * item, cache.stride(0) * item
        self.data_bytes = layout.quantized_elements // (2 if layout.quantized_dtype == "e2m1" else 1) + 2 * layout.bf16_elements
        groups = -(-layout.quantized_elements // layout.elements_per_sf) if layout.quantized_dtype else 0
        self.sf_bytes = groups * (4 if layout.sf_format == "fp32" else 1)

    def fields(self, block: int, token: int) -> tuple[slice, slice]:
        start = self.base + block * self.stride
        if self.layout.token_interleaved:
            data = start + token * (self.data_bytes + self.sf_bytes)
            scales = data + self.data_bytes
        else:
            data = start + token * self.data_bytes
            scales = start + self.block_size * self.data_bytes + token * self.sf_bytes
        return slice(data, data + self.data_bytes), slice(scales, scales + self.sf_bytes)

    def read(self, block: int, token: int) -> tuple[np.ndarray, np.ndarray]:
        data, scales = self.fields(block, token)
        return self.bytes[data].copy(), self.bytes[scales].copy()

    def holds(self, slot: int) -> bool:
        return 0 <= slot < self.blocks * self.block_size

    def write(self, slot: int, bits: np.ndarray) -> None:
        at, beside = self.fields(slot // self.block_size, slot % self.block_size)
        self.bytes[at], self.bytes[beside] = encode(bits, self.layout)


def bits_of(rows: torch.Tensor, elements: int) -> np.ndarray:
    return rows.reshape(rows.shape[0], elements).view(torch.int16).numpy().view(np.uint16)


def encode(bits: np.ndarray, layout: Any) -> tuple[np.ndarray, np.ndarray]:
    """Data and scale bytes of one record."""
    if layout.quantized_dtype is None:
        return bits.view(np.uint8), np.empty(0, np.uint8)
    data, scales = codec.quantize(bits[None], layout)
    return data[0], scales[0]


def decode(data: np.ndarray, scales: np.ndarray, layout: Any) -> np.ndarray:
    """bf16 bits of one record."""
    if layout.quantized_dtype is None:
        return data.view(np.uint16)
    return codec.dequantize(data[None], scales[None], layout)[0]


def as_bf16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def store(kv: Any, kv_cache: Any, slot_mapping: Any, layout: Any) -> None:
    records = Records(kv_cache, layout)
    for token, slot in enumerate(slot_mapping.tolist()):
        if records.holds(slot):
            records.write(slot, bits_of(kv[token : token + 1], layout.elements)[0])


def load(kv_cache: Any, load_segments: Any, total_k: int, layout: Any, out: Any = None) -> KVCacheTensors:
    records = Records(kv_cache, layout)
    result = new_output(layout, total_k) if out is None else out if isinstance(out, tuple) else KVCacheTensors(out, None)
    for block, begin, end, offset in load_segments.tolist():
        for token in range(max(begin, 0), min(end, records.block_size)):
            row = offset + token - begin
            if 0 <= row < total_k:
                _load_row(records, block, token, result, row)
    return KVCacheTensors(*result)


def new_output(layout: Any, total_k: int) -> KVCacheTensors:
    if layout.quantized_dtype is None or layout.do_cast:
        return KVCacheTensors(torch.empty((total_k, layout.elements), dtype=torch.bfloat16), None)
    groups = -(-layout.quantized_elements // layout.elements_per_sf)
    if layout.quantized_dtype == "e4m3":
        kv = torch.empty((total_k, layout.elements), dtype=torch.float8_e4m3fn)
    else:
        kv = torch.empty((total_k, layout.elements // 2), dtype=torch.int8)
    if layout.sf_format == "ue8m0" and groups % 4 == 0:
        dtype, groups = torch.int32, groups // 4
    else:
        dtype = {"ue8m0": torch.uint8, "e4m3": torch.float8_e4m3fn, "fp32": torch.float32}[layout.sf_format]
    flat = groups == 1 and dtype in (torch.int32, torch.float32)
    return KVCacheTensors(kv, torch.empty((total_k,) if flat else (total_k, groups), dtype=dtype))


def _load_row(records: Records, block: int, token: int, result: KVCacheTensors, row: int) -> None:
    layout, valid = records.layout, 0 <= block < records.blocks
    if valid:
        data, scales = records.read(block, token)
    else:
        data, scales = np.zeros(records.data_bytes, np.uint8), np.zeros(records.sf_bytes, np.uint8)
    if result.sf is None:
        bits = decode(data, scales, layout) if valid else np.zeros(layout.elements, np.uint16)
        result.kv[row].view(-1).copy_(as_bf16(bits))
    else:
        result.kv[row].view(-1).copy_(torch.from_numpy(data).view(result.kv.dtype))
        result.sf[row].copy_(torch.from_numpy(scales).view(result.sf.dtype).reshape(result.sf[row].shape))


def load_slots(kv_cache: Any, slots: Any, layout: Any, out: Any = None) -> torch.Tensor:
    records = Records(kv_cache, layout)
    shape = (*slots.shape, layout.elements)
    result = torch.empty(shape, dtype=torch.bfloat16) if out is None else out
    for index in np.ndindex(*slots.shape):
        slot = int(slots[index])
        if records.holds(slot):
            bits = decode(*records.read(slot // records.block_size, slot % records.block_size), layout)
        else:
            bits = np.zeros(layout.elements, np.uint16)
        result[index].copy_(as_bf16(bits))
    return result


def convert_index(topk_idxs: Any, block_tables: Any, context_lens: Any, block_size: int) -> torch.Tensor:
    for b, q, k in np.ndindex(*topk_idxs.shape):
        token, slot = int(topk_idxs[b, q, k]), -1
        if k < int(context_lens[b, q]) and 0 <= token < block_tables.shape[1] * block_size:
            block = int(block_tables[b, token // block_size])
            slot = block * block_size + token % block_size
            slot = slot if block >= 0 and slot < 2**31 else -1
        topk_idxs[b, q, k] = slot
    return topk_idxs


def index_cat(left: Any, right: Any, total_k_swa_cached: int, total_k_swa_cur: int, out: Any = None) -> torch.Tensor:
    base, rows = total_k_swa_cached + total_k_swa_cur, left.shape[0]
    result = torch.empty((rows, left.shape[1] + right.shape[1]), dtype=torch.int32) if out is None else out
    for row in range(rows):
        moved = [to_int32(entry + base) if entry >= 0 else -1 for entry in right[row].tolist()]
        result[row].copy_(torch.tensor(left[row].tolist() + moved, dtype=torch.int32))
    return result


def expand_index(pivots: Any, width: int, out: Any = None) -> torch.Tensor:
    result = torch.empty((pivots.shape[0], width), dtype=torch.int32) if out is None else out
    for row, (offset1, len1, offset2, len2) in enumerate(pivots.tolist()):
        first = max(len1, 0)
        for column in range(width):
            beyond = column - first
            value = offset1 + column if beyond < 0 else offset2 + beyond if beyond < len2 else -1
            result[row, column] = to_int32(value)
    return result


def decode_index(kv_swa_index_offset_len: Any, window_size: int, swa_block_size: int, out: Any = None) -> torch.Tensor:
    count = kv_swa_index_offset_len.shape[0]
    result = torch.empty((count, window_size), dtype=torch.int32) if out is None else out
    for row, (start, length) in enumerate(kv_swa_index_offset_len.tolist()):
        for column in range(window_size):
            value = -1
            if start >= 0 and column < length:
                value = start - start % swa_block_size + (start % swa_block_size + column) % swa_block_size
            result[row, column] = to_int32(value)
    return result


def expand_plan(spans: Any, block_tables: Any, block_size: int, num_segments: int, out: Any = None) -> torch.Tensor:
    result = torch.empty((num_segments, 4), dtype=torch.int32) if out is None else out
    tables, found = block_tables.tolist(), spans.tolist()
    for segment in range(num_segments):
        row = (-1, 0, 0, 0)
        mine = [span for span in found if span[0] <= segment][-1:]
        for first_segment, first_row, table_row, begin, end in mine:
            column = begin // block_size + segment - first_segment
            tokens = range(max(begin, column * block_size), min(end, (column + 1) * block_size))
            if begin >= 0 and tokens.start < tokens.stop:
                known = 0 <= table_row < len(tables) and column < len(tables[table_row])
                ends = (tokens.start - column * block_size, tokens.stop - column * block_size)
                row = (tables[table_row][column] if known else -1, *ends, to_int32(first_row + tokens.start - begin))
        result[segment].copy_(torch.tensor(row, dtype=torch.int32))
    return result


def fused_store(
    kv: Any, cast_args: Any, norm_args: Any = None, rope_args: Any = None, hadamard_args: Any = None, out_args: Any = None
) -> torch.Tensor | None:
    layout = out_args.layout if out_args else _spelled(cast_args, kv.shape[1:].numel())
    tokens = kv.shape[0]
    slots = out_args.slot_mapping.tolist() if out_args else [-1] * tokens
    records = Records(out_args.kv_cache, layout) if out_args else None
    back = torch.empty((tokens, layout.elements), dtype=torch.bfloat16) if cast_args.cast_back else None
    for token, slot in enumerate(slots):
        wanted = records is not None and records.holds(slot)
        if wanted or back is not None:
            row = kv[token].reshape(-1).float().numpy()
            with np.errstate(all="ignore"):
                bits = _prepare(row, token, norm_args, rope_args, hadamard_args)
            if wanted:
                records.write(slot, bits)
            if back is not None:
                back[token] = as_bf16(decode(*encode(bits, layout), layout))
    return back


def _prepare(row: np.ndarray, token: int, norm: Any, rope: Any, hadamard: Any) -> np.ndarray:
    values = [F32(x) for x in row]
    if norm:
        values = stages.rms_norm(values, [F32(w) for w in norm.weight.float().numpy()], norm.eps)
    if rope:
        offset = len(values) - rope.rope_dim if rope.offset is None else rope.offset
        table = rope.cos_sin_cache.numpy()
        values = stages.rope(values, int(rope.positions[token]), table, rope.rope_dim, rope.is_neox_style, offset)
    if hadamard:
        values = stages.hadamard(values)
    return codec.round_bf16(np.array(values, F32))


def _spelled(cast: Any, elements: int) -> Any:
    from kvhal import KVCacheFormat

    if cast.fmt is None:
        return KVCacheFormat(None, 0, 0, elements, False, None, "")
    return KVCacheFormat(cast.fmt, elements, cast.num_per_channels, 0, True, cast.sf_format, "", token_interleaved=True)


ORACLE: dict[Op, Callable[..., Any]] = {
    Op.STORE: store,
    Op.LOAD: load,
    Op.LOAD_SLOTS: load_slots,
    Op.CONVERT_INDEX: convert_index,
    Op.INDEX_CAT: index_cat,
    Op.EXPAND_SWA_INDEX: expand_index,
    Op.DECODE_SWA_INDEX: decode_index,
    Op.EXPAND_LOAD_PLAN: expand_plan,
    Op.FUSED_STORE: fused_store,
}
