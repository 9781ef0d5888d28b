"""What the source layer of a shared-KV group hands to its consumers within one step."""

from __future__ import annotations

from torch import Tensor


class CrossLayerRuntime:
    """Carries a source layer's results to the layers behind it, so that they are made once a group.

    In prefill `kv` is the buffer ``[SWA history | this chunk | compressed]``, whose first two parts every layer refills with
    its own window while the compressed part stays, and `index` the table of buffer rows that each query attends to
    (sliding window, then picks). In decode `kv` is the source's compressed cache and `index` the picked slots.
    """

    def __init__(self) -> None:
        self._source: int | None = None
        self._kv: Tensor | None = None
        self._index: Tensor | None = None

    def publish(self, source: int, kv: Tensor, index: Tensor) -> None:
        """Called by the source layer, once a step; replaces what the previous group left."""
        self._source, self._kv, self._index = source, kv, index

    def of(self, source: int) -> tuple[Tensor, Tensor]:
        """(kv, index) of the group whose source is layer `source`.

        Raises:
            RuntimeError: that layer has not run in this step, or another group's source ran since.
        """
        if self._source != source or self._kv is None or self._index is None:
            raise RuntimeError(f"layer {source} has not published its cache, last was {self._source}: run layers in order")
        return self._kv, self._index
