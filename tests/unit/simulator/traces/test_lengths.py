import numpy as np
import pytest

from mesh.errors import TraceError
from simulator.traces.lengths import is_lengths_header, parse_lengths
from simulator.traces.request import TraceRequest

PAIRS = "num_prefill_tokens,num_decode_tokens\n" + "".join(f"{number},{number + 5}\n" for number in range(1, 400))
TIMED = "workload,arrival_s,input_toks,output_toks\nalpha-1,2.5,10,20\nbeta-2,0.5,30,40\nalpha-1,1.5,50,60\n"
ANSWERS = "bench,model,uid,prompt_chars,output_token_len\nx,one,u,70,12\nx,two,u,1,0\n"


def read(text: str, part: str = "", seed: int = 0) -> list[TraceRequest]:
    return list(parse_lengths(text.splitlines(keepends=True), np.random.default_rng(seed), part))


def test_lengths_come_at_poisson_times_in_a_drawn_order() -> None:
    requests = read(PAIRS)
    assert sorted(request.input_tokens for request in requests) == list(range(1, 400))
    assert all(request.output_tokens == request.input_tokens + 5 for request in requests)
    gaps_s = np.diff([request.arrival_s for request in requests])
    assert gaps_s.mean() == pytest.approx(1.0, rel=0.15)
    assert gaps_s.std() == pytest.approx(1.0, rel=0.25)
    assert requests == read(PAIRS)
    assert requests != read(PAIRS, seed=1)


def test_times_that_the_list_has_are_kept() -> None:
    assert read(TIMED) == [TraceRequest(1.5, 50, 60), TraceRequest(2.5, 10, 20)]
    assert read(TIMED, "beta") == [TraceRequest(0.5, 30, 40)]


def test_prompts_in_characters() -> None:
    (request,) = read(ANSWERS, "one")
    assert (request.input_tokens, request.output_tokens) == (20, 12)
    (request,) = read(ANSWERS, "two")
    assert (request.input_tokens, request.output_tokens) == (1, 1)


def test_what_is_wrong_is_named() -> None:
    assert is_lengths_header(TIMED.splitlines()[0])
    with pytest.raises(TraceError, match="there are alpha-1, beta-2"):
        read(TIMED, "gamma")
    with pytest.raises(TraceError, match="line 3"):
        read("num_prefill_tokens,num_decode_tokens\n1,2\n1,x\n")
    with pytest.raises(TraceError, match="line 1"):
        read("a,b\n")
