"""The one exception of the language model: something about the model file, the prompt or the record does not fit."""

from kvhal.errors import KVHalError


class LLMError(KVHalError, ValueError):
    """One line that says what does not fit and what would; the command line shows it as it is."""
