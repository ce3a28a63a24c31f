import functools
import sys
import tracemalloc
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.text.chunked import ENTRY_BYTES, FIRST_GUESS_S, ChunkCache, ChunkedTokenizer, Pace
from tests.unit.services.frontend.checkpoints import CHUNKED, KINDS, SPECIAL


@functools.cache
def tokenizer_of(kind: str) -> ChunkedTokenizer:
    return ChunkedTokenizer(KINDS[kind](), cache_bytes=100_000)


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
    chunked = ChunkedTokenizer(KINDS["llama3"](), cache_bytes=1_000_000)
    prefix = "<s><|system|>" + "the quick brown fox jumps over the lazy dog " * 500 + "<|user|>"
    chunked.encode(prefix + "what does the fox do?")
    found = chunked.look_up(prefix + "and what about the dog?")
    assert found.unseen == ["and what about the dog?"]


def test_a_changed_beginning_does_not_spoil_the_segments_behind_it() -> None:
    chunked = ChunkedTokenizer(KINDS["gpt2"](), cache_bytes=1_000_000)
    document = "the quick brown fox jumps over the lazy dog " * 100
    chunked.encode(f"<s><|system|>be brief<|user|>{document}")
    assert chunked.look_up(f"<s><|system|>be verbose<|user|>{document}").unseen == ["be verbose"]


def test_long_work_leaves_the_event_loop_as_the_tokenizer_is_slow_or_fast() -> None:
    """By what it took before, on this machine and with this vocabulary."""
    now_s, took_s = 0.0, 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += took_s / 2
        return now_s

    pace = Pace(clock)
    assert (pace.fits_in_place(2_000), pace.fits_in_place(3_000)) == (True, False), "by the guess"
    took_s = 2 * 1000 * 4e-6
    for _ in range(50):
        pace.measured(lambda texts: [array("I")] * len(texts), ["x" * 500] * 2)
    assert (pace.fits_in_place(240), pace.fits_in_place(260)) == (True, False)
    took_s = 0.0
    for _ in range(50):
        pace.measured(lambda texts: [array("I")] * len(texts), ["x" * 500] * 2)
    assert (pace.fits_in_place(19_000), pace.fits_in_place(21_000)) == (True, False), "no tokenizer is faster"


def test_short_texts_and_no_clock_measure_nothing() -> None:
    for pace in (Pace(lambda: 1e9), Pace(None)):
        pace.measured(lambda texts: [array("I")], ["x" * (499 if pace._now_s else 10_000)])
        assert pace.s_per_character == FIRST_GUESS_S


def test_a_repeated_chunk_is_tokenised_once() -> None:
    chunked = ChunkedTokenizer(KINDS["gpt2"](), cache_bytes=1_000_000)
    found = chunked.look_up("<s>hello<s>hello<s>")
    assert found.unseen == ["<s>", "hello"]


@given(st.lists(st.tuples(st.text(max_size=20), st.booleans()), max_size=200), st.integers(0, 2000))
def test_the_cache_is_bounded_and_never_wrong(uses: list[tuple[str, bool]], max_bytes: int) -> None:
    cache = ChunkCache(max_bytes)
    for chunk, write in uses:
        expected = array("I", map(ord, chunk))
        if write:
            cache.put(chunk, expected)
        else:
            assert cache.get(chunk) in (None, expected)
        assert cache.nbytes <= max_bytes
    assert cache.hits + cache.misses == sum(not write for _, write in uses)


def test_the_cache_keeps_what_was_used_last() -> None:
    one, two, three = array("I", [1]), array("I", [2]), array("I", [3])
    cache = ChunkCache(max_bytes=2 * (ENTRY_BYTES + sys.getsizeof("aa") + 4))
    cache.put("aa", one)
    cache.put("bb", two)
    cache.get("aa")
    cache.put("cc", three)
    assert (cache.get("aa"), cache.get("bb"), cache.get("cc")) == (one, None, three)


@pytest.mark.slow
def test_the_cache_takes_as_much_memory_as_it_says() -> None:
    """Within a third: what the allocator rounds up is not counted."""
    chunked = ChunkedTokenizer(KINDS["llama3"](), cache_bytes=1 << 30)
    texts = ["".join(f" {number:x}" for number in range(start, start + 20_000)) for start in range(0, 200_000, 20_000)]
    for text in texts[:2]:
        chunked.encode(text)
    before = chunked.cache.nbytes
    tracemalloc.start()
    for text in texts[2:]:
        chunked.encode(text)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held == pytest.approx(chunked.cache.nbytes - before, rel=0.33)
