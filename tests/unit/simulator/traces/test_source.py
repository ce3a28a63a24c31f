import gzip
import itertools
import os
from pathlib import Path

import pytest

from mesh.errors import TraceError
from simulator.traces.source import SYNTHETIC, TraceRecipe, open_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}\n'
AGENTIC = (
    '{"id": "a", "block_size": 64, '
    '"requests": [{"t": 0.0, "in": 200, "out": 52, "hash_runs": [[1, 3]], "api_time": 1.0}]}\n'
)
SERVEGEN = (
    '{"client": 0, "trace": [[0, 0.002, 1, "Gamma", 50.0, 1.0]], "dataset": {"0": {"input_tokens": {"9": 1.0}, '
    '"output_tokens": {"52": 1.0}}}}\n'
)
LENGTHS = "num_prefill_tokens,num_decode_tokens\n374,44\n"


@pytest.mark.parametrize("text", [AZURE, MOONCAKE, AGENTIC, SERVEGEN, LENGTHS])
@pytest.mark.parametrize("compressed", [False, True])
def test_the_format_is_told_by_the_content(tmp_path: Path, text: str, compressed: bool) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    (request,) = open_trace(TraceRecipe(str(path)))
    assert request.output_tokens in (44, 52)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1 is neither"),
        (b"hello\n", "line 1 is neither"),
        (AZURE.encode() + b"x\n", "line 3"),
        (b"\x1f\x8b broken", "cannot read"),
        (gzip.compress(AZURE.encode() * 100, mtime=0)[:40], "cannot read"),
        (AZURE.encode() + b"\xff\xfe\n", "cannot read"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        list(open_trace(TraceRecipe(str(path))))
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read the trace .*nowhere"):
        list(open_trace(TraceRecipe(str(tmp_path / "nowhere"))))


def test_the_synthetic_trace_is_seeded_ordered_and_reuses_its_history() -> None:
    recipe = TraceRecipe(SYNTHETIC, seed=3, clip_end_s=300)
    requests = list(open_trace(recipe))
    assert requests == list(open_trace(recipe))
    assert requests != list(open_trace(TraceRecipe(SYNTHETIC, seed=4, clip_end_s=300)))
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] < 300
    assert len(requests) / 300 == pytest.approx(4.0, rel=0.25)
    by_session = sorted(requests, key=lambda request: (request.session_id, request.arrival_s))
    turns = [
        (before, after) for before, after in itertools.pairwise(by_session) if before.session_id == after.session_id
    ]
    assert len(turns) > 100
    for before, after in turns:
        assert after.input_tokens > before.total_tokens
        assert after.prefix_block_ids[: len(before.prefix_block_ids)] == before.prefix_block_ids


def test_a_recipe_clips_in_the_time_of_the_trace_then_scales() -> None:
    plain = list(open_trace(TraceRecipe(SYNTHETIC, clip_start_s=10, clip_end_s=20)))
    denser = list(open_trace(TraceRecipe(SYNTHETIC, clip_start_s=10, clip_end_s=20, rate_scale=2, length_scale=0.5)))
    assert [request.arrival_s / 2 for request in plain] == [request.arrival_s for request in denser]
    assert [round(request.input_tokens / 2) for request in plain] == [request.input_tokens for request in denser]


@pytest.fixture
def trace_dir() -> Path:
    directory = os.environ.get("PENSTOCK_DATA")
    if not directory:
        pytest.skip("PENSTOCK_DATA does not name the directory of the trace data")
    return Path(directory) / "traces"


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "count", "mean_input_tokens", "minutes"),
    [
        ("azure2023_conv.csv.gz", 19_366, 1155, 58.4),
        ("azure2023_code.csv.gz", 8_819, 2048, 57.3),
        ("mooncake_conversation.jsonl.gz", 12_031, 12_035, 59.0),
    ],
)
def test_published_traces_are_read_whole(
    trace_dir: Path, name: str, count: int, mean_input_tokens: float, minutes: float
) -> None:
    requests = list(open_trace(TraceRecipe(str(trace_dir / name))))
    assert len(requests) == count
    assert sum(request.input_tokens for request in requests) / count == pytest.approx(mean_input_tokens, abs=0.5)
    assert requests[-1].arrival_s / 60 == pytest.approx(minutes, abs=0.05)


@pytest.mark.data
def test_the_agentic_trace_is_read_whole(trace_dir: Path) -> None:
    requests = list(open_trace(TraceRecipe(str(trace_dir / "agentic_claude_code_A.jsonl.gz"))))
    assert len(requests) == 29_336
    assert sorted(request.input_tokens for request in requests)[len(requests) // 2] == pytest.approx(113_000, rel=0.01)
    sessions = {request.session_id for request in requests}
    assert len({session.partition("/")[0] for session in sessions}) == 451
    # Only the first of each loop comes by itself.
    assert sum(request.think_s is None for request in requests) == len(sessions)


@pytest.mark.data
def test_servegen_requests_have_the_lengths_of_their_clients(trace_dir: Path) -> None:
    recipe = TraceRecipe(str(trace_dir / "servegen_deepseek-r1.jsonl.gz"), seed=1)
    # The clients' means weighted by their rates: 1,527 tokens over the day, 1,354 over its first six hours.
    outputs = [request.output_tokens for request in itertools.islice(open_trace(recipe), 100_000)]
    assert sum(outputs) / len(outputs) == pytest.approx(1354, rel=0.05)


@pytest.mark.data
def test_lists_of_lengths_are_read_whole(trace_dir: Path) -> None:
    lengths = trace_dir.parent / "lengths"
    turns = list(open_trace(TraceRecipe(str(lengths / "sharegpt_8k_llama2.csv.gz"))))
    assert len(turns) == 30_731
    assert turns[-1].arrival_s == pytest.approx(30_731, rel=0.02)
    assert (
        len(list(open_trace(TraceRecipe(str(lengths / "sharegpt_300_llmservingsim.csv.gz"), part="qwen3-32b")))) == 300
    )
