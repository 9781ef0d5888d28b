"""Context parallelism: which chunk tokens each rank computes, and the way back.

Attention is causal, so late tokens cost more than early ones. Each sequence is cut into ``2 * cp_size`` equal chunks
(the end padded) and rank r takes chunks r and ``2 * cp_size - 1 - r``: an early and a late one, equal work everywhere.
"""

from __future__ import annotations

import numpy as np
import torch

from kvhal.plan import inputs
from kvhal.plan.inputs import Ints, IntVector


def mirror_cp_index(seqlens_q: IntVector, cp_size: int) -> torch.Tensor:
    """The rows of the concatenated chunk that each rank computes; -1 marks padding.

    A rank's row order is: sequence after sequence, of each its early chunk, then its late one.

    seqlens_q: [b] tokens of each sequence in this step.
    Returns int32 [cp_size, rows]; rank r uses row r. rows is the sum over sequences of
    ``2 * ceil(seqlens_q[i] / (2 * cp_size))``, the same for every rank.
    """
    cp_size = inputs.scalar("cp_size", cp_size)
    lengths, size, base, rows = _chunks(seqlens_q, cp_size)
    sequence = np.repeat(np.arange(len(lengths)), 2 * size)
    row = np.arange(rows) - base[sequence]
    late = row >= size[sequence]
    rank = np.arange(cp_size)[:, None]
    chunk = np.where(late, 2 * cp_size - 1 - rank, rank)
    position = chunk * size[sequence] + row - late * size[sequence]
    index = np.where(position < lengths[sequence], position + inputs.starts_of(lengths)[sequence], -1)
    return torch.from_numpy(index.astype(np.int32))


def mirror_cp_reverse_index(seqlens_q: IntVector, cp_size: int) -> torch.Tensor:
    """Where each row of the concatenated chunk is among the rows all-gathered from the ranks, rank after rank.

    ``gathered[mirror_cp_reverse_index(...)]`` is in the original order, without padding; equally
    ``mirror_cp_index(...).flatten()[reverse[t]] == t``.

    seqlens_q: [b] as given to `mirror_cp_index`. Returns int32 [sum(seqlens_q)].
    """
    cp_size = inputs.scalar("cp_size", cp_size)
    lengths, size, base, rows = _chunks(seqlens_q, cp_size)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(int(lengths.sum())) - inputs.starts_of(lengths)[sequence]
    chunk, offset = np.divmod(position, size[sequence])
    late = chunk >= cp_size
    rank = np.where(late, 2 * cp_size - 1 - chunk, chunk)
    index = rank * rows + base[sequence] + late * size[sequence] + offset
    return torch.from_numpy(index.astype(np.int32))


def _chunks(seqlens_q: IntVector, cp_size: int) -> tuple[Ints, Ints, Ints, int]:
    """Lengths [b], chunk sizes [b], each sequence's first row in a rank [b], rows of a rank."""
    lengths = inputs.vector("seqlens_q", seqlens_q)
    size = -(-lengths // (2 * cp_size))
    rows = int(2 * size.sum())
    if rows * cp_size > inputs.INT32_MAX:
        raise ValueError(
            f"seqlens_q has {rows * cp_size} padded tokens in total for cp_size {cp_size}, needs at most"
            f" {inputs.INT32_MAX}; split the batch"
        )
    return lengths, size, inputs.starts_of(2 * size), rows
