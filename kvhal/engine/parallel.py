"""Context parallelism: the ranks of a process group share the queries of each prefill chunk.

Every rank gets the same calls. Of each chunk it computes the rows that `plan.mirror_cp_index` gives it: projections, attention,
indexer and feed-forward. What later queries need of other ranks' rows is all-gathered and put back in the chunk's order:
the sliding window's records of every layer (bf16, before they are quantised), the hidden rows of source layers (fp32, a group
may span two ranks), and at the end the logits. Each rank then stores all of it in caches of its own.

So computation is sharded and caches are not: behind each chunk every rank's caches, pending states and logits are those of one
process, to the last byte, and any rank can decode alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from kvhal import plan
from kvhal.engine.metadata import PrefillMetadata


class ContextParallel:
    """A process group whose ranks share prefills.

    Args:
        group: of `torch.distributed`; None for all processes. Its backend must reach the engine's device.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def share(self, step: PrefillMetadata, lengths: list[int]) -> PrefillMetadata:
        """The step with this rank's queries: padding rows see nothing and are in no gathered order.

        Args:
            step: the whole chunk, on the CPU.
            lengths: tokens of each sequence in it.
        """
        rows = plan.mirror_cp_index(lengths, self.size)[self.rank].long()
        real = (rows >= 0).to(torch.int32)[:, None]  # the others get lengths of 0 and empty ranges: they see nothing
        rows = rows.clamp(min=0)
        return replace(
            step,
            tokens=step.tokens[rows],
            positions=step.positions[rows],
            swa_pivots=step.swa_pivots[rows] * real,
            visible_begin=step.visible_begin[rows] * real,
            visible_end=step.visible_end[rows] * real,
            order=plan.mirror_cp_reverse_index(lengths, self.size).long(),
        )

    def gather(self, rows: Tensor, order: Tensor) -> Tensor:
        """All ranks' rows in the chunk's order, without padding.

        Args:
            rows: ``[rows, .]``, this rank's; as many on every rank.
            order: the step's.

        Returns:
            ``[n, .]``, the same on every rank.
        """
        gathered = rows.new_empty((self.size, *rows.shape))
        dist.all_gather(list(gathered.unbind(0)), rows.contiguous(), self.group)
        return gathered.flatten(0, 1)[order]
