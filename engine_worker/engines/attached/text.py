"""Text and tokens, for a server that knows no token ids."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from mesh.errors import ConfigurationError


class TextTokenizer:
    """The model's own tokenizer, at this side.

    Pieces of an answer are tokenised one by one, as they come. The tokens are then not always those that the model
    produced, but they are the same text.
    """

    def __init__(self, model_path: Path) -> None:
        """Raises `ConfigurationError` where there is no tokenizer.json."""
        file = model_path / "tokenizer.json"
        if not file.is_file():
            raise ConfigurationError(f"there is no {file}: give the model's tokenizer by --tokenizer")
        self._tokenizer = Tokenizer.from_file(str(file))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt, its special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a piece of text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
