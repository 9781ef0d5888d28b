"""Host-side planning: which bytes of a paged cache an operation touches, decided once per step for all layers.

Every function takes a whole batch at once and works in numpy without a Python loop per token, block or sequence. Batch
arguments are numpy arrays, torch CPU tensors or plain sequences of integers; results are torch CPU tensors, ready to be
copied to the device. Given a `device`, the builders of load plans leave theirs there, and a block table is read there.
Everywhere ``b`` is the number of sequences, ``seqlens_k[i]`` counts the tokens of sequence i including the chunk being
processed, ``seqlens_q[i]`` counts the tokens of that chunk, and chunk tokens of all sequences are concatenated in batch
order (token j of sequence i is row ``cu_seqlens_q[i] + j``, at position ``seqlens_k[i] - seqlens_q[i] + j`` of its
sequence).

A wrong argument raises ``TypeError`` (not integers) or ``ValueError`` (everything else); the message names the
argument, what it has and what it needs.
"""

from kvhal.plan.parallel import mirror_cp_index, mirror_cp_reverse_index
from kvhal.plan.segments import (
    BlockLoadPlanBuilder,
    CompressedLoadPlan,
    LoadPlan,
    build_compressed_load_plan,
    build_swa_load_plan,
)
from kvhal.plan.slots import (
    build_compressed_slot_mapping,
    build_decode_swa_index,
    build_paged_slot_mapping,
    build_prefill_swa_pivots,
    build_swa_slot_mapping,
)

__all__ = [
    "BlockLoadPlanBuilder",
    "CompressedLoadPlan",
    "LoadPlan",
    "build_compressed_load_plan",
    "build_compressed_slot_mapping",
    "build_decode_swa_index",
    "build_paged_slot_mapping",
    "build_prefill_swa_pivots",
    "build_swa_load_plan",
    "build_swa_slot_mapping",
    "mirror_cp_index",
    "mirror_cp_reverse_index",
]
