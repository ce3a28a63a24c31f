import json
from typing import Any

import numpy as np
import pytest

from mesh.errors import TraceError
from simulator.traces.agentic import SESSION_GAP_S, is_agentic_line, parse_agentic


def entry(t: float, **fields: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": 200, "out": 10, "hash_runs": [[1, 3]], **fields}


def session(name: str, *requests: dict[str, Any]) -> str:
    return json.dumps({"id": name, "block_size": 64, "requests": requests})


SESSION = session(
    "a",
    entry(0.0, api_time=4.0, think_time=0.0),
    entry(10.0, api_time=2.0, think_time=6.0),
    {"t": 12.0, "type": "subagent", "agent_id": "x", "requests": [entry(0.0), entry(5.0, api_time=1.0)]},
    entry(30.0, out=0),
)


def test_a_session_is_a_closed_loop_and_its_agents_have_their_own() -> None:
    requests = list(parse_agentic([SESSION], np.random.default_rng(0)))
    assert [(each.session_id, each.arrival_s, each.think_s) for each in requests] == [
        ("a", 0.0, None),
        ("a", 10.0, 6.0),
        ("a/x", 12.0, None),
        ("a/x", 17.0, 5.0),  # the trace says neither how long the answer before took nor the pause
        ("a", 30.0, 18.0),
    ]
    assert requests[-1].output_tokens == 1
    assert requests[0].block_tokens == 64


def test_sessions_start_apart_and_share_no_names() -> None:
    lines = [session(str(number), entry(0.0), entry(1.0)) for number in range(300)]
    requests = list(parse_agentic(lines, np.random.default_rng(1)))
    assert [each.arrival_s for each in requests] == sorted(each.arrival_s for each in requests)
    starts_s = sorted(each.arrival_s for each in requests if each.think_s is None)
    assert np.diff(starts_s).mean() == pytest.approx(SESSION_GAP_S, rel=0.2)
    names = {each.session_id: tuple(each.prefix_block_ids) for each in requests}
    assert len(set(names.values())) == 300
    assert requests == list(parse_agentic(lines, np.random.default_rng(1)))


def test_the_format_is_told_by_its_first_line() -> None:
    assert is_agentic_line(SESSION)
    assert not is_agentic_line('{"id": "a"}')


@pytest.mark.parametrize(
    "line", ["{", session("a", entry(0.0, **{"in": 0})), session("a", entry(0.0, hash_runs=[[1, -2]]))]
)
def test_a_bad_line_is_named(line: str) -> None:
    with pytest.raises(TraceError, match="line 2"):
        list(parse_agentic([SESSION, line], np.random.default_rng(0)))
