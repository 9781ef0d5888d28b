"""Text to tokens and back, from what a GGUF file says about its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvhal.llm.errors import LLMError

_CONTROL_TOKEN = 3  #: GGUF's token type of <|im_start|> and its kind


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """A model's tokenizer.

    Attributes:
        backend: the `tokenizers` object.
        stop: tokens that end an answer.
        chat_template: the Jinja template of a conversation, "" when the file has none.
    """

    backend: Tokenizer
    stop: frozenset[int]
    chat_template: str = ""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; names of control tokens in it become these tokens."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_chat(self, message: str) -> list[int]:
        """Token ids of a conversation that begins with one message of the user and continues with the answer.

        Raises:
            LLMError: the file has no template, or a broken one.
        """
        if not self.chat_template:
            raise LLMError("model: has no chat template; pass the prompt as raw text")
        messages = [{"role": "user", "content": message}]
        try:
            # The template comes with the model file: it is not trusted.
            template = ImmutableSandboxedEnvironment().from_string(self.chat_template)
            return self.encode(template.render(messages=messages, add_generation_prompt=True))
        except TemplateError as error:
            raise LLMError(f"model: its chat template fails: {error}") from error

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids, without control tokens."""
        text: str = self.backend.decode(tokens, skip_special_tokens=True)
        return text

    def stream(self) -> Callable[[int], str]:
        """A function that takes one token after another and gives the text that has become certain: no half characters."""
        decoder = decoders.DecodeStream(skip_special_tokens=True)
        return lambda token: decoder.step(self.backend, token) or ""


def make_tokenizer(fields: Any) -> TextTokenizer:
    """The tokenizer that a GGUF file describes.

    Args:
        fields: metadata by key; raises LLMError for a key that is missing, `get` gives a default.

    Raises:
        LLMError: a kind of tokenizer that is not implemented.
    """
    kind = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != ("gpt2", "smollm"):
        raise LLMError(f"model: has a {kind[0]} tokenizer with {kind[1]} splitting, needs gpt2 with smollm")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # Every digit stands alone, the rest is split as GPT-2 does.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    ends = {fields["tokenizer.ggml.eos_token_id"], *(tokens.index(end) for end in ("<|endoftext|>",) if end in tokens)}
    return TextTokenizer(tokenizer, frozenset(ends), fields.get("tokenizer.chat_template", ""))
