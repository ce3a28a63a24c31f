"""Checkpoints whose tokenizer is no `tokenizer.json`: Mistral's tekken, and tiktoken read by code of their own."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from controlplane.model.byte_alphabet import bytes_of_characters
from tests.vllm.tiny_model import make_tiny_llama

DEMO = Path(__file__).resolve().parents[2] / "demo" / "models" / "demo-large"
SPECIAL = 32
CONTROL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
LETTERS, SMALL = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN_PATTERN = (
    rf"{LETTERS}*{SMALL}+|{LETTERS}+{SMALL}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for message in messages %}[BOS]{{ message.role }}: {{ message.content }}[EOS]{% endfor %}"
    "{% if add_generation_prompt %}[BOS]assistant: {% endif %}"
)
CODE = """
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer


class TikTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        ranks = load_tiktoken_bpe(vocab_file)
        names = {int(number): str(token) for number, token in (added_tokens_decoder or {}).items()}
        ids = range(len(ranks), len(ranks) + SPECIAL)
        self.special = {names.get(number, f"<|reserved_{number}|>"): number for number in ids}
        self.model = tiktoken.Encoding("own", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special)
        super().__init__(added_tokens_decoder=added_tokens_decoder, **kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return {self._convert_id_to_token(number): number for number in range(self.vocab_size)}

    def encode(self, text, add_special_tokens=True, **kwargs):
        return self.model.encode(text, allowed_special="all")

    def decode(self, token_ids, **kwargs):
        return self.model.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def _tokenize(self, text, **kwargs):
        return [self._convert_id_to_token(number) for number in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.special.get(token, int(token[1:]) if token[1:].isdigit() else None)

    def _convert_id_to_token(self, number):
        return next((name for name, known in self.special.items() if known == number), f"#{number}")

    def convert_tokens_to_string(self, tokens):
        return self.decode([self._convert_token_to_id(token) for token in tokens])
"""


def make_tekken(path: Path) -> None:
    """A model with Mistral's own files only, random weights, and no chat template."""
    _make_model(path, bos_token_id=1, eos_token_id=2)
    words = _words()
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": word.decode(errors="replace")}
        for rank, word in enumerate(words)
    ]
    names = [*CONTROL, *(f"<SPECIAL_{number}>" for number in range(len(CONTROL), SPECIAL))]
    config = {
        "pattern": TEKKEN_PATTERN,
        "num_vocab_tokens": len(words),
        "default_vocab_size": len(words) + SPECIAL,
        "default_num_special_tokens": SPECIAL,
        "version": "v7",
    }
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)]
    _write(path / "tekken.json", {"config": config, "vocab": vocabulary, "special_tokens": special})


def make_tiktoken(path: Path) -> None:
    """A model whose tokenizer is code of its own around tiktoken, random weights; it has a token that is not special
    beside the vocabulary."""
    words = _words()
    first, last, shown = len(words), len(words) + 1, len(words) + 5
    _make_model(path, bos_token_id=first, eos_token_id=last)
    ranks = (f"{base64.b64encode(word).decode()} {rank}\n" for rank, word in enumerate(words))
    (path / "tiktoken.model").write_text("".join(ranks))
    pattern = TEKKEN_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|")
    (path / "tokenization_own.py").write_text(f"SPECIAL, PATTERN = {SPECIAL}, {pattern!r}\n{CODE}")
    added = {first: ("[BOS]", True), last: ("[EOS]", True), shown: ("<think>", False)}
    about = {
        "auto_map": {"AutoTokenizer": ["tokenization_own.TikTokenizer", None]},
        "tokenizer_class": "TikTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": {
            str(number): {"content": name, "special": own} for number, (name, own) in added.items()
        },
        "chat_template": TEMPLATE,
    }
    _write(path / "tokenizer_config.json", about)


def _words() -> list[bytes]:
    """The vocabulary of a demo model, first all bytes in their order, as both formats want it."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    added = {token["content"] for token in tokenizer["added_tokens"]}
    alphabet = bytes_of_characters()
    ranked = sorted(tokenizer["model"]["vocab"].items(), key=lambda entry: entry[1])
    words = [bytes(alphabet[character] for character in text) for text, _ in ranked if text not in added]
    return sorted(words, key=lambda word: (len(word) > 1, word if len(word) == 1 else b""))


def _make_model(path: Path, **ids: int) -> None:
    make_tiny_llama(path, vocabulary=len(_words()) + SPECIAL, context=4096)
    for name in ("config.json", "generation_config.json"):
        _write(path / name, {**json.loads((path / name).read_text()), **ids, "pad_token_id": None})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content))
