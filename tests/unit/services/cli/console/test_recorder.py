"""A simulation that is recorded for the console goes as it does without, and is shown as it went."""

from typing import Any

import msgspec
import pytest

from controlplane.model.instance import InstancePhase
from controlplane.policies.registry import create_policy
from services.cli.console.longest_stories import MAX_STORIES
from services.cli.console.simulated import SimulationRecorder
from services.frontend.console.state import COLUMNS
from services.frontend.console.window import Objectives
from simulator.cluster.config import ClusterConfig, Failure, InstanceSpec
from simulator.cluster.control import Controller
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.report.outcome import RequestOutcome
from simulator.traces.request import TraceRequest

pytestmark = pytest.mark.slow


def requests(count: int, every_s: float = 0.1) -> list[TraceRequest]:
    return [TraceRequest(every_s * number, 200 + number % 50, 60) for number in range(count)]


def run(
    trace: list[TraceRequest], config: ClusterConfig, policy: str = "penstock", *, is_recorded: bool = True
) -> tuple[list[RequestOutcome], SimulationRecorder]:
    chosen = create_policy(policy)
    recorder = SimulationRecorder.of(policy, chosen, "off", Objectives(1000.0, 100.0), trace[-1].arrival_s)
    controllers: list[Controller] = [recorder] if is_recorded else []
    return ClusterSimulation(trace, config, LinearCost(), chosen, controllers).run(), recorder


def shown(recorder: SimulationRecorder) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.json.decode(recorder.recorder.encode({"requests": "all"}))
    return document


@pytest.mark.parametrize("report_interval_ms", [0.0, 50.0])
def test_recording_changes_nothing(report_interval_ms: float) -> None:
    config = ClusterConfig(3, InstanceConfig(), report_interval_ms=report_interval_ms, failures=(Failure(1, 2.0, 1.0),))
    trace = requests(120)
    assert run(trace, config)[0] == run(trace, config, is_recorded=False)[0]


def test_it_shows_requests_placements_and_stories() -> None:
    outcomes, recorder = run(requests(120), ClusterConfig(3, InstanceConfig()))
    document = shown(recorder)
    last = document["updates"][-1]["body"]
    assert document["requests"] == len(outcomes) == len(document["stories"])
    assert sum(row["requests"] for row in last["models"]) <= len(outcomes)
    middle = document["updates"][len(document["updates"]) // 2]["body"]
    assert middle["running_total"] > 0
    placement = middle["placements"][0]
    assert {"wait_ms", "prefill_ms", "decode_ms"} <= placement["options"][0]["parts"].keys()
    assert placement["options"][0]["is_chosen"]
    story = document["stories"]["r7"]
    assert [span["name"] for span in story["spans"]] == ["admission", "placement", "prefill", "decode"]
    assert story["total_ms"] == pytest.approx(outcomes[7].e2e_ms, abs=0.01)
    assert story["placement"]["chosen"] == outcomes[7].instance_id
    assert not any(update["body"]["faults"] for update in document["updates"])


def test_a_death_is_an_event_and_its_requests_are_recovered() -> None:
    config = ClusterConfig(2, InstanceConfig(), failures=(Failure(1, 3.0, 2.0),))
    _, recorder = run(requests(120), config)
    document = shown(recorder)
    told = {event["what"] for update in document["updates"] for event in update["body"]["events"]}
    assert {"worker instance-1 has left", "worker instance-1 has joined"} <= told
    assert any(update["gone"] == ["instance-1"] for update in document["updates"])
    assert any(story["summary"]["recoveries"] for story in document["stories"].values())


def test_requests_that_move_say_from_where_to_where() -> None:
    specs = tuple(
        InstanceSpec(InstanceConfig(), phase=phase) for phase in (InstancePhase.PREFILL, InstancePhase.DECODE)
    )
    _, recorder = run(requests(40), ClusterConfig(2, InstanceConfig(), specs=specs))
    document = shown(recorder)
    moves = document["updates"][-1]["body"]["moves"]
    assert {(move["source"], move["target"], move["outcome"]) for move in moves} == {
        ("instance-0", "instance-1", "moved")
    }
    assert any(span["name"] == "move" for span in document["stories"]["r3"]["spans"])


def test_the_instances_of_each_moment_have_the_load_of_that_moment() -> None:
    _, recorder = run(requests(120), ClusterConfig(3, InstanceConfig()))
    column = COLUMNS.index("generated_s")
    rates = [row[column] for update in shown(recorder)["updates"][2:] for row in update["instances"]]
    assert max(rates) > 0


def test_only_the_longest_stories_are_kept() -> None:
    count = MAX_STORIES + 100
    outcomes, recorder = run(requests(count, 0.02), ClusterConfig(4, InstanceConfig()), "least_loaded")
    stories = shown(recorder)["stories"]
    assert len(stories) == MAX_STORIES
    longest = sorted(range(count), key=lambda index: -outcomes[index].e2e_ms)[:50]
    assert {f"r{index}" for index in longest} <= stories.keys()


def test_a_request_that_nobody_ever_had_is_a_failure() -> None:
    config = ClusterConfig(1, InstanceConfig(), failures=(Failure(0, 0.0),))
    outcomes, recorder = run(requests(3), config)
    assert all(outcome.error for outcome in outcomes)
    assert {story["status"] for story in shown(recorder)["stories"].values()} == {503}
