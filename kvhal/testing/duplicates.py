"""Stores in which several tokens share a slot: the record must be one writer's, or on a GPU made of its writers' bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from kvhal.layout import cache_geometry
from kvhal.testing.case import Call, Case


def accept_any_writer(
    case: Case, perform: Callable[[Call], Any], have: np.ndarray, need: np.ndarray, *, whole: bool = True
) -> list[str]:
    """Checks the shared records in `have`, then clears them on both sides, so that all bytes can be compared and hashed.

    Args:
        case: a store with duplicate slots.
        perform: the trusted implementation.
        have: the cache's allocation as the backend left it (uint8); changed.
        need: as the trusted implementation left it; changed.
        whole: the record must be one writer's; False where writers run at once, and each byte may be any of theirs.

    Returns:
        One text for each record that none of its writers would have left.
    """
    slots = case.build("cpu").arguments["slot_mapping"].tolist()
    writers: dict[int, list[int]] = defaultdict(list)
    for token, slot in enumerate(slots):
        writers[slot].append(token)
    problems = []
    for slot, tokens in writers.items():
        places = record_places(case, slot) if slot >= 0 and len(tokens) > 1 else None
        if places is None:
            continue
        records = [_store_alone(case, perform, token)[places] for token in tokens]
        equal = np.stack(records) == have[places]
        if not (equal.all(1).any() if whole else equal.any(0).all()):
            problems.append(f"slot {slot}: the record is not {'one' if whole else 'made of bytes'} of its writers', {tokens}")
        have[places] = need[places] = 0
    return problems


def _store_alone(case: Case, perform: Callable[[Call], Any], token: int) -> np.ndarray:
    call = case.build("cpu")
    only = slice(token, token + 1)
    arguments = {**call.arguments, "kv": call.arguments["kv"][only], "slot_mapping": call.arguments["slot_mapping"][only]}
    perform(Call(call.op, arguments, call.buffers))
    return call.buffers["kv_cache"].bytes()


def record_places(case: Case, slot: int) -> np.ndarray | None:
    """Positions of a record's bytes in the cache's allocation; None for a slot that is not in the cache."""
    call = case.build("cpu")
    cache, layout = call.arguments["kv_cache"], call.arguments["layout"]
    block, token = divmod(slot, cache.shape[1])
    if block >= cache.shape[0]:
        return None
    geometry = cache_geometry(layout, cache.shape[1], cache.stride(0) * cache.element_size())
    base = cache.data_ptr() - call.buffers["kv_cache"].storage.data_ptr() + block * geometry.block_stride
    data = base + token * geometry.data_token_stride + np.arange(layout.data_bytes)
    scales = base + geometry.sf_offset + token * geometry.sf_token_stride + np.arange(layout.sf_bytes)
    return np.concatenate([data, scales])
