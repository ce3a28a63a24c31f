"""Small tokenizers of the kinds that are met, built on the spot, and model directories around them."""

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>")
LLAMA_3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K_REGEX = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
TEKKEN_REGEX = O200K_REGEX.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
QWEN_REGEX = LLAMA_3_REGEX.replace("{1,3}", "")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}<|assistant|>"
)
_CORPUS = [
    "the quick brown fox jumps over the lazy dog and then it doesn't jump again, we've seen it 123 times.",
    "mesh router engine token block cache migrate request latency prefix scheduler decode prefill hidden state",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n",
    "Straße und Übermut, привет мир, 你好 世界, こんにちは, 안녕하세요, 🙂 emoji",
] * 20


def byte_level(regex: str | None = None, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """GPT-2's kind, or with another expression that of Llama 3 or Qwen."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)
    if regex is None:
        tokenizer.pre_tokenizer = level
    else:
        split = pre_tokenizers.Split(Regex(regex), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def single_digits() -> Tokenizer:
    """As the demo models have it: every digit by itself."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """Llama 2's kind: blanks become U+2581, unknown characters fall back to bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *SPECIAL, *byte_tokens], show_progress=False)
    tokenizer.train_from_iterator(_CORPUS[:3], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """BERT's kind."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=["[UNK]", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    """SentencePiece's other kind."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def with_greedy_special_token() -> Tokenizer:
    """A byte-level one with a special token that swallows the blanks around it."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return tokenizer


def with_added_word() -> Tokenizer:
    """A byte-level one with an added token of two words."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("brown fox", normalized=False)])
    return tokenizer


def without_special() -> Tokenizer:
    """A byte-level one for which a special token that a text spells out is text."""
    tokenizer = byte_level(TEKKEN_REGEX)
    tokenizer.encode_special_tokens = True
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": byte_level,
    "llama3": lambda: byte_level(LLAMA_3_REGEX),
    "qwen": lambda: byte_level(QWEN_REGEX, normalizers.NFC()),
    "o200k": lambda: byte_level(O200K_REGEX),
    "tekken": lambda: byte_level(TEKKEN_REGEX),
    "nothing special": without_special,
    "unknown regex": lambda: byte_level(r"\p{L}+ ?|\p{N}+|[^\p{L}\p{N}]+"),
    "single digits": single_digits,
    "metaspace": metaspace,
    "word piece": word_piece,
    "unigram": unigram,
    "greedy special token": with_greedy_special_token,
    "added word": with_added_word,
}
CHUNKED = {"gpt2", "llama3", "qwen", "o200k", "tekken", "nothing special", "single digits"}


def write_checkpoint(directory: Path, tokenizer: Tokenizer | None = None, template: str = CHAT_TEMPLATE) -> Path:
    """A model directory without weights: all that a frontend reads."""
    directory.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level()).save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template:
        (directory / "chat_template.jinja").write_text(template)
    return directory
