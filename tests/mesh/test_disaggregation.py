"""A real mesh with an instance for prefill and two for decode: nothing of the split shows in the text."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.in_time import eventually
from tests.mesh.reader import Reader
from tests.mesh.running_mesh import RunningMesh

pytest.importorskip("ucxx", reason="KV transfers need UCX")

PREFILL = "demo-large-prefill-0"
DECODE = ("demo-large-decode-0", "demo-large-decode-1")
TOKENS = 200


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """One instance computes prompts, two decode."""
    running = RunningMesh(tmp_path_factory.mktemp("split"), "--engine", "simulated", "--prefill", "1", "--decode", "2")
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


@pytest.fixture(scope="module")
def truth(mesh: RunningMesh) -> list[str]:
    """What instances say that do both phases."""
    return [reader.whole_text() for reader in [Reader(mesh, prompt, TOKENS) for prompt in prompts(6)]]


def explained(mesh: RunningMesh, request_id: str) -> dict[str, Any]:
    answer = mesh.cli("explain", request_id, "--json")
    assert answer.returncode == 0, answer.stderr
    explanation: dict[str, Any] = json.loads(answer.stdout)
    return explanation


def decoding(mesh: RunningMesh, instance_id: str) -> int:
    """How many requests an instance decodes now."""
    loads = {each["instance_id"]: each["load"] for each in mesh.status()["instances"]}
    return int(loads[instance_id]["decoding_requests"])


def prompts(count: int) -> list[str]:
    return [f"part {number} " + "of a long story " * (20 * number) for number in range(count)]


def test_the_text_is_that_of_one_instance_and_explain_shows_both_choices(split: RunningMesh, truth: list[str]) -> None:
    with split.held():  # so that few tokens are decoded before the hand-off
        readers = [Reader(split, prompt, TOKENS) for prompt in prompts(6)]
        assert {reader.instance for reader in readers} == {PREFILL}
        eventually(lambda: sum(decoding(split, name) for name in DECODE) == 6, 60, "all are decoded where they should")
    texts = [reader.whole_text() for reader in readers]
    assert texts == truth
    explanations = [explained(split, reader.request_id) for reader in readers]
    assert {each["chosen_instance_id"] for each in explanations} == {PREFILL}
    assert {each["decode_instance_id"] for each in explanations} == set(DECODE)
    assert all("KV tokens" in each["decode_rule"] for each in explanations)
    spoken = split.cli("explain", readers[0].request_id)
    assert f"decoded by {explanations[0]['decode_instance_id']}" in spoken.stdout
    phases = {each["instance_id"]: each["phase"] for each in split.status()["instances"]}
    assert phases == {PREFILL: "prefill", DECODE[0]: "decode", DECODE[1]: "decode"}

    def generated() -> dict[str, int]:
        loads = {each["instance_id"]: each["load"] for each in split.status()["instances"]}
        return {name: int(load["generated_tokens_total"]) for name, load in loads.items()}

    eventually(lambda: sum(generated().values()) >= 6 * TOKENS, 60, "all tokens are reported")
    assert generated()[PREFILL] < 6 * TOKENS / 4


def test_a_killed_decode_instance_costs_no_stream(split: RunningMesh, truth: list[str]) -> None:
    victim = DECODE[0]
    with split.held():
        readers = [Reader(split, prompt, TOKENS) for prompt in prompts(6)]
        eventually(lambda: decoding(split, victim) > 0, 60, "the victim decodes")
        split.kill(victim)
    texts = [reader.whole_text() for reader in readers]
    assert texts == truth
    explanations = [explained(split, each.request_id) for each in readers]
    recovered = [each for each in explanations if "decodes already" in each["decode_rule"]]
    assert recovered, "the victim had requests"
    assert {each["chosen_instance_id"] for each in recovered} <= set(DECODE)
    eventually(lambda: set(split.instances().values()) == {"ready"}, 60, "the victim is back")


def test_without_a_decode_instance_the_prefill_instance_does_both(mesh: RunningMesh, split: RunningMesh) -> None:
    pids = [split.pid(name) for name in DECODE]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        stale = {PREFILL: "ready", DECODE[0]: "stale", DECODE[1]: "stale"}
        eventually(lambda: split.instances() == stale, 60, "both decode instances are stale")
        reader = Reader(split, "all alone", tokens=100)
        text = reader.whole_text()
        explanation = explained(split, reader.request_id)
        assert (explanation["chosen_instance_id"], explanation["decode_instance_id"]) == (PREFILL, PREFILL)
        assert "does both" in explanation["decode_rule"]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert text == Reader(mesh, "all alone", tokens=100).whole_text()
    eventually(lambda: set(split.instances().values()) == {"ready"}, 60, "both are back")
