"""A `tokenizer.json` of a model whose checkpoint has none, made of the tokenizer that vLLM has loaded for it.

Frontends read that one format (`tokenizers`, in Rust, without transformers). Checkpoints without it have one of three
others: SentencePiece's, which transformers converts as it loads it; tiktoken's, read by Python code of the model's
own (Kimi, the first Qwen); and Mistral's `tekken.json`. Imports vLLM, transformers and tiktoken.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

import tiktoken
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers.convert_slow_tokenizer import TikTokenConverter

from mesh.errors import ConfigurationError
from mesh.text_files import TextFiles, has_chat_template

_SAMPLES: Final = (
    "The quick brown fox jumps over 13 lazy dogs, doesn't it?",
    "def area(r: float) -> float:\n    return 3.14159 * r**2  # m^2\n\n\nif __name__ == '__main__':\n\tprint(area(2))",
    '{"name": "Zoë", "tags": ["a-b", "c_d"], "n": -1.5e10}',
    "  leading,  double   and trailing blanks  \r\n\r\n\n",
    "Größe, façade, İstanbul, čeština, Ελληνικά, Привет, мир!",
    "你好，世界。今天天气怎么样？ こんにちは、元気ですか。안녕하세요",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก",
    "naïve e\u0301 \u200b\ufeff \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001d54f ½ ² ﬁ",
    "https://example.org/a?b=c&d=%20#e <b>x</b> $x^2$ 1234567890 0x1F 1,000,000.00",
)
"""What tokenizers differ in: blanks, digits, scripts, signs of several code points."""
_CLASS: Final = {"tokenizer_class": "PreTrainedTokenizerFast"}
"""transformers' name for what reads a tokenizer.json."""
_ADDED_TRIED: Final = 40


def made_text_files(tokenizer: Any, checkpoint: TextFiles) -> TextFiles:
    """What a frontend needs to read and write as `tokenizer` does, as far as it is not in the checkpoint. Raises
    ConfigurationError where the two differ."""
    made = _backend(tokenizer)
    made.encode_special_tokens = _splits_special(made, tokenizer)
    _add_template(made, tokenizer)
    _check(made, tokenizer)
    config = _config(made, tokenizer) | json.loads(checkpoint.get("tokenizer_config.json", b"{}")) | _CLASS
    config.pop("auto_map", None)  # the code of a class that is not needed any more
    files = {"tokenizer.json": made.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, str) and not has_chat_template(checkpoint):
        files["chat_template.jinja"] = template.encode()
    return files


def is_mistral(tokenizer: Any) -> bool:
    """Whether it is of Mistral's own library, which makes the prompts of chats, too."""
    return bool(getattr(tokenizer, "IS_MISTRAL_TOKENIZER", False))


class _Converter(TikTokenConverter):
    """transformers' converter, of an encoding that is loaded."""

    def __init__(self, encoding: tiktoken.Encoding) -> None:
        super().__init__(pattern=encoding._pat_str)
        self._ranks = encoding._mergeable_ranks

    def load_tiktoken_bpe(self, tiktoken_url: object) -> dict[bytes, int]:
        """What would be in the file."""
        return self._ranks


def _backend(tokenizer: Any) -> Tokenizer:
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        return Tokenizer.from_str(backend.to_str())
    if is_mistral(tokenizer):
        if not tokenizer.is_tekken:
            raise _unknown(tokenizer, "it is SentencePiece's, read by Mistral's library")
        from transformers.integrations.mistral.tokenizer import MistralConverter

        converted: Tokenizer = MistralConverter(tokenizer.tokenizer.file_path).converted()
        return converted
    encodings = [each for each in vars(tokenizer).values() if isinstance(each, tiktoken.Encoding)]
    if len(encodings) != 1:
        raise _unknown(tokenizer, "it is neither of `tokenizers` nor of tiktoken")
    (encoding,) = encodings
    made: Tokenizer = _Converter(encoding).converted()
    _add_special(made, tokenizer, encoding)
    return made


def _add_special(made: Tokenizer, tokenizer: Any, encoding: tiktoken.Encoding) -> None:
    """With the ids that they have: those that are added to a `Tokenizer` get the next ones in turn."""
    by_id = {token_id: text for text, token_id in encoding._special_tokens.items()}
    by_id |= {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
    shown = by_id.keys() - set(tokenizer.all_special_ids)
    for token_id in sorted(by_id):
        while (next_id := made.get_vocab_size()) < token_id:
            made.add_special_tokens([AddedToken(f"<|unused {next_id}|>", normalized=False, special=True)])
        token = AddedToken(by_id[token_id], normalized=False, special=token_id not in shown)
        (made.add_tokens if token_id in shown else made.add_special_tokens)([token])
        if made.token_to_id(by_id[token_id]) != token_id:
            raise _unknown(tokenizer, f"its token {token_id}, {by_id[token_id]!r}, cannot have that number")


def _splits_special(made: Tokenizer, tokenizer: Any) -> bool:
    """Whether a special token that a text spells out is text like any other, as Mistral's library has it."""
    special = [token.content for token in made.get_added_tokens_decoder().values() if token.special]
    return bool(special) and len(_ids(tokenizer, special[-1], is_bare=True)) != 1


def _add_template(made: Tokenizer, tokenizer: Any) -> None:
    """Has `made` put around a text what `tokenizer` puts around it, such as the token that begins a sequence."""
    bare, whole = _ids(tokenizer, "a", is_bare=True), _ids(tokenizer, "a", is_bare=False)
    if made.encode("a").ids == whole:
        return
    starts = [at for at in range(len(whole)) if whole[at : at + len(bare)] == bare]
    if not bare or not starts:
        raise _unknown(tokenizer, "it makes something else of a text with special tokens around it")
    names = [str(made.id_to_token(token_id)) for token_id in whole]
    first, last = names[: starts[0]], names[starts[0] + len(bare) :]
    made.post_processor = TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, "$B:1"],
        special_tokens=[(name, whole[names.index(name)]) for name in {*first, *last}],
    )


def _check(made: Tokenizer, tokenizer: Any) -> None:
    added = [token.content for token in made.get_added_tokens_decoder().values()]
    for sample in (*_SAMPLES, " a".join(added[:_ADDED_TRIED]), "b ".join(added[-_ADDED_TRIED:])):
        for is_bare in (True, False):
            here = made.encode(sample, add_special_tokens=not is_bare).ids
            if here != (there := _ids(tokenizer, sample, is_bare=is_bare)):
                raise _unknown(tokenizer, f"written as a tokenizer.json it makes {here} of {sample!r}, not {there}")


def _ids(tokenizer: Any, text: str, *, is_bare: bool) -> Sequence[int]:
    return list(tokenizer.encode(text, add_special_tokens=not is_bare))


def _config(made: Tokenizer, tokenizer: Any) -> dict[str, Any]:
    ids = {name: getattr(tokenizer, f"{name}_id", None) for name in ("bos_token", "eos_token", "pad_token")}
    config: dict[str, Any] = {
        name: made.id_to_token(token_id) for name, token_id in ids.items() if token_id is not None and token_id >= 0
    }
    if made.encode_special_tokens:
        config["split_special_tokens"] = True
    return {name: value for name, value in config.items() if value is not None}


def _unknown(tokenizer: Any, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"the checkpoint has no tokenizer.json, and none can be made of vLLM's {type(tokenizer).__name__}: {reason}; "
        "save one beside the weights (`save_pretrained` of a fast tokenizer of transformers)"
    )
