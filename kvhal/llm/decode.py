"""One token a step for a whole batch: static shapes, all state on the device, nothing read on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

import kvhal
from kvhal.llm.cache import BlockTables, PagedCache
from kvhal.llm.errors import LLMError
from kvhal.llm.model import Model, grouped_attention

MIN_WIDTH = 128  #: positions a step reads at least; wider steps double it, so that there are few shapes and few graphs


class DecodeBatch:
    """Sequences that are decoded together.

    A step takes `tokens`, writes their records, attends through the cache and puts the likeliest next tokens in their place.
    The device advances on its own; the host only knows how long the longest sequence is, which it needs for the shape.

    Args:
        model: the model.
        cache: holds the sequences' records so far.
        tables: their block tables, with room for every step to come.
        lengths: tokens of each sequence in the cache.
        tokens: each sequence's next token.
        graph: replay the step as a CUDA graph; one is captured for each width on first use.

    Attributes:
        tokens: int64 ``[b]``, the tokens that the next step takes; may be overwritten.
        logits: fp32 ``[b, vocabulary]`` of the last step.

    Raises:
        LLMError: `graph` on a device without CUDA graphs.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        tables: BlockTables,
        lengths: Sequence[int],
        tokens: Tensor,
        *,
        graph: bool = False,
    ) -> None:
        if graph and not can_capture(model.device):
            raise LLMError(f"graph: has device {model.device}, needs one with CUDA graphs")
        self._model, self._cache, self._graph = model, cache, graph
        self._tables = torch.from_numpy(tables).to(model.device)
        self._columns = torch.arange(tables.shape[1] * cache.block_size, dtype=torch.int32, device=model.device)
        self._positions = torch.tensor(list(lengths), dtype=torch.int64, device=model.device)
        self._longest = max(lengths)
        self._replays: dict[int, Callable[[], None]] = {}
        self.tokens = tokens.to(model.device, torch.int64).clone()
        self.logits = torch.empty((len(lengths), model.config.vocabulary), dtype=torch.float32, device=model.device)

    def step(self) -> None:
        """Decodes one token of every sequence.

        Raises:
            LLMError: the longest sequence has no room left.
        """
        width = self._width(self._longest)
        if self._graph:
            if width not in self._replays:
                self._replays[width] = self._capture(width)
            self._replays[width]()
        else:
            self._compute(width)
        self._longest += 1

    def prepare(self, steps: int) -> None:
        """Captures the graphs of the next `steps` steps, so that none of them has to wait for one.

        Raises:
            LLMError: the longest sequence has no room for that many.
        """
        if self._graph:
            for width in sorted({self._width(self._longest + step) for step in range(steps)} - self._replays.keys()):
                self._replays[width] = self._capture(width)

    def _width(self, longest: int) -> int:
        """Positions that a step reads when the longest sequence has so many tokens before it."""
        room = len(self._columns)
        if longest >= room:
            raise LLMError(f"cache: a sequence has {longest} tokens, its block table has room for {room}")
        width = MIN_WIDTH
        while width <= longest:
            width *= 2
        return min(width, room)

    def _compute(self, width: int) -> None:
        """One step over the first `width` positions of every sequence."""
        model, cache, batch = self._model, self._cache, len(self.tokens)
        slots = self._columns[:width].repeat(batch, 1, 1)
        context_lens = (self._positions + 1).to(torch.int32).unsqueeze(1)
        kvhal.convert_kv_index(slots.view(batch, 1, width), self._tables, context_lens, cache.block_size)
        slots = slots.view(batch, width)
        own = slots.gather(1, self._positions.unsqueeze(1)).view(batch)
        visible = (slots >= 0).unsqueeze(1)

        def attend(layer: int, queries: Tensor, records: Tensor) -> Tensor:
            cache.store(layer, records, own)
            context = cache.load_slots(layer, slots)
            return grouped_attention(queries.unsqueeze(1), context, visible, model.config).squeeze(1)

        self.logits.copy_(model.logits(model.hidden(self.tokens, self._positions, attend)))
        self.tokens.copy_(self.logits.argmax(-1))
        self._positions.add_(1)

    def _capture(self, width: int) -> Callable[[], None]:
        """The step as a graph. A first, ordinary run compiles what is missing; its effect on the state is undone."""
        device = torch.get_device_module(self._model.device)
        state = self.tokens.clone(), self._positions.clone()
        run = partial(self._compute, width)
        side, main = device.Stream(), device.current_stream()
        side.wait_stream(main)
        with device.stream(side):
            run()
        main.wait_stream(side)
        self.tokens.copy_(state[0])
        self._positions.copy_(state[1])
        graph = device.CUDAGraph()
        with device.graph(graph):
            run()
        replay: Callable[[], None] = graph.replay
        return replay


def can_capture(device: torch.device) -> bool:
    """The device records graphs."""
    return hasattr(torch.get_device_module(device), "CUDAGraph")
