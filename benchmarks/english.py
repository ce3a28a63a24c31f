"""Prompts of English as people write it: sentences of this repository's own documentation, in random order.

A few words said again and again would flatter whatever remembers words, pieces of text or blocks: the frontend's
tokeniser does. Here there are thousands of words at the frequencies that prose has, and one in `TYPO_EVERY` is
mistyped, so that words that were never seen keep coming, as names, numbers and typing errors do from people.
"""

import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final = ("*.md", "docs/**/*.md", "demo/*.md", "benchmarks/*.md")
VOCABULARY: Final = 8000
"""At most. A token of these sentences stands for 4.2 characters then, as in the large vocabularies of models."""
TYPO_EVERY: Final = 50

_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_SENTENCE_END = re.compile(r"(?<=[.:;?!]) +(?=[A-Z`])")
_NOT_PROSE = ("#", "|", "    ", "!", "```")


@cache
def sentences() -> tuple[str, ...]:
    """Those of all pages: no headings, tables or code blocks, links by their text. Each once."""
    found: dict[str, None] = {}
    for page in sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}):
        text = _FENCED.sub("", page.read_text(encoding="utf-8")).replace("**", "")
        for paragraph in re.split(r"\n\s*\n", text):
            prose = [line.strip(" -*") for line in paragraph.splitlines() if not line.startswith(_NOT_PROSE)]
            for sentence in _SENTENCE_END.split(_LINK.sub(r"\1", " ".join(prose))):
                if len(sentence.split()) >= 4:
                    found[sentence] = None
    return tuple(found)


def text(characters: int, rng: random.Random) -> str:
    """Exactly `characters` characters of sentences drawn by `rng`, some words mistyped."""
    drawn: list[str] = []
    length = 0
    while length < characters:
        drawn.append(" ".join(_typed(word, rng) for word in rng.choice(sentences()).split()))
        length += len(drawn[-1]) + 1
    return " ".join(drawn)[:characters]


def prompts(characters: int, shared_characters: int, seed: int) -> Iterator[str]:
    """Endless texts of one length, the first `shared_characters` of which are the same in all."""
    rng = random.Random(seed)
    shared = text(shared_characters, rng)
    while True:
        yield shared + text(characters - shared_characters, rng)


def tokenizer(regex: str) -> Tokenizer:
    """Byte-level BPE over the words that `regex` finds, as the models of today have it, trained on these sentences."""
    trained = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), behavior="isolated"), level])
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(sentences(), trainer)
    trained.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return trained


def _typed(word: str, rng: random.Random) -> str:
    """The word, or once in `TYPO_EVERY` times with two letters the wrong way round."""
    if len(word) < 4 or rng.randrange(TYPO_EVERY):
        return word
    at = rng.randrange(len(word) - 1)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
