import pytest

from simulator.cluster.prefix import prompt_block_hashes
from simulator.traces.prompt import TokenRange, prompt_token_ids
from simulator.traces.request import TraceRequest


@pytest.mark.parametrize("trace_block_tokens", [7, 16, 48])
def test_hashes_are_equal_exactly_where_the_replayed_prefixes_are(trace_block_tokens: int) -> None:
    prompts = [(1, 2, 3, 4, 5, 6), (1, 2, 3, 9, 5, 6), (1, 2), (2, 1, 3, 4)]
    vocabulary = TokenRange(0, 1 << 30)
    requests = [TraceRequest(0.0, len(ids) * trace_block_tokens - 3, 1, ids, trace_block_tokens) for ids in prompts]
    tokens = [prompt_token_ids(request, index, 0, vocabulary) for index, request in enumerate(requests)]
    hashes = [prompt_block_hashes(request, 16) for request in requests]
    assert [len(each) for each in hashes] == [request.input_tokens // 16 for request in requests]
    for a in range(len(prompts)):
        for b in range(len(prompts)):
            for block in range(min(len(hashes[a]), len(hashes[b]))):
                prefix_tokens = (block + 1) * 16
                same = tokens[a][:prefix_tokens] == tokens[b][:prefix_tokens]
                names = -(-prefix_tokens // trace_block_tokens)
                assert (hashes[a][block] == hashes[b][block]) == (prompts[a][:names] == prompts[b][:names]) == same


def test_what_the_trace_does_not_name_has_no_hash() -> None:
    assert prompt_block_hashes(TraceRequest(0.0, 100, 1), 16) == ()
    assert len(prompt_block_hashes(TraceRequest(0.0, 100, 1, (5,), 40), 16)) == 2
