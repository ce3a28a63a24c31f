"""What `penstock top` draws."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from services.cli.top import LEAST_WIDTH, as_plain, screen
from services.frontend.console.state import State
from services.frontend.console.view import View
from services.frontend.console.window import Objectives
from tests.unit.services.frontend.console.looks import ended, load, look, worker

LONG = "a-model-with-a-name-that-is-longer-than-anyone-should-give-to-a-model"


def state(**fields: Any) -> State:
    view = View(Objectives(1000, 100))
    view.add(look(**fields))
    return view.add(look(seconds=1, **fields))


def drawn(shown: State, width: int = LEAST_WIDTH, height: int = 24) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(screen(shown, width, height))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_it_fits_the_terminal_with_a_thousand_instances_and_long_names(width: int) -> None:
    workers = [worker(number, model=LONG) for number in range(1000)]
    loads = [load(running_requests=1000, queued_requests=1000, queued_prefill_tokens=10**6) for _ in workers]
    requests = [ended(1, model=LONG), ended(2, model="n" * 200)]
    lines = drawn(state(workers=workers, loads=loads, requests=requests, states=["stale"] * 1000), width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24
    assert any("more instances" in line for line in lines)


def test_numbers_are_whole_at_eighty_columns() -> None:
    lines = drawn(state(requests=[ended(number, first_token_ms=12_345.0, ended_ms=99_999.0) for number in range(1, 9)]))
    (row,) = (line for line in lines if line.startswith("m "))
    assert "12.3 s" in row
    assert "…" not in row


def test_who_is_not_well_comes_first_and_faults_above_all() -> None:
    loads = [load(running_requests=9), load(), load(running_requests=1)]
    shown = state(workers=[worker(number) for number in range(3)], loads=loads, states=["ready", "stale", "ready"])
    lines = drawn(shown)
    assert lines[2].startswith("error: w0001 says nothing of its load")
    names = [line.split()[0] for line in lines if line.startswith("w")]
    assert names == ["w0001", "w0000", "w0002"]


def test_a_mesh_without_anything_can_be_drawn() -> None:
    lines = drawn(state(workers=[], control=[]))
    assert any("no request has ended yet" in line for line in lines)


def test_json_has_instances_as_objects() -> None:
    told = json.loads(json.dumps(as_plain(state(requests=[ended(1)]))))
    assert told["instances"][0]["instance_id"] == "w0000"
    assert told["models"][0]["ttft_ms"]["p95"] == 100.0
    assert "running" in told["now"]
