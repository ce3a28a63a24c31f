"""Arrow's pools in a real mesh, and policies switched under load: no request is dropped, and every decision is what the
same policy decides outside of the mesh."""

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.in_time import eventually, still
from tests.mesh.reader import Reader
from tests.mesh.running_mesh import RunningMesh

pytest.importorskip("ucxx", reason="KV transfers need UCX")

TOKENS = 200
TIME_SCALE = 0.2
"""The profile is measured in a fifth of the time."""
PREFILLING, DECODING = {"prefill", "decode_to_prefill"}, {"decode", "prefill_to_decode"}


class RecordedMesh(RunningMesh):
    """Four simulated instances under Arrow, and a recording of what their scheduler decides."""

    def __init__(self, run_dir: Path) -> None:
        self.recording = run_dir / "decisions.jsonl"
        environment = {"PENSTOCK_SERVE_SCHEDULER_RECORD": str(self.recording)}
        super().__init__(
            run_dir,
            *("--engine", "simulated", "--engine-arg", f"time_scale={TIME_SCALE}"),
            *("--workers", "4", "--policy", "arrow", "--profile"),
            environment=environment,
        )


@pytest.fixture(scope="module")
def arrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedMesh]:
    running = RecordedMesh(tmp_path_factory.mktemp("arrow"))
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


def prompts(count: int) -> list[str]:
    return [f"tale {number} " + "told at length " * (15 * number) for number in range(count)]


def truth(mesh: RunningMesh, count: int) -> list[str]:
    return [reader.whole_text() for reader in [Reader(mesh, prompt, TOKENS) for prompt in prompts(count)]]


def read_all(mesh: RunningMesh, count: int) -> list[Reader]:
    readers = [Reader(mesh, prompt, TOKENS) for prompt in prompts(count)]
    for reader in readers:
        reader.whole_text()
    return readers


def pools(mesh: RunningMesh) -> dict[str, str]:
    return {each["instance_id"]: each["pool"] for each in mesh.status()["instances"]}


def test_requests_go_through_the_pools(mesh: RunningMesh, arrow: RecordedMesh) -> None:
    # Half and half at the start; measuring the profile may have lent an instance since, which stays where it is.
    eventually(lambda: set(pools(arrow).values()) == {"prefill", "decode"}, 60, "both pools")
    readers = read_all(arrow, 6)
    assert [reader.text for reader in readers] == truth(mesh, 6)
    explained = [json.loads(arrow.cli("explain", reader.request_id, "--json").stdout) for reader in readers]
    # What a busy worker seems to have lost goes on where requests are decoded; its prompt has its tokens so far then.
    prompt_tokens = {reader.request_id: reader.usage.prompt_tokens for reader in readers}
    answers = [each for each in explained if each["prompt_tokens"] == prompt_tokens[each["request_id"]]]
    # As they were when each was placed: on a busy machine instances change pools in between.
    had = {each["request_id"]: {score["instance_id"]: score["pool"] for score in each["scores"]} for each in answers}
    assert {had[each["request_id"]][each["chosen_instance_id"]] for each in answers} <= PREFILLING
    moved = [each for each in answers if each["decode_instance_id"] != each["chosen_instance_id"]]
    assert moved or len(answers) < len(explained), "requests are decoded by the decode pool"
    assert all("Max Running Tokens" in each["decode_rule"] for each in moved)
    # That is decided at the end of a prefill, and an instance may have been lent to decoding since the placement.
    still(
        any(had[each["request_id"]][each["decode_instance_id"]] in DECODING for each in moved),
        "an instance of the decode pool is there for some, from their placement to the end of their prefill",
    )
    assert "decode" in arrow.cli("status").stdout
    (scheduler,) = (role for role in arrow.status()["roles"] if role["role"] == "scheduler")
    with urllib.request.urlopen(f"http://{scheduler['metrics_address']}/metrics", timeout=10) as page:
        assert 'penstock_scheduler_pool{instance="demo-large-0",pool="' in page.read().decode()


def test_arrow_predicts_by_what_was_measured_at_the_start(arrow: RecordedMesh) -> None:
    profile = json.loads(arrow.cli("profile", "show", "--json").stdout)

    def policy() -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(arrow.cli("policy", "--json").stdout)
        return shown

    key = "/penstock/profiles/simulated/demo-large/simulated"
    eventually(lambda: policy()["profile"] == key, 60, "the scheduler has taken the profile in")
    parameters = policy()["parameters"]
    assert parameters["prefill_token_ms"] == profile["ttft"]["token_ms"]
    assert parameters["prefill_fixed_ms"] == profile["ttft"]["fixed_ms"]
    assert parameters["max_running_tokens"] > 0


def test_an_slo_that_cannot_be_kept_moves_instances_to_prefill_and_no_stream_notices(
    mesh: RunningMesh, arrow: RecordedMesh
) -> None:
    hurried = arrow.cli("policy", "arrow", "--set", "ttft_ms=1")
    assert hurried.returncode == 0, hurried.stderr
    try:
        texts = [reader.text for reader in read_all(arrow, 6)]

        def prefilling() -> int:
            return sum(pool in PREFILLING for pool in pools(arrow).values())

        eventually(lambda: prefilling() == 3, 60, "all but one instance are for prefill")
    finally:
        arrow.cli("policy", "arrow")
    assert texts == truth(mesh, 6)


def test_policies_are_switched_under_load_and_decide_the_same_outside(mesh: RunningMesh, arrow: RecordedMesh) -> None:
    expected = truth(mesh, 4)
    for name in ("lmetric", "arrow", "static_pd", "round_robin", "colocated", "arrow"):
        readers = [Reader(arrow, prompt, TOKENS) for prompt in prompts(4)]
        switched = arrow.cli("policy", name)
        assert switched.returncode == 0, switched.stderr
        assert [reader.whole_text() for reader in readers] == expected
    eventually(lambda: os.stat(arrow.recording).st_size > 1000, 60, "the recording is written")
    told = arrow.cli("decisions", str(arrow.recording), "--json")
    assert told.returncode == 0, told.stdout + told.stderr
    outcome = json.loads(told.stdout)
    assert set(outcome["policies"]) >= {"arrow", "lmetric", "static_pd", "round_robin", "colocated"}
    assert outcome["placements"] >= 24
    assert outcome["decode_placements"] >= 4
    assert outcome["equal"] == outcome["decisions"]
