"""Which rows of a step are passed on, with a model runner that the test plays."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from engine_worker.engines.vllm.hidden_states.capture import HiddenStateCapture, Rows, capture_obstacle
from engine_worker.engines.vllm.hidden_states.message import request_id_of


class Rowed(np.ndarray):
    """An array that says where it lives, as a tensor does."""

    is_cuda = False


@dataclass
class Batch:
    req_ids: list[str] = field(default_factory=list)


@dataclass
class Mask:
    np: Any


class Runner:
    """vLLM's model runner, as far as the capture looks at it."""

    def __init__(self) -> None:
        self.input_batch = Batch()
        self.optimistic_seq_lens_cpu = np.zeros(8, np.int32)
        self.discard_request_mask = Mask(np.zeros(8, np.bool_))

    def step(self, capture: HiddenStateCapture, rows: dict[str, tuple[int, bool]], states: int | None = None) -> None:
        """Compute logits of `rows`: request id to context length and whether its prompt is unfinished."""
        self.input_batch.req_ids = list(rows)
        for index, (context_tokens, is_unfinished) in enumerate(rows.values()):
            self.optimistic_seq_lens_cpu[index] = context_tokens
            self.discard_request_mask.np[index] = is_unfinished
        count = len(rows) if states is None else states
        hidden = np.arange(count, dtype=np.float32).reshape(-1, 1).view(Rowed)
        capture(None, ("vocabulary", hidden), {})


def test_every_kth_step_is_passed_on() -> None:
    runner, passed = Runner(), list[Rows]()
    capture = HiddenStateCapture(runner, 3, passed.append)
    for step in range(10):
        runner.step(capture, {"a": (5 + step, False)})
    assert [rows.step for rows in passed] == [3, 6, 9]
    assert [list(rows.context_tokens) for rows in passed] == [[7], [10], [13]]
    capture.every_steps = 0
    runner.step(capture, {"a": (20, False)})
    assert len(passed) == 3


def test_rows_in_the_middle_of_their_prompt_are_left_out() -> None:
    runner, passed = Runner(), list[Rows]()
    capture = HiddenStateCapture(runner, 1, passed.append)
    runner.step(capture, {"a": (5, False), "b": (32, True), "c": (9, False)})
    (rows,) = passed
    assert (list(rows.internal_ids), list(rows.context_tokens)) == (["a", "c"], [5, 9])
    assert rows.states[:, 0].tolist() == [0.0, 2.0]
    runner.step(capture, {"b": (64, True)})
    assert len(passed) == 1


def test_a_step_that_cannot_be_told_apart_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    runner, passed = Runner(), list[Rows]()
    capture = HiddenStateCapture(runner, 1, passed.append)
    for _ in range(3):
        runner.step(capture, {"a": (5, False), "b": (6, False)}, states=3)
    assert not passed
    assert capture.odd_steps_total == 3
    assert len(caplog.records) == 1


def test_states_may_be_named() -> None:
    runner, passed = Runner(), list[Rows]()
    capture = HiddenStateCapture(runner, 1, passed.append)
    runner.input_batch.req_ids = ["a"]
    capture(None, ("vocabulary",), {"hidden_states": np.zeros((1, 2), np.float32).view(Rowed)})
    assert len(passed) == 1


def test_other_model_runners_are_refused() -> None:
    assert capture_obstacle(Runner()) == ""
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in capture_obstacle(object())
    speculating = Runner()
    speculating.num_spec_tokens = 2  # type: ignore[attr-defined]
    assert "speculative decoding" in capture_obstacle(speculating)


def test_vllm_s_own_ids_end_in_eight_characters() -> None:
    assert request_id_of("chatcmpl-12-ab-0123abcd") == "chatcmpl-12-ab"
