import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import TraceError
from simulator.traces.mooncake import is_mooncake_line, parse_mooncake
from simulator.traces.request import TraceRequest

GOOD = '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}\n'


def test_reads_what_was_published() -> None:
    assert list(parse_mooncake([GOOD, "\n"])) == [TraceRequest(27.482, 600, 52, (46, 47), 512)]
    assert is_mooncake_line(GOOD)
    assert not is_mooncake_line('{"timestamp": 1}')


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(1, 4000), st.integers(1, 4000)), max_size=20))
def test_every_well_formed_trace_comes_back(rows: list[tuple[int, int, int]]) -> None:
    rows.sort()
    lines = [
        json.dumps(
            {
                "timestamp": timestamp,
                "input_length": input_length,
                "output_length": output_length,
                "hash_ids": list(range(-(-input_length // 512))),
            }
        )
        for timestamp, input_length, output_length in rows
    ]
    requests = list(parse_mooncake(lines))
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in requests] == [
        (timestamp / 1000, *lengths) for timestamp, *lengths in rows
    ]
    assert all(len(r.prefix_block_ids) * r.block_tokens >= r.input_tokens for r in requests)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"timestamp": 27482, "input_length": 600, "output_length": 52}',
        '{"timestamp": "soon", "input_length": 600, "output_length": 52, "hash_ids": []}',
        '{"timestamp": 27482, "input_length": 0, "output_length": 52, "hash_ids": []}',
        '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [1, 2, 3]}',
        '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [-1]}',
        '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [18446744073709551616]}',
        '{"timestamp": 27481, "input_length": 600, "output_length": 52, "hash_ids": []}',
    ],
)
def test_a_malformed_line_is_named_by_its_number(line: str) -> None:
    with pytest.raises(TraceError, match=r"line 2\b"):
        list(parse_mooncake([GOOD, line]))


@given(st.lists(st.text(max_size=60), max_size=5))
def test_no_text_fails_in_another_way(texts: list[str]) -> None:
    story = "line 0: nothing wrong"
    try:
        list(parse_mooncake([GOOD, *texts]))
    except TraceError as error:
        story = str(error)
    assert story.startswith("line ")
