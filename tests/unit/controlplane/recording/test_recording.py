"""What a live scheduler decided is what the same policies decide outside of it, over equal snapshots."""

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

import simulator.cluster.placements
import simulator.cluster.simulation
from controlplane.load_message import load_message
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.frontend_links import FrontendLinks
from controlplane.model.instance import InstanceState, LoadReport
from controlplane.policies.registry import OWN_POLICIES
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.placement import Stages
from controlplane.recording import events
from controlplane.recording import replay as replaying
from controlplane.recording.replay import replay
from controlplane.scheduler.metrics import SchedulerMetrics
from controlplane.scheduler.placement_service import PlacementService
from controlplane.scheduler.recorder import Recorder
from controlplane.scheduler.settings import SchedulerSettings
from mesh.errors import ConfigurationError
from penstock.v1 import monitor_pb2, scheduler_pb2, worker_pb2
from services.cli.console.command import command as replay_command
from services.cli.decisions import command
from tests.still_clock import StillClock
from tests.unit.services.cli.console.recorded_page import recorded

PHASES = {
    "a": worker_pb2.INSTANCE_PHASE_UNSPECIFIED,
    "b": worker_pb2.INSTANCE_PHASE_UNSPECIFIED,
    "c": worker_pb2.INSTANCE_PHASE_DECODE,
    "d": worker_pb2.INSTANCE_PHASE_PREFILL,
}
STATES = (InstanceState.READY,) * 8 + (InstanceState.DRAINING,)


class LiveScheduler:
    """A placement placements as the scheduler role drives it, with a monitor's messages made up from a seed."""

    def __init__(self, path: Path, policy: str, seed: int) -> None:
        self.clock = StillClock(0.0)
        self.random = random.Random(seed)
        settings = SchedulerSettings(policy=policy, record=path, max_indexed_blocks=10_000)
        self.placements = PlacementService(settings, SchedulerMetrics(CollectorRegistry()), self.clock)
        self.requests: list[str] = []
        self.prefilled: dict[str, str] = {}
        self._sequence = 0
        self._incarnations = dict.fromkeys(PHASES, 0)
        self.links = FrontendLinks()
        self.placements.feed.linked(self.links)
        self.link(*PHASES)
        self.unheard: set[str] = set()
        """Instances that do not report."""
        self.begin_watch()

    def link(self, *names: str) -> None:
        """The frontend is connected to these, and the directory knows all."""
        for name, incarnation in self._incarnations.items():
            self.placements.feed.announced(name, str(incarnation))
        self.links.report((name, str(self._incarnations[name])) for name in names)
        self.placements.feed.review(self.clock.at_s)

    def begin_watch(self) -> None:
        """A monitor tells the whole state anew."""
        feed = self.placements.feed
        feed.end()
        feed.begin()
        self._sequence = 0
        heard = [name for name in PHASES if name not in self.unheard]
        self.tell(*(self.joined(name) for name in heard), *(self.load(name) for name in heard), synced=True)
        self.placements.tick()

    def tell(self, *changes: monitor_pb2.InstanceUpdate, synced: bool = False) -> None:
        self._sequence += 1
        update = monitor_pb2.ClusterUpdate(sequence=self._sequence, instances=changes, synced=synced)
        self.placements.feed.apply(update, self.clock.at_s)

    def joined(self, name: str) -> monitor_pb2.InstanceUpdate:
        description = worker_pb2.InstanceDescription(
            instance_id=name,
            incarnation_id=str(self._incarnations[name]),
            model="m",
            block_tokens=16,
            kv_blocks=1000,
            max_step_tokens=2048,
            phase=PHASES[name],
        )
        return self.update(name, joined=description)

    def update(self, name: str, **change: object) -> monitor_pb2.InstanceUpdate:
        incarnation_id = str(self._incarnations[name])
        return monitor_pb2.InstanceUpdate(instance_id=name, incarnation_id=incarnation_id, **change)  # type: ignore[arg-type]

    def load(self, name: str) -> monitor_pb2.InstanceUpdate:
        choose = self.random
        load = LoadReport(
            running_requests=choose.randrange(9),
            queued_requests=choose.randrange(5),
            queued_prefill_tokens=choose.randrange(9000),
            running_tokens=choose.randrange(12_000),
            kv_blocks_used=choose.randrange(1000),
            decoding_requests=choose.randrange(9),
            token_interval_ms=300 * choose.random(),
        )
        admitted = [each for each in self.requests if choose.random() < 0.3]
        ended = [each for each in self.requests if choose.random() < 0.1]
        return self.update(name, load=load_message(load, choose.choice(STATES), admitted, ended))

    def happen(self) -> None:
        """One thing, at random."""
        self.clock.at_s += 0.05
        choose, placements = self.random, self.placements
        name = choose.choice(list(PHASES))
        kind = choose.randrange(15)
        if name in self.unheard and kind in (0, 1, 2, 3, 5, 12):
            self.unheard.discard(name)
            self.tell(self.joined(name), self.load(name))
            return
        match kind:
            case 0 | 1 | 2:
                self.tell(self.load(name))
            case 3:
                blocks = monitor_pb2.KvUpdate(
                    stored=choose.sample(range(1, 200), 20), removed=[choose.randrange(1, 200)]
                )
                self.tell(self.update(name, kv=blocks))
            case 4:
                self._incarnations[name] += 1
                self.unheard.discard(name)
                self.link(*PHASES)
                self.tell(self.joined(name), self.load(name))
            case 5:
                self.tell(self.update(name, stale=choose.random() < 0.5))
            case 6 if self.requests:
                placements.ended(
                    scheduler_pb2.RequestEnded(request_id=self.requests.pop(choose.randrange(len(self.requests))))
                )
            case 7:
                placements.tick()
            case 12:
                self.unheard.add(name)
                self.tell(self.update(name, lost=monitor_pb2.InstanceLost(reason="its report stream broke")))
            case 13:
                self.link(*choose.sample(list(PHASES), choose.randrange(1, 5)))
            case 14:
                self.begin_watch()
            case 8 if self.prefilled:
                request_id, instance_id = self.prefilled.popitem()
                placements.place_decode(
                    scheduler_pb2.PlaceDecodeRequest(
                        request_id=request_id,
                        model="m",
                        prompt_tokens=500,
                        max_tokens=50,
                        prefill_instance_id=instance_id,
                    )
                )
            case _:
                self.place(f"r{self.clock.at_s:.2f}")

    def place(self, request_id: str) -> None:
        choose = self.random
        answer = self.placements.place(
            scheduler_pb2.PlaceRequest(
                request_id=request_id,
                model="m",
                prompt_tokens=choose.randrange(1, 6000),
                block_hashes=choose.sample(range(1, 200), 5),
                max_tokens=choose.choice([1, 50, 800]),
                excluded_instance_ids=choose.sample(list(PHASES), choose.choice([0, 0, 0, 1])),
                is_decoding=choose.random() < 0.1,
            ),
            self.links,
        )
        if answer.outcome == scheduler_pb2.PLACE_OUTCOME_PLACED:
            self.requests.append(request_id)
            if answer.is_decode_open:
                self.prefilled[request_id] = answer.instance_id

    def end(self) -> None:
        assert self.placements.recorder is not None
        self.placements.recorder.close()


@pytest.mark.slow
@pytest.mark.parametrize("policy", OWN_POLICIES)
def test_the_same_decisions_over_the_same_snapshots(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "recording.jsonl"
    live = LiveScheduler(path, policy, seed=7)
    for _ in range(250):
        live.happen()
    live.end()
    outcome = replay(path.open("rb"))
    assert outcome.placements >= 50
    assert (outcome.equal, outcome.different) == (outcome.decisions, [])
    if policy == "arrow":
        assert outcome.decode_placements >= 10
        assert outcome.observations >= 10


@pytest.mark.slow
def test_through_switches_of_the_policy_a_silent_monitor_and_a_new_watch(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    live = LiveScheduler(path, "lmetric", seed=3)
    for turn, name in enumerate(OWN_POLICIES):
        live.placements.switch.configure(name)
        for _ in range(30):
            live.happen()
        if turn == 4:
            live.clock.at_s += 10.0
            live.placements.tick()
            assert live.placements.switch.fallback_reason
            live.place("by the fallback")
            live.begin_watch()
            assert not live.placements.switch.fallback_reason
    live.end()
    outcome = replay(path.open("rb"))
    assert outcome.policies == list(OWN_POLICIES)
    assert outcome.placements >= 100
    assert outcome.equal == outcome.decisions


def test_a_decision_that_was_otherwise_and_one_over_another_snapshot_are_named(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    live = LiveScheduler(path, "lmetric", seed=5)
    for _ in range(100):
        live.happen()
    live.end()
    lines = path.read_bytes().splitlines(keepends=True)
    placed = [number for number, line in enumerate(lines) if b'"type":"Placed"' in line and b'"instance_id":"' in line]
    first, second = placed[3], placed[9]
    event = events.DECODER.decode(lines[first])
    assert isinstance(event, events.Placed)
    lines[first] = msgspec.json.encode(msgspec.structs.replace(event, instance_id="z")) + b"\n"
    event = events.DECODER.decode(lines[second])
    assert isinstance(event, events.Placed)
    lines[second] = msgspec.json.encode(msgspec.structs.replace(event, snapshot_digest=1)) + b"\n"
    outcome = replay(lines)
    assert [each.line for each in outcome.different] == [first + 1, second + 1]
    assert outcome.equal == outcome.decisions - 2
    path.write_bytes(b"".join(lines))
    told = CliRunner().invoke(command, [str(path)])
    assert told.exit_code == 1
    assert "recorded z" in told.output


def test_replayed_by_the_functions_and_the_table_of_the_simulator() -> None:
    assert simulator.cluster.placements.place is replaying.place
    assert simulator.cluster.simulation.place_decode is replaying.place_decode
    assert simulator.cluster.fleet.ClusterTable is replaying.ClusterTable


def test_a_recording_ends_where_it_is_full_and_its_last_line_may_be_cut(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    recorder = Recorder(path, 300, ClusterLimits())
    for number in range(100):
        recorder.tell(events.Ended(0, f"r{number}"))
    assert not recorder.is_recording
    assert path.stat().st_size <= 300
    assert replay(path.open("rb")).decisions == 0
    assert replay([*path.open("rb"), b'{"type":"En']).decisions == 0
    with pytest.raises(ConfigurationError, match="line 1 is none"):
        replay([b"hello\n"])
    with pytest.raises(ConfigurationError, match="start of a scheduler"):
        replay([msgspec.json.encode(events.Ended(0, "r")) + b"\n"])
    with pytest.raises(ConfigurationError, match="cannot record"):
        Recorder(tmp_path, 300, ClusterLimits())


def test_a_scheduler_that_is_started_anew_keeps_what_its_former_life_recorded(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    for life in ("first", "second", "third"):
        recorder = Recorder(path, 1 << 20, ClusterLimits())
        recorder.tell(events.Ended(0, life))
        recorder.close()
    assert b"third" in path.read_bytes()
    former = tmp_path / "recording.jsonl.former"
    assert b"second" in former.read_bytes()
    assert sorted(tmp_path.iterdir()) == [path, former], "one life before, so that they do not pile up"


@pytest.mark.parametrize("fails", [Recorder.flush, Recorder.close])
def test_a_full_disk_ends_the_recording_and_not_the_scheduler(fails: Callable[[Recorder], None], caplog: Any) -> None:
    recorder = Recorder(Path("/dev/full"), 1 << 20, ClusterLimits())
    fails(recorder)
    assert not recorder.is_recording
    assert "the file cannot be written" in caplog.text
    recorder.tell(events.Ended(0, "r"))


def test_stages_and_their_changes_are_part_of_a_recording(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    live = LiveScheduler(path, "stages", seed=11)
    policy = live.placements.switch.configured
    assert isinstance(policy, Stages)
    short = StageLayout("m", 1, (("a",), ("b", "c", "d")), (1500,))
    long = StageLayout("m", 2, (("a", "b", "c"), ("d",)), (3000,))
    for layout in (short, long, None):
        policy.use_layout("m", layout)
        for _ in range(60):
            live.happen()
    live.end()
    outcome = replay(path.open("rb"))
    assert sum(b'"type":"LayoutSet"' in line for line in path.open("rb")) == 3
    assert outcome.placements >= 30
    assert outcome.equal == outcome.decisions
    without = [line for line in path.open("rb") if b'"type":"LayoutSet"' not in line]
    assert replay(without).different, "the stages did matter"


@pytest.mark.parametrize("policy", ["penstock", "arrow"])
def test_it_opens_in_the_console(tmp_path: Path, policy: str) -> None:
    path, page = tmp_path / "decisions.jsonl", tmp_path / "decisions.html"
    live = LiveScheduler(path, policy, seed=3)
    for _ in range(400):
        live.happen()
    live.end()
    told = CliRunner().invoke(command, [str(path), "--console", str(page), "--json"])
    assert told.exit_code == 0, told.output
    (run,) = recorded(page)["runs"]
    assert run["facts"]["decisions that come out as recorded"].startswith(f"{json.loads(told.stdout)['equal']} of")
    bodies = [update["body"] for update in run["updates"]]
    assert [later["at_unix_ms"] > earlier["at_unix_ms"] for earlier, later in pairwise(bodies)].count(False) == 0
    assert {body["policy"]["name"] for body in bodies} == {policy}
    placements = [placement for body in bodies for placement in body["placements"]]
    assert {placement["chosen"] for placement in placements} <= PHASES.keys()
    assert all(any(option["is_chosen"] for option in placement["options"]) for placement in placements)
    assert run["requests"] == len(run["stories"]) > 0
    again = tmp_path / "again.html"
    assert CliRunner().invoke(replay_command, [str(path), str(page), "--console", str(again)]).exit_code == 0
    assert [each["updates"] for each in recorded(again)["runs"]] == [run["updates"]] * 2
