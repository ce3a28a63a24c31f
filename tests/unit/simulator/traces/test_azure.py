from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import TraceError
from simulator.traces.azure import is_azure_header, parse_azure
from simulator.traces.request import TraceRequest

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
START = datetime(2023, 11, 16, 18, 15, 46, 680590)


def test_reads_what_was_published() -> None:
    lines = [HEADER, "2023-11-16 18:15:46.6805900,374,44\n", "2023-11-16 18:15:50.9951690,396,109\n"]
    assert list(parse_azure(lines)) == [TraceRequest(0.0, 374, 44), TraceRequest(4.314579, 396, 109)]


def test_windows_line_ends_and_blank_lines_are_fine() -> None:
    lines = [HEADER.replace("\n", "\r\n"), "2023-11-16 18:15:46.68,374,44\r\n", "\r\n"]
    assert list(parse_azure(lines)) == [TraceRequest(0.0, 374, 44)]
    assert is_azure_header(lines[0])


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=30)
)
def test_every_well_formed_trace_comes_back(rows: list[tuple[int, int, int]]) -> None:
    rows.sort()
    lines = [HEADER]
    for microseconds, input_tokens, output_tokens in rows:
        moment = START + timedelta(microseconds=microseconds)
        lines.append(f"{moment.strftime('%Y-%m-%d %H:%M:%S.%f')}0,{input_tokens},{output_tokens}\n")
    requests = list(parse_azure(lines))
    assert [(request.input_tokens, request.output_tokens) for request in requests] == [row[1:] for row in rows]
    assert [request.arrival_s for request in requests] == pytest.approx([(row[0] - rows[0][0]) / 1e6 for row in rows])


@pytest.mark.parametrize(
    "line",
    [
        "2023-11-16 18:15:46,374\n",
        "2023-11-16 18:15:46,374,44,5\n",
        "yesterday,374,44\n",
        "2023-11-16 18:15:46,many,44\n",
        "2023-11-16 18:15:46,374,0\n",
        "2023-11-16 18:15:46,-1,44\n",
        "2023-11-16 18:15:46,374,99999999999\n",
        "2023-11-16 18:15:46+00:00,374,44\n",
        "2023-11-16 18:15:00,374,44\n",
    ],
)
def test_a_malformed_line_is_named_by_its_number(line: str) -> None:
    lines = [HEADER, "2023-11-16 18:15:45,374,44\n", line, "2023-11-16 18:15:47,1,1\n"]
    with pytest.raises(TraceError, match=r"line 3\b"):
        list(parse_azure(lines))


@given(st.lists(st.text(max_size=60), max_size=5))
def test_no_text_fails_in_another_way(texts: list[str]) -> None:
    story = "line 0: nothing wrong"
    try:
        list(parse_azure([HEADER, *texts]))
    except TraceError as error:
        story = str(error)
    assert story.startswith("line ")


def test_another_header_is_refused() -> None:
    with pytest.raises(TraceError, match=r"line 1: expected the columns TIMESTAMP"):
        list(parse_azure(["time,in,out\n"]))
    with pytest.raises(TraceError, match=r"line 1"):
        list(parse_azure([]))


def test_requests_come_before_later_lines_are_read() -> None:
    requests = parse_azure(iter([HEADER, "2023-11-16 18:15:46,1,2\n", "nonsense\n"]))
    assert next(requests) == TraceRequest(0.0, 1, 2)
