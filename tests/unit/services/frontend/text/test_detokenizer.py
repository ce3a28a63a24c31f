import functools
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.text.detokenizer import MAX_PENDING_TOKENS, REPLACEMENT, WindowDetokenizer
from services.frontend.text.model_text import ModelText
from tests.unit.services.frontend.checkpoints import KINDS

texts = st.text(max_size=200) | st.lists(
    st.sampled_from(["the fox ", "🙂", "👩‍👩‍👧", "你好", "é", " ", "\n", "x1 "]), max_size=40
).map("".join)


@functools.cache
def model_text(kind: str) -> ModelText:
    return ModelText(KINDS[kind](), None, frozenset())


def cut(items: list[int], cuts: list[int]) -> list[list[int]]:
    borders = sorted({0, len(items), *(min(at, len(items)) for at in cuts)})
    return [items[start:end] for start, end in pairwise(borders)]


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "metaspace", "unigram"])
@given(text=texts, cuts=st.lists(st.integers(0, 300), max_size=20))
def test_the_pieces_are_the_text_of_the_whole(kind: str, text: str, cuts: list[int]) -> None:
    model = model_text(kind)
    ids = model.chunked.encode(text)
    detokenizer = model.detokenizer([])
    pieces = [detokenizer.push(part) for part in cut(ids, cuts)]
    assert "".join([*pieces, detokenizer.finish()]) == model.decode(ids).rstrip(REPLACEMENT)


@given(text=texts)
def test_byte_level_text_never_holds_half_a_character(text: str) -> None:
    model = model_text("gpt2")
    detokenizer = model.detokenizer([])
    so_far = ""
    for token_id in model.chunked.encode(text):
        so_far += detokenizer.push([token_id])
        assert text.startswith(so_far)
    assert so_far + detokenizer.finish() == text.rstrip(REPLACEMENT)


@given(ids=st.lists(st.integers(0, 599), max_size=60), cuts=st.lists(st.integers(0, 60), max_size=10))
def test_arbitrary_tokens_decode_as_the_tokenizer_does(ids: list[int], cuts: list[int]) -> None:
    model = model_text("gpt2")
    detokenizer = model.detokenizer([])
    pieces = [detokenizer.push(part) for part in cut(ids, cuts)]
    assert "".join([*pieces, detokenizer.finish()]) == model.decode(ids).rstrip(REPLACEMENT)


@pytest.mark.parametrize("kind", ["gpt2", "metaspace"])
def test_an_answer_that_ends_within_a_character_says_nothing_of_it(kind: str) -> None:
    model = model_text(kind)
    smile = model.chunked.encode("🙂")
    assert len(smile) > 1, "a character of several tokens"
    ids = [*model.chunked.encode("so"), *smile[:-1]]
    cut_short = model.detokenizer([])
    assert cut_short.push(ids) + cut_short.finish() == model.decode(ids).rstrip(REPLACEMENT)
    assert model.decode(ids).endswith(REPLACEMENT)
    amid, longer = model.detokenizer([]), [*ids, *model.chunked.encode("x")]
    assert amid.push(longer) + amid.finish() == model.decode(longer)


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    detokenizer = model_text("gpt2").detokenizer([])
    assert detokenizer.push([10**6]) == ""
    assert detokenizer.push([10**6, 10**6]) == ""


def test_the_window_stays_short() -> None:
    seen: list[int] = []

    def decode(ids: list[int]) -> str:
        seen.append(len(ids))
        return "".join("" if token_id == 0 else "\ufffd" if token_id == 1 else "x" for token_id in ids)

    detokenizer = WindowDetokenizer(decode)
    for ids in ([2] * 100, [0] * 100, [1] * 100, [2]):
        detokenizer.push(ids)
    assert max(seen) <= 2 * MAX_PENDING_TOKENS + 2


def test_an_answer_that_goes_on_in_a_word_gets_no_blank() -> None:
    model = model_text("metaspace")
    whole = model.chunked.encode("the quick brown fox")
    detokenizer = model.detokenizer(whole[:3])
    answer = detokenizer.push(whole[3:]) + detokenizer.finish()
    assert model.decode(whole[:3]) + answer == "the quick brown fox"


def test_special_tokens_are_not_shown_but_logprobs_name_them() -> None:
    model = model_text("gpt2")
    assert model.detokenizer([]).push([1]) == ""
    assert model.token_text(1) == ("</s>", b"</s>")
