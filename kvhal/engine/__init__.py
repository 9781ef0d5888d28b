"""A small MLA decoder that reads and writes its caches through kvhal alone.

    engine = Engine(EngineConfig())
    (result,) = engine.generate([b"some text"], max_new_tokens=32)

It names no backend and no kernel: formats are values of the configuration, the device is an argument, and which backend
serves is decided by kvhal's own configuration. `no_cache_logits` is what it is checked against.
"""

from kvhal.engine.caches import Caches, PoolExhausted, Sequence
from kvhal.engine.config import BF16_INDEX_FORMAT, BOS, BYTE_TOKENS, VOCABULARY, EngineConfig
from kvhal.engine.decode import Decoder
from kvhal.engine.engine import DEFAULT_CHUNK, Engine, Generation
from kvhal.engine.model import Model, greedy
from kvhal.engine.oracle import no_cache_logits
from kvhal.engine.parallel import ContextParallel
from kvhal.engine.runtime import CrossLayerRuntime
from kvhal.engine.weights import Weights, make_weights

__all__ = [
    "BF16_INDEX_FORMAT",
    "BOS",
    "BYTE_TOKENS",
    "DEFAULT_CHUNK",
    "VOCABULARY",
    "Caches",
    "ContextParallel",
    "CrossLayerRuntime",
    "Decoder",
    "Engine",
    "EngineConfig",
    "Generation",
    "Model",
    "PoolExhausted",
    "Sequence",
    "Weights",
    "greedy",
    "make_weights",
    "no_cache_logits",
]
