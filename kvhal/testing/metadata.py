"""Index tensors for tests: valid, and hostile in every way that a broken engine may find."""

from __future__ import annotations

import numpy as np

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
LARGE_BLOCK = 3  #: larger blocks get fewer hostile segments: an interpreter walks each token of a block
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def hostile_slots(capacity: int, wide: bool) -> list[int]:
    """Slots that address nothing; the 64-bit ones address block 0 when they are cut to 32 bits."""
    narrow = [-1, -1, -1, -1, -5, INT32_MIN, capacity, capacity + 1, INT32_MAX, INT32_MIN + 1, -capacity, 2 * capacity]
    return narrow + ([2**32, 2**32 + 1, -(2**32), INT64_MIN, INT64_MAX, 2**40, 2**31] if wide else [])


def slots(rng: np.random.Generator, capacity: int, valid: int, wide: bool, *, unique: bool) -> np.ndarray:
    """`valid` good slots (the first and the last one among them) and all hostile ones, shuffled in runs.

    Args:
        rng: random numbers.
        capacity: slots of the cache.
        valid: good slots wanted; fewer when the cache has fewer and `unique`.
        wide: int64 instead of int32.
        unique: no good slot twice.
    """
    edges = [0, capacity - 1] if capacity else []
    if unique:
        good = list(dict.fromkeys([*edges, *rng.permutation(capacity).tolist()]))[:valid]
    else:
        good = [*edges, *rng.integers(0, capacity, valid).tolist()] if capacity else []
    runs = [*([slot] for slot in good), [-1] * 5, *([slot] for slot in hostile_slots(capacity, wide))]
    order = rng.permutation(len(runs))
    mixed = np.concatenate([np.array(runs[i], np.int64) for i in order])
    return mixed if wide else mixed.astype(np.int32)


def rows_of_segment(segment: tuple[int, int, int, int], block_size: int, total_k: int) -> range:
    """Output rows that one segment may write, in exact integers: inside its block, inside the output."""
    _, begin, end, offset = segment
    low = max(begin, 0, begin - offset)
    high = min(end, block_size, total_k + begin - offset)
    return range(offset + low - begin, offset + high - begin) if high > low else range(0)


def hostile_segments(num_blocks: int, block_size: int, total_k: int) -> list[tuple[int, int, int, int]]:
    """Segments that are wrong in one or several fields."""
    last = num_blocks - 1
    return [
        (0, 1, 0, 0),
        (last, block_size, block_size + 3, 1),
        (0, INT32_MAX - 1, INT32_MAX, 0),
        (0, INT32_MIN, INT32_MIN + 4, 0),
        (0, INT32_MIN, INT32_MAX, INT32_MAX),
        (0, 0, block_size, total_k),
        (0, 0, block_size, INT32_MAX),
        (0, 0, block_size, INT32_MAX - 1),
        (last, 0, block_size, -block_size),
        (0, 0, block_size, INT32_MIN),
        (0, 0, INT32_MIN, 0),
        (0, INT32_MAX, INT32_MIN, 0),
        (-1, 5, 2, 0),
        (-1, 0, block_size, total_k + 5),
        (INT32_MIN, 0, block_size, -block_size - 1),
        (INT32_MAX, 0, block_size, INT32_MAX),
        (num_blocks, 0, -1, 0),
        (-7, -4, 0, 0),
        (0, INT32_MIN, min(block_size, 2), INT32_MIN + total_k - 2),  # in range again in exact arithmetic
        (0, -3, min(block_size, 2), total_k - 4),  # rows -3..-1 are dropped, the rest lands at the output's end
    ]


def segments(
    rng: np.random.Generator, num_blocks: int, block_size: int, count: int, *, cover: bool, hostile: bool
) -> tuple[np.ndarray, int]:
    """A load plan whose segments write disjoint rows, in shuffled order.

    Args:
        rng: random numbers.
        num_blocks, block_size: of the cache.
        count: good segments.
        cover: no row of the output stays uncovered.
        hostile: mix in `hostile_segments` and random wrong ones (a third of them in large blocks), as far as they overlap no
            other segment's rows.

    Returns:
        int32 ``[s, 4]`` and total_k.
    """
    plan: list[tuple[int, int, int, int]] = []
    cursor = 0
    ids = [-1, -7, num_blocks, INT32_MAX, INT32_MIN]
    for index in range(count):
        begin = int(rng.integers(0, block_size))
        end = int(rng.integers(begin, min(block_size, begin + 9))) + 1
        block = int(rng.integers(0, num_blocks)) if num_blocks and index % 4 else ids[index // 4 % len(ids)]
        cursor += 0 if cover else int(rng.integers(0, 3))
        plan.append((block, begin, end, cursor))
        cursor += end - begin
    total_k = cursor if cover else cursor + 6
    if hostile:
        used = {row for segment in plan for row in rows_of_segment(segment, block_size, total_k)}
        extras = hostile_segments(num_blocks, block_size, total_k) + _random_segments(rng, num_blocks, block_size, total_k)
        for extra in _some(rng, extras, len(extras) if block_size <= LARGE_BLOCK else len(extras) // 3):
            rows = rows_of_segment(extra, block_size, total_k)
            if len(rows) < 64 and not used.intersection(rows):
                used.update(rows)
                plan.append(extra)
    order = rng.permutation(len(plan))
    return np.array(plan, np.int32).reshape(-1, 4)[order], total_k


def _some(rng: np.random.Generator, segments: list[tuple[int, int, int, int]], count: int) -> list[tuple[int, int, int, int]]:
    return [segments[index] for index in sorted(rng.permutation(len(segments))[:count])]


def _random_segments(
    rng: np.random.Generator, num_blocks: int, block_size: int, total_k: int
) -> list[tuple[int, int, int, int]]:
    edges = [0, 1, -1, -2, block_size - 1, block_size, block_size + 1, INT32_MAX, INT32_MIN]
    offsets = [*edges, total_k - 1, total_k]
    blocks = [0, num_blocks - 1, num_blocks, -1, -2, INT32_MAX, INT32_MIN]
    draws = [(rng.choice(blocks), rng.choice(edges), rng.choice(edges), rng.choice(offsets)) for _ in range(12)]
    return [(int(block), int(begin), int(end), int(offset)) for block, begin, end, offset in draws]
