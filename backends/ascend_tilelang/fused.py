"""fused_norm_rope_hadamard_cast_store_kvcache: a row stays on the core from its first fp32 value to its record.

The stages are run-time switches, so that one kernel a record serves every combination of them, and both input dtypes.
"""

from typing import Any

import torch
from tilelang.ascend import language as T

from kvhal.backends.ascend_tilelang.addressing import divided, slot_at, wide
from kvhal.backends.ascend_tilelang.codec import choose, pinned, rounded_bf16
from kvhal.backends.ascend_tilelang.compiling import Compiler, compiler_of
from kvhal.backends.ascend_tilelang.load import decode_codes
from kvhal.backends.ascend_tilelang.record import Record, fused_record_of, record_views, slot_words
from kvhal.backends.ascend_tilelang.stages import LANES, hadamard, padded, read_row, rms_norm, rope
from kvhal.backends.ascend_tilelang.store import quantise_group
from kvhal.backends.ascend_tilelang.transfer import assume_pairs, write_codes, write_elements, write_scale
from kvhal.formats import KVCacheFormat
from kvhal.interface import HadamardArgs, Launcher, NormArgs, Request, RopeArgs

_ROW_BYTES = 128 * 1024  #: of the unified buffer, for rows


def rows_at_once(elements: int) -> int:
    """Rows that a core works on together: as many as it has threads and room for, at most 8."""
    return max(1, min(8, _ROW_BYTES // (4 * padded(elements))))


@T.macro
def write_record(
    x: Any, place: Any, lane: Any, record: Record, data: Any, sf: Any, slot: Any, tokens: Any, back: Any, row: Any, send: Any
) -> None:
    """Rounds and quantises `x[place, :]`, one group a lane at a time; stores it where slot >= 0, and returns it
    dequantised in `back[row, :]` where `send` is 1."""
    for turn in T.serial((record.groups + LANES - 1) // LANES):
        group = pinned(turn * LANES + lane)
        if group < record.groups:
            bits = T.alloc_local((record.group,), "int32")
            for i in T.serial(record.group):
                bits[i] = 0
                if not record.ragged or group * record.group + i < record.elements:
                    bits[i] = rounded_bf16(x[place, group * record.group + i])
            block, token = divided(T.max(slot, 0), tokens, "int64")
            if record.dtype == "bf16":
                if slot >= 0:
                    for i in T.serial(record.group):
                        data[block, token, group * record.group + i] = T.cast(bits[i], "int16")
            else:
                stored = quantise_group(bits, record)
                if slot >= 0:
                    write_scale(sf, block, token, group, stored, record)
                    write_codes(data, block, token, group, bits, record)
                if send == 1:
                    decode_codes(bits, record, stored)
            if send == 1:
                write_elements(back, row, group, bits, record, False)


def fused_kernel(record: Record) -> Any:
    """Kernel of FUSED_STORE. Tensors of either width come as halves or words, with the number of them an element."""
    n, kv_width, weights, ids, slot_count = (T.dynamic(s) for s in ("n", "kv_width", "weights", "ids", "slot_count"))
    blocks, tokens, positions, rope_dim, backs = (T.dynamic(s) for s in ("blocks", "tokens", "positions", "rope_dim", "backs"))
    steps = ("kv_step", "angle_step", "back_step", "data_step", "sf_step")
    kv_step, angle_step, back_step, data_step, sf_step = (T.dynamic(s, "int64") for s in steps)
    elements, together = record.elements, rows_at_once(record.elements)

    @T.prim_func
    def fused_store(
        kv: T.StridedTensor((n, kv_width), (kv_step, 1), "int16"),
        weight: T.Tensor((weights,), "int16"),
        position_ids: T.Tensor((ids,), "int32"),
        angles: T.StridedTensor((positions, rope_dim), (angle_step, 1), "float32"),
        slots: T.Tensor((slot_count,), "int32"),
        data: T.StridedTensor((blocks, tokens, record.data_units), (data_step, record.data_stride, 1), record.unit_type),
        sf: T.StridedTensor((blocks, tokens, record.sf_bytes), (sf_step, record.sf_stride, 1), "uint8"),
        back: T.StridedTensor((backs, elements), (back_step, 1), "int16"),
        kv_halves: T.int32,
        weight_halves: T.int32,
        eps: T.float32,
        id_words: T.int32,
        neox: T.int32,
        first: T.int32,
        transform: T.int32,
        slot_step: T.int32,
        cores: T.int32,
    ):
        with T.Kernel(cores) as core, T.SimtVF(threads=LANES * together):
            assume_pairs(kv_step, data_step, record, False)
            x = T.alloc_shared((together, elements), "float32")
            sums = T.alloc_shared((together, LANES), "float32")
            place, lane = divided(T.get_thread_binding(), LANES, "int32")
            for trip in T.serial(T.truncdiv(T.max(n - core * together, 0) + cores * together - 1, cores * together)):
                row = pinned(wide(trip) * cores * together + core * together + place, "int64")
                active = pinned(choose(row < wide(n), 1, 0))
                if active == 1:
                    read_row(x, place, lane, kv, row, kv_halves, elements)
                T.sync_threads()
                if weight_halves > 0:
                    rms_norm(x, sums, place, lane, weight, weight_halves, eps, elements)
                    T.sync_threads()
                if id_words > 0:
                    if active == 1:
                        position = slot_at(position_ids, row, id_words)
                        rope(x, place, lane, angles, position, positions, T.truncdiv(rope_dim, 2), neox, first)
                    T.sync_threads()
                if record.transformable and transform == 1:
                    hadamard(x, place, lane, elements)
                    T.sync_threads()
                if active == 1:
                    slot = T.alloc_var("int64", init=T.int64(-1))
                    if slot_step > 0:
                        slot = slot_at(slots, row, slot_step)
                        if slot >= wide(blocks) * tokens:
                            slot = T.int64(-1)
                    write_record(x, place, lane, record, data, sf, slot, tokens, back, row, choose(backs > 0, 1, 0))
                T.sync_threads()  # the next trip overwrites the rows

    return fused_store


def bind_fused_store(request: Request) -> Launcher:
    """Launcher of FUSED_STORE; the contract is in `kvhal.interface`."""
    layout = request.layout
    if layout is None:
        raise ValueError(f"request.layout: has None, {request.op} needs a KVCacheFormat")
    return _FusedStore(compiler_of(request), layout)


class _FusedStore:
    """Launcher of one record format. Stages that are off get empty tensors, made once a device."""

    def __init__(self, compiler: Compiler, layout: KVCacheFormat) -> None:
        self._compiler, self._layout, self._record = compiler, layout, fused_record_of(layout)
        self._absent: dict[torch.device, dict[str, torch.Tensor]] = {}

    def __call__(
        self,
        kv: torch.Tensor,
        norm: NormArgs | None,
        rotary: RopeArgs | None,
        transform: HadamardArgs | None,
        cache: torch.Tensor | None,
        slots: torch.Tensor | None,
        back: torch.Tensor | None,
    ) -> None:
        absent = self._absent.get(kv.device) or self._empty(kv.device)
        if cache is None or slots is None or cache.shape[0] == 0:
            cache = slots = None
        if cache is None:
            data, sf = absent["data"], absent["sf"]
        elif self._record.dtype == "bf16":
            data = cache[:, :, 0].view(torch.int16)
            sf = data[:, :, :0].view(torch.uint8)
        else:
            data, sf = record_views(cache, self._layout, self._record.unit)
        self._compiler.kernel(fused_kernel, self._record)(
            kv.view(torch.int16),
            absent["halves"] if norm is None else norm.weight.view(torch.int16),
            absent["words"] if rotary is None else slot_words(rotary.positions),
            absent["angles"] if rotary is None else rotary.cos_sin_cache,
            absent["words"] if slots is None else slot_words(slots),
            data,
            sf,
            absent["back"] if back is None else back.view(torch.int16),
            kv.element_size() // 2,
            0 if norm is None else norm.weight.element_size() // 2,
            0.0 if norm is None else norm.eps,
            0 if rotary is None else rotary.positions.element_size() // 4,
            int(rotary is not None and rotary.is_neox_style),
            0 if rotary is None else rotary.first(self._layout.elements),
            int(transform is not None),
            0 if slots is None else slots.element_size() // 4,
            self._compiler.cores,
        )

    def _empty(self, device: torch.device) -> dict[str, torch.Tensor]:
        record = self._record
        unit = torch.uint8 if record.unit_type == "uint8" else getattr(torch, record.unit_type)

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            # One element each: a tensor without any has no address, which the runtime refuses.
            return torch.zeros(shape, dtype=dtype, device=device)

        shapes = {
            "halves": empty((1,), torch.int16),
            "words": empty((1,), torch.int32),
            "angles": empty((1, 2), torch.float32),
            "data": empty((1, 1, record.data_stride), unit)[:0, :, : record.data_units],
            "sf": empty((1, 1, record.sf_stride), torch.uint8)[:0, :, : record.sf_bytes],
            "back": empty((1, record.elements), torch.int16)[:0],
        }
        self._absent[device] = shapes
        return shapes
