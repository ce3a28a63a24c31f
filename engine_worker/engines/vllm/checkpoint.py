"""The vocabulary of a checkpoint, and whether it has recurrent layers, read from its JSON files without loading a
tokenizer."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mesh.errors import EngineFailed

_RECURRENT_KEYS: Final = frozenset(
    "mamba_d_state mamba_d_conv mamba_expand ssm_state_size ssm_cfg hybrid_override_pattern state_size".split()
)
_RECURRENT_LAYERS: Final = frozenset("mamba mamba2 linear_attention recurrent conv".split())


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids that a model knows."""

    size: int
    """Ids are below it."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a request which does not ignore them."""


def read_vocabulary(model_path: Path) -> Vocabulary:
    """Reads config.json, generation_config.json and the tokenizer's files; the last two may be missing.

    vLLM takes the end of sequence from the tokenizer, which it never loads here, so all the places where a
    checkpoint may name it count. Raises EngineFailed.
    """
    config = _read(model_path / "config.json")
    if config is None:
        raise EngineFailed(f"{model_path} holds no config.json: give the directory of a Hugging Face checkpoint")
    text_config = config.get("text_config", config)
    size = text_config.get("vocab_size")
    if not isinstance(size, int):
        raise EngineFailed(f"{model_path}/config.json names no vocab_size")
    generation_config = _read(model_path / "generation_config.json") or {}
    named = generation_config.get("eos_token_id", text_config.get("eos_token_id"))
    ids = {named} if isinstance(named, int) else set(named or ())
    ids |= _tokenizer_eos(model_path)
    return Vocabulary(size=size, eos_token_ids=tuple(sorted(ids)))


def has_recurrent_layers(model_path: Path) -> bool:
    """Whether some layers keep a state instead of KV blocks (Mamba, linear attention and the like), by what such
    checkpoints say of them in config.json; false where there is none."""
    config = _read(model_path / "config.json") or {}
    text_config = config.get("text_config", config)
    kinds = {str(kind) for kind in text_config.get("layer_types") or text_config.get("layers_block_type") or ()}
    return bool(_RECURRENT_KEYS & text_config.keys() or kinds & _RECURRENT_LAYERS)


def has_mistral_tokenizer(model_path: Path) -> bool:
    """Whether this is a repository of Mistral's without a tokenizer of transformers. vLLM knows those by
    `consolidated*.safetensors`, the same weights in another form, which are not fetched from the Hub here."""
    names = {"tekken.json": True, "params.json": True, "tokenizer.json": False}
    return all((model_path / name).is_file() is there for name, there in names.items())


def _tokenizer_eos(model_path: Path) -> set[int]:
    tokenizer_config = _read(model_path / "tokenizer_config.json") or {}
    eos = tokenizer_config.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if text is None:
        return set()
    tokenizer = _read(model_path / "tokenizer.json") or {}
    return {token["id"] for token in tokenizer.get("added_tokens", ()) if token["content"] == text}


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineFailed(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise EngineFailed(f"{path} is not a JSON object")
    return content
