"""The contract between the public operations and a backend: operations, requests, refusals, decisions, launchers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn

from kvhal.formats import KVCacheFormat, QuantizedDtype, ScaleFormat
from kvhal.platform import Platform
from kvhal.tuning import Table


class Op(StrEnum):
    """The public operations; the value is the public function's name."""

    STORE = "store_kv_cache"
    LOAD = "load_paged_kv_cache"
    LOAD_SLOTS = "load_kv_slots"
    CONVERT_INDEX = "convert_kv_index"
    INDEX_CAT = "kv_index_cat"
    EXPAND_SWA_INDEX = "expand_swa_index"
    DECODE_SWA_INDEX = "get_kv_swa_index_decode"
    EXPAND_LOAD_PLAN = "expand_load_plan"
    FUSED_STORE = "fused_norm_rope_hadamard_cast_store_kvcache"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(f"op: has {value!r}, needs one of {', '.join(cls)}")


#: operations whose kernels depend on a record format
FORMAT_OPS = (Op.STORE, Op.LOAD, Op.LOAD_SLOTS, Op.FUSED_STORE)
#: what a fused store can do to a record before it is quantised
STAGES = ("norm", "rope", "hadamard")


@dataclass(frozen=True)
class Reason:
    """One thing that keeps a backend from serving a request.

    Attributes:
        what: the thing that does not fit, such as "device", "architecture", "tilelang", "operation".
        have: what it is here.
        need: what it has to be.
        hint: a way out, may be empty.
    """

    what: str
    have: str
    need: str
    hint: str = ""


@dataclass(frozen=True)
class Request:
    """All that a decision depends on; no tensor in it.

    Attributes:
        op: the operation.
        layout: the record's format; None for index operations.
        platform: the machine and the tensors' device.
        block_size: tokens a block, where the caller knows it.
        stages: the stages of a fused store that are switched on, out of "norm", "rope", "hadamard".
    """

    op: Op
    layout: KVCacheFormat | None
    platform: Platform
    block_size: int | None = None
    stages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What one backend says to a request: its reasons, none when it can serve."""

    backend: str
    reasons: tuple[Reason, ...]
    simulated: bool = False

    @property
    def supported(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Decision:
    """Which backend serves a request, and what every candidate said.

    Attributes:
        request: the question.
        chosen: name of the backend, None when none serves.
        trace: one verdict a candidate, in order of preference.
        forced_by: what forced the choice ("use_backend", "configure", "KVHAL_BACKEND", a TOML file), None when free.
    """

    request: Request
    chosen: str | None
    trace: tuple[Verdict, ...]
    forced_by: str | None = None

    @property
    def simulated(self) -> bool:
        """The chosen backend runs through a functional simulator; never to be counted as a hardware result."""
        return any(verdict.simulated for verdict in self.trace if verdict.backend == self.chosen)

    def __str__(self) -> str:
        from kvhal.errors import describe  # errors.py formats Decisions and so imports this module

        return describe(self)


#: A launcher takes validated tensors (see "Launchers" below) and launches; it returns nothing.
Launcher = Callable[..., None]

# Launchers
# =========
# A backend serves an operation with one function, `bind(request) -> launcher`, called once per (operation, geometry, device)
# and cached by the caller. The launcher runs on every call: it must be thin, must not synchronise or allocate, and launches on
# the tensors' device (already made current by the caller where it was not) and its current stream. The public function has
# checked everything about shapes, dtypes, strides and devices; the launcher must only be safe on metadata VALUES.
#
# request.layout and request.block_size are static for a launcher; block counts, block strides, rows and tokens are dynamic.
# It may have attributes `prepare`, which makes what launches calls like one before, and `checks`, whether that looks at its
# tensors itself ("Host time" in docs/adding_a_backend.md). What is written shares no byte with another tensor of the call.
# Every tensor has inner stride 1 unless stated. "rows" marks a 2-d tensor whose row stride is free. Calls with nothing to write
# never come; a cache without blocks does, and so does an index table without columns.
#
# STORE             launch(kv, cache, slots)
#                   kv bf16 rows [n, elements]; cache as alloc_kv_cache returns it; slots int32|int64 contiguous [n]
# LOAD              launch(cache, segments, total_k, out, out_sf)
#                   segments int32 contiguous [s, 4]; out rows [>= total_k, elements] bf16, or raw data of layout's dtype
#                   (float8_e4m3fn [., elements] / int8 [., elements / 2]) for index layouts; out_sf as layout.sf_output says
#                   ([>= total_k] or rows [>= total_k, k]), None for main layouts. Rows outside [0, total_k) or outside the
#                   block are dropped; a block id outside [0, num_blocks) reads as zeros (data and scales).
# LOAD_SLOTS        launch(cache, slots, out)
#                   slots int32|int64 contiguous [n]; out bf16 rows [n, elements]; out-of-range slots read as zeros
# CONVERT_INDEX     launch(topk, block_tables, context_lens, block_size)
#                   topk int32 [b, q, k] any outer strides, in place; block_tables int32 rows [b, width];
#                   context_lens int32 [b, q], any strides. block_size is a run-time int: request.block_size is None
#                   A block id counts as out of range when it is negative or its slot does not fit int32.
# INDEX_CAT         launch(left, right, base, out)
#                   left int32 rows [r, wl]; right int32 rows [r, wr]; base int added to right's entries >= 0, negative ones
#                   become -1; out int32 rows [r, wl + wr]
# EXPAND_SWA_INDEX  launch(pivots, out)
#                   pivots int32 contiguous [n, 4]; out int32 rows [n, width]. A negative length counts as 0: with
#                   l1 = max(len1, 0), column c is offset1 + c where c < l1, offset2 + c - l1 where c - l1 < len2, else -1
# DECODE_SWA_INDEX  launch(offset_len, swa_block_size, out)
#                   offset_len int32 contiguous [n, 2]; out int32 rows [n, window_size]; start_slot < 0 gives a row of -1.
#                   Column j < valid_length is start - start % bs + (start % bs + j) % bs, computed in 64 bits
# EXPAND_LOAD_PLAN  launch(spans, block_tables, block_size, out)
#                   spans int32 contiguous [n, 5], perhaps none; block_tables int32 rows [rows, width]; out int32 contiguous
#                   [s, 4]; block_size is a run-time int. Segment j takes the last span whose first_segment <= j (any span, or
#                   none, where first_segment decreases). With c = begin // block_size + j - first_segment, its row is
#                   [block_tables[table_row, c] or -1 where the table has no such entry, max(begin - c * block_size, 0),
#                   min(end - c * block_size, block_size), first_row + max(c * block_size - begin, 0)], in 64 bits; it is
#                   [-1, 0, 0, 0] without a span, where begin < 0, and where src_begin >= src_end
# Integer results that do not fit int32 (hostile metadata only) keep their low 32 bits, on every backend.
# FUSED_STORE       launch(kv, norm, rope, hadamard, cache, slots, back)
#                   kv bf16|fp32 rows [n, elements]; norm NormArgs|None (weight contiguous [elements] bf16|fp32);
#                   rope RopeArgs|None (positions int32|int64 contiguous [n]; cos_sin_cache fp32 rows [max_position, rope_dim];
#                   a position out of range reads cos = sin = 0); hadamard HadamardArgs|None; cache and slots, both None when
#                   nothing is stored (request.layout holds the format then); back bf16 rows [n, elements] or None.


@dataclass(frozen=True)
class Backend:
    """A backend's manifest: who it is, what it needs, and where its operations are bound.

    Attributes:
        name: folder, config value and test id.
        runs_on: one line for tools.
        check: `check(request) -> reasons`, beyond what the manifest itself can tell; pure, never short-circuits.
        binders: operation -> "module:function", imported on the first bind; `function(request) -> Launcher`.
        simulator: it can run CPU tensors through a functional simulator.
        tuned: its launch shapes by architecture, for `kvhal doctor`; None for a backend that has none.
    """

    name: str
    runs_on: str
    check: Callable[[Request], tuple[Reason, ...]]
    binders: Mapping[Op, str] = field(default_factory=dict)
    simulator: bool = False
    tuned: Table | None = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"backend name has {self.name!r}, needs an identifier: a folder, a config value and a test id")
        for op, target in self.binders.items():
            if not isinstance(op, Op) or target.count(":") != 1:
                raise ValueError(f"backend {self.name}: binders has {op!r}: {target!r}, needs Op: 'module:function'")

    def why_not(self, request: Request) -> tuple[Reason, ...]:
        """Every reason why this backend cannot serve the request; empty means it can. Pure."""
        reasons = list(self.check(request))
        if request.op not in self.binders:
            reasons.append(Reason("operation", f"{request.op} not built yet in {self.name}", "an operation it has"))
        reasons += [reason for backend, reason in request.platform.failures if backend == self.name]
        return tuple(reasons)

    def simulates(self, request: Request) -> bool:
        """The request would run through this backend's functional simulator."""
        return self.simulator and request.platform.simulate and request.platform.kind == "cpu"

    def bind(self, request: Request) -> Launcher:
        """Imports the backend's module for the operation and returns the launcher.

        Raises:
            ImportError: the language or a module of the backend cannot be imported.
            BackendFailure: the backend found, on building, that it cannot serve; carries the Reason.
        """
        module, _, function = self.binders[request.op].partition(":")
        binder: Callable[[Request], Launcher] = getattr(importlib.import_module(module), function)
        return binder(request)


@dataclass(frozen=True, eq=False)
class NormArgs:
    """RMSNorm: ``x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        weight: bf16 or fp32 ``[elements]``, contiguous.
        eps: added to the mean square, >= 0.
    """

    weight: Any
    eps: float = 1e-6


@dataclass(frozen=True, eq=False)
class RopeArgs:
    """Rotary embedding of ``rope_dim`` elements of the record, starting at ``offset``.

    Args:
        positions: int32 or int64 ``[n]``; a position outside the cache reads cos = sin = 0.
        cos_sin_cache: fp32 ``[max_position, rope_dim]``, the cosines of a position first, then its sines.
        rope_dim: rotated elements, even.
        is_neox_style: pairs are (i, i + rope_dim / 2) when True, (2i, 2i + 1) when False.
        offset: first rotated element; None rotates the last ``rope_dim`` elements of the record (launchers get it as it is).
    """

    positions: Any
    cos_sin_cache: Any
    rope_dim: int
    is_neox_style: bool = False
    offset: int | None = None

    def first(self, elements: int) -> int:
        """First rotated element of a record of `elements`."""
        return elements - self.rope_dim if self.offset is None else self.offset


@dataclass(frozen=True)
class HadamardArgs:
    """Normalised Walsh-Hadamard transform over the whole record (a power-of-two element count)."""


@dataclass(frozen=True)
class CastArgs:
    """What the cast produces; must agree with the cache's layout.

    Args:
        fmt: "e4m3", "e2m1", or None for bf16 records.
        num_per_channels: elements a scale factor, 0 for bf16 records.
        round_sf: scales are rounded up to powers of two; True exactly when sf_format is "ue8m0".
        sf_format: "ue8m0", "e4m3", "fp32", or None for bf16 records.
        cast_back: return the dequantised bf16 rows, padding rows too.
    """

    fmt: QuantizedDtype | None
    num_per_channels: int
    round_sf: bool
    sf_format: ScaleFormat | None
    cast_back: bool = False

    @classmethod
    def for_layout(cls, layout: KVCacheFormat, cast_back: bool = False) -> CastArgs:
        """The arguments that agree with `layout`."""
        scale = layout.sf_format
        return cls(layout.quantized_dtype, layout.elements_per_sf, scale == "ue8m0", scale, cast_back)


@dataclass(frozen=True, eq=False)
class KVCacheOutArgs:
    """Where a fused store writes: a paged cache, and one slot a token (see `store_kv_cache`).

    Args:
        kv_cache: ``[num_blocks, block_size, 1, bytes_per_token]``, as of `store_kv_cache`.
        slot_mapping: int32 or int64 ``[n]``.
        layout: the cache's format; None infers a built-in one.
    """

    kv_cache: Any
    slot_mapping: Any
    layout: KVCacheFormat | None = None
