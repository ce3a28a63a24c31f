import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from services.frontend.text.chunked import ChunkCache, ChunkedTokenizer
from services.frontend.text.words import MAX_WORD_CHARACTERS, WordTokenizer
from tests.unit.services.frontend.checkpoints import CHUNKED, KINDS, SPECIAL


@functools.cache
def tokenizer_of(kind: str) -> ChunkedTokenizer:
    return ChunkedTokenizer(KINDS[kind](), cache_characters=100_000)


WORDS = "the fox mesh 123 4 don't 's . x=1 _a brown 🙂 你好 привет é \u0301 İ ﬁ \u200d".split(" ")
BLANKS = ["\n", "\n\n", "\r\n", "\t", "  ", "\u00a0", "\u3000", ""]
words = st.sampled_from([*WORDS, *BLANKS, *SPECIAL, "<mask>", "brown fox"])
prose = st.lists(words, max_size=400).map(" ".join)
texts = st.one_of(prose, st.text(max_size=2000), st.lists(words, max_size=300).map("".join))


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_the_ids_are_those_of_the_whole_text(kind: str, text: str) -> None:
    chunked = tokenizer_of(kind)
    whole = chunked._tokenizer.encode(text, add_special_tokens=False).ids
    assert chunked.encode(text) == whole
    assert chunked.encode(text) == whole, "from the cache"


@pytest.mark.parametrize("kind", KINDS)
def test_only_tokenizers_with_safe_split_points_are_chunked(kind: str) -> None:
    assert tokenizer_of(kind).chunked == (kind in CHUNKED)


@given(text=texts)
def test_chunks_are_the_text_again(text: str) -> None:
    assert "".join(tokenizer_of("gpt2").chunks(text)) == text


def test_a_shared_prefix_is_tokenised_once() -> None:
    chunked = ChunkedTokenizer(KINDS["llama3"](), cache_characters=1_000_000)
    prefix = "<s><|system|>" + "the quick brown fox jumps over the lazy dog " * 500 + "<|user|>"
    chunked.encode(prefix + "what does the fox do?")
    found = chunked.look_up(prefix + "and what about the dog?")
    assert found.unseen == ["and what about the dog?"]


def test_a_changed_beginning_does_not_spoil_the_segments_behind_it() -> None:
    chunked = ChunkedTokenizer(KINDS["gpt2"](), cache_characters=1_000_000)
    document = "the quick brown fox jumps over the lazy dog " * 100
    chunked.encode(f"<s><|system|>be brief<|user|>{document}")
    assert chunked.look_up(f"<s><|system|>be verbose<|user|>{document}").unseen == ["be verbose"]


@pytest.mark.parametrize("kind", sorted(CHUNKED))
def test_words_are_learned_until_the_tokenizer_is_not_asked(kind: str) -> None:
    tokenizer = KINDS[kind]()
    words = WordTokenizer(tokenizer)
    text = "the quick, brown fox! jumps 12 times (or 3) over " + "x" * 2 * MAX_WORD_CHARACTERS
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert [words.encode(text) for _ in range(3)] == [expected] * 3
    short = text.replace("x" * MAX_WORD_CHARACTERS, "")
    assert words.encode(short) == tokenizer.encode(short, add_special_tokens=False).ids
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # from here on its answers would be others
    assert words.encode(short) != tokenizer.encode(short, add_special_tokens=False).ids


def test_words_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.frontend.text.words.MAX_WORDS", 20)
    tokenizer = KINDS["gpt2"]()
    words = WordTokenizer(tokenizer)
    for start in range(0, 300, 7):
        text = " ".join(f"w{number}" for number in range(start, start + 10))
        assert words.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids
        assert len(words) <= 20


def test_a_repeated_chunk_is_tokenised_once() -> None:
    chunked = ChunkedTokenizer(KINDS["gpt2"](), cache_characters=1_000_000)
    found = chunked.look_up("<s>hello<s>hello<s>")
    assert found.unseen == ["<s>", "hello"]


@given(st.lists(st.tuples(st.text(max_size=20), st.booleans()), max_size=200), st.integers(0, 100))
def test_the_cache_is_bounded_and_never_wrong(uses: list[tuple[str, bool]], max_characters: int) -> None:
    cache = ChunkCache(max_characters)
    for chunk, write in uses:
        expected = [ord(character) for character in chunk]
        if write:
            cache.put(chunk, expected)
        else:
            assert cache.get(chunk) in (None, expected)
        assert cache.characters <= max_characters
    assert cache.hits + cache.misses == sum(not write for _, write in uses)


def test_the_cache_keeps_what_was_used_last() -> None:
    cache = ChunkCache(max_characters=4)
    cache.put("aa", [1])
    cache.put("bb", [2])
    cache.get("aa")
    cache.put("cc", [3])
    assert (cache.get("aa"), cache.get("bb"), cache.get("cc")) == ([1], None, [3])
