"""What a model is and how its caches are laid out: values only, no device and no kernel in it."""

from __future__ import annotations

from dataclasses import dataclass

from kvhal.formats import MXFP8_INDEX_KV_FORMAT, V41_FORMAT, KVCacheFormat

BYTE_TOKENS = 256
BOS = BYTE_TOKENS  #: first token of every prompt; the one special token
VOCABULARY = BYTE_TOKENS + 1

#: indexer keys kept as bf16: what a model without quantisation stores
BF16_INDEX_FORMAT = KVCacheFormat(None, 0, 0, 128, False, None, "indexer keys, plain bf16")


@dataclass(frozen=True)
class EngineConfig:
    """A small MLA decoder and its caches.

    Visibility. A query at position p sees, in every layer, the records of positions ``(p - window_size, p]`` through the
    sliding window, and at most `top_k` compressed records that the indexer picks among the complete groups, those with
    ``(g + 1) * ratio <= p + 1`` for group g. The two overlap: a group inside the window is seen as itself and, when
    picked, once more as its pooled record.

    Args:
        num_layers: decoder layers.
        layers_per_group: consecutive layers that share one compressed cache. The first, the source, pools, stores,
            indexes and loads it; the others, its consumers, reuse the source's records and the indexer's picks.
        hidden_size, ffn_size, num_heads, index_heads: widths of the model.
        rope_dim: rotary elements, the last ones of a main record and of an indexer key; even.
        window_size: positions a query sees through the sliding window, itself included.
        swa_block_size: tokens of a ring block, >= window_size.
        ratio: tokens pooled into one compressed record.
        block_size: source tokens a block stands for, a multiple of ratio; it holds ``block_size // ratio`` records.
        top_k: compressed records a query attends to, at most.
        max_seq_len: tokens a sequence may have.
        max_batch: sequences alive at a time.
        num_blocks: blocks that all sequences share; None is enough for max_batch sequences of max_seq_len.
        swa_format, main_format: records of the sliding window and of the compressed cache, of one element count.
        index_format: records of the indexer's keys; a power of two of elements (Hadamard).
        norm_eps, rope_base: constants of the model.
        seed: of the weights.
        accumulate: "float64" sums every dot product exactly (see `kvhal.engine.arithmetic`); "float32" is for devices
            without float64: sums are then rounded in the library's order, and logits are equal to rounding only.

    Raises:
        ValueError: the fields contradict each other; the message names the field and what would be valid.
    """

    num_layers: int = 4
    layers_per_group: int = 2
    hidden_size: int = 128
    ffn_size: int = 256
    num_heads: int = 2
    index_heads: int = 2
    rope_dim: int = 64
    window_size: int = 64
    swa_block_size: int = 64
    ratio: int = 4
    block_size: int = 64
    top_k: int = 32
    max_seq_len: int = 2048
    max_batch: int = 4
    num_blocks: int | None = None
    swa_format: KVCacheFormat = V41_FORMAT
    main_format: KVCacheFormat = V41_FORMAT
    index_format: KVCacheFormat = MXFP8_INDEX_KV_FORMAT
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    seed: int = 0
    accumulate: str = "float64"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} has {value!r}, needs an int >= 1")
        if self.num_blocks is not None and (type(self.num_blocks) is not int or self.num_blocks < 0):
            raise ValueError(f"num_blocks has {self.num_blocks!r}, needs None or an int >= 0")
        if self.swa_block_size < self.window_size:
            raise ValueError(f"swa_block_size has {self.swa_block_size}, needs >= window_size {self.window_size}")
        if self.block_size % self.ratio:
            raise ValueError(f"block_size has {self.block_size}, needs a multiple of ratio {self.ratio}")
        for name in ("swa_format", "main_format", "index_format"):
            layout = getattr(self, name)
            if not isinstance(layout, KVCacheFormat):
                raise ValueError(f"{name} has {layout!r}, needs a KVCacheFormat")
            if layout.is_index and name != "index_format":
                raise ValueError(f"{name} has {layout}, needs a record that loads as bf16 rows: do_cast=True, or unquantised")
        if self.swa_format.elements != self.main_format.elements:
            raise ValueError(
                f"main_format has {self.main_format.elements} elements, needs {self.swa_format.elements} as swa_format: "
                "a query attends to both"
            )
        if self.index_size & (self.index_size - 1):
            raise ValueError(f"index_format has {self.index_size} elements, needs a power of two (Hadamard)")
        if self.rope_dim % 2 or self.rope_dim >= min(self.latent_size, self.index_size):
            limit = min(self.latent_size, self.index_size)
            raise ValueError(f"rope_dim has {self.rope_dim}, needs an even count below {limit}, the shortest record")
        if self.accumulate not in ("float64", "float32"):
            raise ValueError(f"accumulate has {self.accumulate!r}, needs 'float64' or 'float32'")

    @property
    def latent_size(self) -> int:
        """Elements of a main record."""
        return self.swa_format.elements

    @property
    def value_size(self) -> int:
        """Elements of a main record that attention sums: all but the rotary ones."""
        return self.latent_size - self.rope_dim

    @property
    def index_size(self) -> int:
        """Elements of an indexer key."""
        return self.index_format.elements

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks that the longest sequence needs: its complete groups, cut into blocks."""
        return -(-(self.max_seq_len // self.ratio) // self.records_per_block)

    @property
    def records_per_block(self) -> int:
        """Compressed records a block holds."""
        return self.block_size // self.ratio

    @property
    def pool_blocks(self) -> int:
        """Blocks of the pool."""
        return self.max_batch * self.blocks_per_sequence if self.num_blocks is None else self.num_blocks

    def source_layer(self, layer: int) -> int:
        """The layer whose compressed cache `layer` reads; itself for a source."""
        return layer - layer % self.layers_per_group


_COUNTS = (
    "num_layers",
    "layers_per_group",
    "hidden_size",
    "ffn_size",
    "num_heads",
    "index_heads",
    "rope_dim",
    "window_size",
    "swa_block_size",
    "ratio",
    "block_size",
    "top_k",
    "max_seq_len",
    "max_batch",
)
