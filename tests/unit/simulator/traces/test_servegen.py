import json
from typing import Any

import numpy as np
import pytest

from mesh.errors import TraceError
from simulator.traces.request import TraceRequest
from simulator.traces.servegen import is_servegen_line, parse_servegen

LENGTHS = {"input_tokens": {"100": 0.75, "300": 0.25}, "output_tokens": {"7": 1.0}, "reason_ratio": {"0.5": 1.0}}


def client(*windows: list[Any], dataset: Any = LENGTHS) -> str:
    return json.dumps({"client": 1, "trace": windows, "dataset": {"0": dataset} if dataset else None})


def draw(*lines: str, seed: int = 0) -> list[TraceRequest]:
    return list(parse_servegen(lines, np.random.default_rng(seed)))


@pytest.mark.parametrize("kind", ["Gamma", "Weibull"])
@pytest.mark.parametrize("scale", [0.01, 50.0])
def test_rate_and_lengths_are_those_of_the_client(kind: str, scale: float) -> None:
    requests = draw(client([0, 8.0, 1.1, kind, 0.9, scale]))
    assert len(requests) == pytest.approx(4800, rel=0.06)  # the gaps are scaled to the rate, whatever their scale
    inputs = np.array([request.input_tokens for request in requests])
    assert set(inputs.tolist()) == {100, 300}
    assert (inputs == 100).mean() == pytest.approx(0.75, abs=0.03)
    assert {request.output_tokens for request in requests} == {7}


def test_burstiness_is_that_of_the_client() -> None:
    gaps_s = [
        np.diff([each.arrival_s for each in draw(client([0, 8.0, 0, "Gamma", shape, 1.0]))]) for shape in (0.1, 9)
    ]
    bursty, regular = (float(gaps.std() / gaps.mean()) for gaps in gaps_s)
    assert bursty == pytest.approx(1 / 0.1**0.5, rel=0.2)
    assert regular == pytest.approx(1 / 3, rel=0.1)


def test_clients_are_merged_in_order_and_windows_kept() -> None:
    lines = [
        client([600, 1.0, 1, "Gamma", 1.0, 1.0]),
        client([0, 0.5, 1, "Weibull", 1.0, 1.0], [1800, 1, 1, "Gamma", 1, 1]),
    ]
    requests = draw(*lines, client([0, 5.0, 1, "Gamma", 1.0, 1.0], dataset=None))
    times_s = [request.arrival_s for request in requests]
    assert times_s == sorted(times_s)
    assert {int(at_s // 600) for at_s in times_s} == {0, 1, 3}
    assert requests == draw(*lines)
    assert requests != draw(*lines, seed=1)


def test_lengths_change_with_the_window() -> None:
    late = {**LENGTHS, "output_tokens": {"9.4": 1.0}}
    line = json.dumps(
        {
            "client": 1,
            "trace": [[0, 0.2, 1, "Gamma", 1, 1], [1200, 0.2, 1, "Gamma", 1, 1]],
            "dataset": {"0": LENGTHS, "1200": late},
        }
    )
    assert {(request.arrival_s >= 1200, request.output_tokens) for request in draw(line)} == {(False, 7), (True, 9)}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        client([0, 1.0, 1, "Pareto", 1, 1]),
        client([0, 1, 1, "Gamma", 1, 1], dataset={**LENGTHS, "input_tokens": {}}),
    ],
)
def test_a_bad_line_is_named(line: str) -> None:
    assert is_servegen_line(client([0, 1.0, 1, "Gamma", 1.0, 1.0]))
    with pytest.raises(TraceError, match="line 2"):
        draw(client([0, 1.0, 1, "Gamma", 1.0, 1.0]), line)
