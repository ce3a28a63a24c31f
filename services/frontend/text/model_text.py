"""Everything about one model that has to do with text, loaded from its directory."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from mesh.errors import ConfigurationError
from mesh.text_files import TEKKEN, TextFiles, read_text_files
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.chunked import ChunkedTokenizer
from services.frontend.text.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer, token_bytes

DEFAULT_CACHE_BYTES: Final = 64 * 1024 * 1024
_WRITTEN_BY_MISTRAL: Final = frozenset(("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"))
"""Special tokens that vLLM spells out whatever a request says, where Mistral's library reads the tokens."""
_DECODE_SAMPLE: Final = "Hello, wörld! 你好 🙂\n\n  x = 1"

# One process of many on its machine: handing a short text to a thread pool costs more than tokenising it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class ModelText:
    """Tokenizer, chat template and end-of-sequence tokens of one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        eos_token_ids: frozenset[int],
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        """`now_s`: a monotonic clock, by which it is found out what may be tokenised on the event loop."""
        self._tokenizer = tokenizer
        self._chunked = ChunkedTokenizer(tokenizer, cache_bytes, now_s)
        self._prefix_ids, self._suffix_ids = _added_around(tokenizer)
        self._anchor_ids: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
        self._bytes_of_token = _byte_level_table(tokenizer)
        self._longest_characters = _longest_characters(tokenizer)
        self._bytes_showing: dict[frozenset[str], list[bytes]] = {}
        self.template = template
        """None: the model takes prompts only."""
        self.tool_template: ChatTemplate | None = None
        """For chats with tools, where the checkpoint has a template of its own for them."""
        self.eos_token_ids = eos_token_ids
        self.labels: Mapping[int, str] | None = None
        """Names of a classifier's classes, by their numbers; None: it has not named them."""
        self.instructions: Mapping[str, str] = {}
        """What an embedding model wants to be told of each use of its vectors (`search_query`)."""
        self.model_type = ""
        """As config.json names the architecture."""
        self.written_tokens: frozenset[str] | None = None
        """Special tokens that texts always hold, and the only ones; None: requests choose (`skip_special_tokens`)."""
        self.pad_token_id: int | None = None
        self.has_segments = False
        """Segment ids say to the model which text of a pair a token belongs to (BERT's kind)."""
        self.added_token_ids: frozenset[int] = frozenset(tokenizer.get_added_tokens_decoder())
        """Tokens beside the vocabulary that texts are split at: what begins and ends turns, and the like."""
        self.vocabulary_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def load(
        cls, directory: Path, unix_time: Callable[[], float], cache_bytes: int = DEFAULT_CACHE_BYTES
    ) -> "ModelText":
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json; only the
        first must be there. `unix_time`: for templates that tell the date. Raises ConfigurationError for what cannot be
        read."""
        return cls.from_files(read_text_files(directory), str(directory), unix_time, cache_bytes)

    @classmethod
    def from_files(
        cls,
        files: TextFiles,
        origin: str,
        unix_time: Callable[[], float],
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        now_s: Callable[[], float] | None = None,
    ) -> "ModelText":
        """The same from contents. `origin`: where they are from, for errors; `now_s`: see the constructor. Raises
        ConfigurationError."""
        if "tokenizer.json" not in files:
            raise ConfigurationError(f"{origin} holds no tokenizer.json; point the worker at a full checkpoint")
        try:
            tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:
            raise ConfigurationError(f"{origin}/tokenizer.json cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _json(files, "tokenizer_config.json", origin)
        # transformers' name for texts in which nothing is a special token.
        tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
        special = _special_tokens(config)
        template = _template_source(files, config, origin)
        text = cls(
            tokenizer,
            ChatTemplate(template, special, unix_time) if template is not None else None,
            _eos_token_ids(tokenizer, special, files, origin),
            cache_bytes,
            now_s,
        )
        tool_template = _named_templates(config).get("tool_use")
        if tool_template is not None and "chat_template.jinja" not in files:
            text.tool_template = ChatTemplate(tool_template, special, unix_time)
        model_config = _json(files, "config.json", origin)
        segments = model_config.get("type_vocab_size", 0)
        text.has_segments = isinstance(segments, int) and segments > 1
        text.labels = _labels(model_config)
        if TEKKEN in files:
            text.written_tokens = _WRITTEN_BY_MISTRAL
        text.model_type = str(model_config.get("model_type", ""))
        text.instructions = _instructions(model_config, _json(files, "config_sentence_transformers.json", origin))
        text.pad_token_id = tokenizer.token_to_id(special["pad_token"]) if "pad_token" in special else None
        return text

    @property
    def chunked(self) -> ChunkedTokenizer:
        """The tokenizer proper, without what is added around a prompt."""
        return self._chunked

    def with_added_tokens(self, token_ids: list[int]) -> list[int]:
        """A bare prompt's ids with those that the model wants around it (often a first one). Not for a rendered
        chat template, which brings them itself."""
        return [*self._prefix_ids, *token_ids, *self._suffix_ids]

    def without_added_tokens(self, token_ids: list[int]) -> list[int]:
        """What `with_added_tokens` was given."""
        return token_ids[len(self._prefix_ids) : len(token_ids) - len(self._suffix_ids)]

    def fewest_tokens(self, text: str) -> int:
        """That it can have, told by its length: so a text that cannot fit need not be tokenised. 0: nobody knows."""
        return -(-len(text) // self._longest_characters) if self._longest_characters else 0

    def enough_for(self, text: str, tokens: int) -> str:
        """A beginning of a text that has so many tokens at least: those behind them need not be made where they are cut
        off. All of the text where nobody knows how long tokens are."""
        return text[: (tokens + 1) * self._longest_characters] if self._longest_characters else text

    def label(self, number: int) -> str | None:
        """The name of a classifier's class, as transformers has it; None for one that was left out."""
        return f"LABEL_{number}" if self.labels is None else self.labels.get(number)

    def encode(self, text: str) -> list[int]:
        """The tokens of a short text by itself; `chunked` is for prompts."""
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary has it (`Ġand`); empty for an id without a token."""
        return self._tokenizer.id_to_token(token_id) or ""

    def pair(self, first: str, second: str, kept_tokens: int | None = None) -> tuple[list[int], list[int]]:
        """Token ids of two texts as a cross-encoder reads them, and the segment of each, 0 or 1. Of more than
        `kept_tokens` in all, the end of the longer text is left away. An empty second text is none, as for
        transformers."""
        one, other = (self._tokenizer.encode(text, add_special_tokens=False) for text in (first, second))
        if kept_tokens is not None:
            kept_tokens = max(0, kept_tokens - self._tokenizer.num_special_tokens_to_add(is_pair=bool(second)))
            of_one, of_other = _longest_first(len(one), len(other), kept_tokens)
            one.truncate(of_one)
            other.truncate(of_other)
        both = self._tokenizer.post_process(one, other if second else None)
        return both.ids, both.type_ids

    def beginning(self, text: str, tokens: int) -> str:
        """So much of a text as makes at most `tokens` of them by itself."""
        while True:
            offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
            if len(offsets) <= tokens:
                return text
            # Tokens of one character, such as bytes of an emoji, share its place.
            end = min(offsets[tokens - 1][1], offsets[tokens][0])
            text = text[: min(end, len(text) - 1)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """Of a token of the vocabulary by its text; None if there is no such."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A single token as text (U+FFFD for what is no character by itself) and as bytes, special tokens
        included: what logprobs show."""
        if self._bytes_of_token is not None and 0 < len(self._bytes_of_token) > token_id:
            spelled = self._bytes_of_token[token_id] or (self._tokenizer.id_to_token(token_id) or "").encode()
            return spelled.decode("utf-8", "replace"), spelled
        # Behind another token, because decoders strip a first blank.
        before: str = self._tokenizer.decode(self._anchor_ids, skip_special_tokens=False)
        both: str = self._tokenizer.decode([*self._anchor_ids, token_id], skip_special_tokens=False)
        text = both[len(before) :]
        return text, text.encode()

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[str] = frozenset(),
    ) -> Detokenizer:
        """A fresh one for an answer to this prompt. `shown`: special tokens that are spelled out all the same; other
        decoders than byte-level ones spell out all of them then."""
        if self.written_tokens is not None:
            shown, skip_special_tokens = self.written_tokens, True
        shown = shown & self._special_texts if skip_special_tokens else frozenset()
        if self._bytes_of_token is None:
            decode = partial(self.decode, skip_special_tokens=skip_special_tokens and not shown)
            return WindowDetokenizer(decode, prompt_token_ids)
        if shown:
            return ByteLevelDetokenizer(self._bytes_with(shown))
        return ByteLevelDetokenizer(self._bytes_of_token if skip_special_tokens else self._all_bytes_of_token)

    def _bytes_with(self, shown: frozenset[str]) -> list[bytes]:
        if shown not in self._bytes_showing:  # one for each parser that a request may need
            table = list(self._bytes_of_token or ())
            for token_id, added in self._tokenizer.get_added_tokens_decoder().items():
                if added.content in shown:
                    table[token_id] = added.content.encode()
            self._bytes_showing[shown] = table
        return self._bytes_showing[shown]

    @cached_property
    def _special_texts(self) -> frozenset[str]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @cached_property
    def _all_bytes_of_token(self) -> list[bytes]:
        """The bytes of every token by id, special ones spelled out."""
        table = list(self._bytes_of_token or ())
        for token_id, added in self._tokenizer.get_added_tokens_decoder().items():
            table[token_id] = added.content.encode()
        return table


def _added_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What the post-processor puts before and behind a text."""
    bare: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    full: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise ConfigurationError(
        "the tokenizer's post-processor changes tokens rather than adding some; such a model cannot be served"
    )


def _byte_level_table(tokenizer: Tokenizer) -> list[bytes] | None:
    """The bytes of every token by id, where the decoder is byte-level; None otherwise."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None or decoder["type"] != "ByteLevel":
        return None
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = token_bytes(token)
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        table[token_id] = b"" if added.special else added.content.encode()
    ids = tokenizer.encode(_DECODE_SAMPLE, add_special_tokens=False).ids
    spelled = b"".join(table[token_id] for token_id in ids).decode("utf-8", "replace")
    return table if spelled == tokenizer.decode(ids, skip_special_tokens=True) else None


_MOST_COMPOSED: Final = 4
"""Characters that NFC may put together into one: a letter and its marks."""


def _longest_characters(tokenizer: Tokenizer) -> int:
    """How many characters of a text one token stands for, at most; 0 where that is not known."""
    description: dict[str, Any] = json.loads(tokenizer.to_str())
    normalizer, decoder = (part and part["type"] for part in (description["normalizer"], description["decoder"]))
    added = tokenizer.get_added_tokens_decoder().values()
    if normalizer not in (None, "NFC") or decoder != "ByteLevel" or description.get("truncation"):
        return 0
    if any(token.lstrip or token.rstrip for token in added):  # they swallow any number of blanks
        return 0
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)  # in bytes, a character each
    return longest * (_MOST_COMPOSED if normalizer == "NFC" else 1)


def _json(files: TextFiles, name: str, origin: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        content = json.loads(files[name])
    except ValueError as error:
        raise ConfigurationError(f"{origin}/{name} is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{origin}/{name} must hold a JSON object")
    return content


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like; older files hold objects with the text under `content`."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _template_source(files: TextFiles, config: dict[str, Any], origin: str) -> str | None:
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8", "replace")
    source = config.get("chat_template", _json(files, "chat_template.json", origin).get("chat_template"))
    if isinstance(source, list):
        source = _named_templates(config).get("default")
    return source if isinstance(source, str) else None


def _named_templates(config: dict[str, Any]) -> Mapping[str, str]:
    """Where a checkpoint has several: `default`, and `tool_use` in its place for chats with tools."""
    listed = config.get("chat_template")
    entries = listed if isinstance(listed, list) else []
    named = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    return {name: source for name, source in named.items() if isinstance(name, str) and isinstance(source, str)}


def _eos_token_ids(tokenizer: Tokenizer, special: dict[str, str], files: TextFiles, origin: str) -> frozenset[int]:
    ids: set[int] = set()
    if (eos := special.get("eos_token")) and (eos_id := tokenizer.token_to_id(eos)) is not None:
        ids.add(eos_id)
    for name in ("generation_config.json", "config.json"):
        configured = _json(files, name, origin).get("eos_token_id")
        ids.update([configured] if isinstance(configured, int) else configured or [])
    return frozenset(ids)


def _labels(config: Mapping[str, Any]) -> dict[int, str] | None:
    named = config.get("id2label")
    if not isinstance(named, dict):
        return None
    return {int(number): str(name) for number, name in named.items() if str(number).isdecimal()}


def _instructions(config: Mapping[str, Any], of_sentence_transformers: Mapping[str, Any]) -> dict[str, str]:
    """As vLLM finds them."""
    named = config.get("task_instructions") or of_sentence_transformers.get("prompts")
    if not isinstance(named, dict):
        return {}
    return {use: text for use, text in named.items() if isinstance(text, str)}


def _longest_first(first: int, second: int, most: int) -> tuple[int, int]:
    """How many tokens two texts keep of `most`: the longer one gives first, until both are as long. The strategy of the
    same name in the tokenizers library."""
    if first + second <= most:
        return first, second
    shorter = min(first, second)
    longer = max(shorter, most - shorter)
    if shorter + longer > most:
        shorter = most // 2
        longer = most - shorter
    return (longer, shorter) if first > second else (shorter, longer)
