"""A real language model whose KV cache lives in kvhal: SmolLM2-135M-Instruct, or any other Llama-shaped GGUF file.

A token's K and V of a layer are one record of a paged cache. What is attended to is always read back through kvhal, in a
prefill as well, so that a prompt sees exactly what later steps will see. Needs the extra `llm` to read a model file; everything
else here is torch.
"""

from kvhal.llm.cache import BlockPool, PagedCache
from kvhal.llm.errors import LLMError
from kvhal.llm.generation import Generation, Step, check_prompts
from kvhal.llm.load import load_model
from kvhal.llm.model import LayerWeights, Model, ModelConfig, Weights
from kvhal.llm.perplexity import Perplexity, perplexity
from kvhal.llm.records import KV_FORMATS, parse_kv_format

__all__ = [
    "KV_FORMATS",
    "BlockPool",
    "Generation",
    "LLMError",
    "LayerWeights",
    "Model",
    "ModelConfig",
    "PagedCache",
    "Perplexity",
    "Step",
    "Weights",
    "check_prompts",
    "load_model",
    "parse_kv_format",
    "perplexity",
]
