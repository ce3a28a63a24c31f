import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.traces.prompt import TokenRange, prompt_token_ids
from simulator.traces.request import TraceRequest

TOKENS = TokenRange(3, 500)


@given(
    st.integers(1, 3000),
    st.lists(st.integers(0, 2**62 - 1), max_size=5),
    st.integers(0, 2**32),
    st.integers(0, 2**20),
    st.integers(1, 2**31),
)
def test_prompts_have_the_asked_length_within_the_vocabulary(
    input_tokens: int, blocks: list[int], seed: int, index: int, end: int
) -> None:
    request = TraceRequest(0.0, input_tokens, 1, tuple(blocks), 512)
    ids = prompt_token_ids(request, index, seed, TokenRange(0, end))
    assert len(ids) == input_tokens
    assert min(ids) >= 0
    assert max(ids) < end


def test_equal_blocks_give_equal_tokens_and_the_rest_differs() -> None:
    one = prompt_token_ids(TraceRequest(0.0, 1300, 1, (4, 5, 6), 512), 0, 1, TOKENS)
    two = prompt_token_ids(TraceRequest(9.0, 1100, 1, (4, 5, 7), 512), 1, 1, TOKENS)
    assert one[:1024] == two[:1024]
    assert one[1024:1100] != two[1024:]
    # A partial block is the beginning of the full one, as a conversation's next turn needs.
    longer = prompt_token_ids(TraceRequest(0.0, 1500, 1, (4, 5, 6), 512), 2, 1, TOKENS)
    assert longer[:1300] == one


def test_tokens_behind_the_blocks_belong_to_the_request() -> None:
    request = TraceRequest(0.0, 40, 1, (4,), 16)
    one, two = (prompt_token_ids(request, index, 1, TOKENS) for index in (0, 1))
    assert one[:16] == two[:16]
    assert one[16:] != two[16:]


def test_the_seed_changes_every_block() -> None:
    request = TraceRequest(0.0, 64, 1, (4,), 64)
    assert prompt_token_ids(request, 0, 1, TOKENS) != prompt_token_ids(request, 0, 2, TOKENS)


def test_token_ids_spread_over_the_vocabulary() -> None:
    ids = prompt_token_ids(TraceRequest(0.0, 5000, 1), 0, 0, TokenRange(3, 13))
    assert set(ids) == set(range(3, 13))


@pytest.mark.parametrize(("first", "end"), [(5, 5), (-1, 4), (0, 1 << 32)])
def test_an_impossible_range_is_refused(first: int, end: int) -> None:
    with pytest.raises(ValueError, match="range of token ids"):
        TokenRange(first, end)
