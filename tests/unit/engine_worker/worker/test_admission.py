import math
from dataclasses import replace
from typing import Any

import pytest

from controlplane.model.request import EngineRequest
from engine_worker.admission import refusal
from tests.unit.engine_worker.worker.fake_engine import make_request


def refused(request: EngineRequest, asked: str = "m") -> str | None:
    return refusal(request, asked_model=asked, served_model="m")


def test_a_right_request_is_not_refused() -> None:
    assert refused(make_request("a", emitted=99, max_tokens=100)) is None


@pytest.mark.parametrize(
    ("request_", "asked", "reason"),
    [
        (make_request(""), "m", "request_id is empty"),
        (make_request("a"), "other", "serves 'm', not 'other'"),
        (make_request("a", prompt=0), "m", "prompt is empty"),
        (make_request("a", max_tokens=0), "m", "nothing is left to generate"),
        (make_request("a", max_tokens=5, emitted=5), "m", "5 tokens were emitted already"),
    ],
)
def test_what_can_never_be_served_is_refused(request_: EngineRequest, asked: str, reason: str) -> None:
    assert reason in (refused(request_, asked) or "")


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"min_p": -1.0},
        {"presence_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"repetition_penalty": 0.0},
        {"min_tokens": 101},
        {"logit_bias": ((7, math.inf),)},
    ],
)
def test_absurd_sampling_is_refused_by_name(wrong: dict[str, Any]) -> None:
    request = make_request("a", max_tokens=100)
    reason = refused(replace(request, sampling=replace(request.sampling, **wrong)))
    assert reason is not None
    assert reason.startswith(next(iter(wrong)))
