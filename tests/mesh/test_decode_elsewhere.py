"""A real mesh whose step costs were measured: `penstock` decides after each prefill who decodes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.reader import Reader
from tests.mesh.running_mesh import RunningMesh

pytest.importorskip("ucxx", reason="KV transfers need UCX")


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[RunningMesh]:
    """Two simulated instances, one of which was profiled."""
    fast = ("--engine", "simulated", "--engine-arg", "time_scale=0.2")  # the profile takes a fifth of the time, too
    running = RunningMesh(tmp_path, *fast, "--workers", "2", "--profile")
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


def prompt(story: int) -> str:
    """Some 4,000 tokens that no other begins with."""
    return f"Story {story}. " + " ".join(f"chapter {number} of {story}" for number in range(400))


def explain(mesh: RunningMesh, reader: Reader) -> dict[str, Any]:
    answer = mesh.cli("explain", reader.request_id, "--json")
    assert answer.returncode == 0, answer.stderr
    explanation: dict[str, Any] = json.loads(answer.stdout)
    return explanation


def test_answers_are_decoded_where_no_prompts_come_and_say_the_same(mesh: RunningMesh, measured: RunningMesh) -> None:
    readers = [Reader(measured, prompt(story), tokens=100) for story in range(10)]
    texts = [reader.whole_text() for reader in readers]
    explanations = [explain(measured, reader) for reader in readers]
    moved = [each for each in explanations if each["decode_instance_id"] not in ("", each["chosen_instance_id"])]
    assert moved, "with so many prompts some answer is better decoded apart from them"
    for each in moved:
        scores = {score["instance_id"]: score["decode_score"] for score in each["scores"]}
        assert scores[each["decode_instance_id"]] < scores[each["chosen_instance_id"]]
    shown = measured.cli("explain", moved[0]["request_id"]).stdout
    assert f"decoded by {moved[0]['decode_instance_id']}: score = ms of the answer" in shown
    assert [Reader(mesh, prompt(story), tokens=100).whole_text() for story in range(10)] == texts
