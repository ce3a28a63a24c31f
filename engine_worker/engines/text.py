"""Engines that know how their model's text becomes tokens, where its checkpoint has no `tokenizer.json`."""

from typing import Final, Protocol, TypeGuard

from engine_worker.engines.interface import Engine
from mesh.text_files import TextFiles

MISTRAL_MODE: Final = "mistral"
"""vLLM's tokenizer mode in which Mistral's library makes prompts, unless transformers' files of a checkpoint say it
all."""


class TextEngine(Engine, Protocol):
    """Has loaded a tokenizer of its own, once started."""

    def text_files(self, checkpoint: TextFiles) -> TextFiles:
        """What the checkpoint lacks for frontends, made of that tokenizer: `tokenizer.json` above all. Blocks. Raises
        ConfigurationError for a tokenizer that cannot be written so."""


def has_text(engine: Engine) -> TypeGuard[TextEngine]:
    """Whether this engine knows more of its model's text than the checkpoint says."""
    return hasattr(engine, "text_files")
