"""A scheduler's recording, recorded while it is run again.

It knows of load, placements and their reasons, and when requests ended; nothing of their tokens. Only some of its lines
have a time: what has none happened at the last one before.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from controlplane.model.instance import InstanceState
from controlplane.policies.interface import Policy, has_pools
from controlplane.recording import events
from controlplane.recording.replay import Replay, Replayed
from controlplane.scheduler.explanations import NO_POOLS
from penstock.v1 import frontend_pb2, scheduler_pb2
from services.cli.console.recorder import ConsoleRecorder, InstanceNow
from services.cli.simulation.plan import DEFAULT_TPOT_MS, DEFAULT_TTFT_MS
from services.frontend.console.window import Objectives


@dataclass(slots=True)
class DecisionsRecorder:
    """Watches a `Replay`."""

    name: str
    recorder: ConsoleRecorder = field(init=False)
    now_ms: float = 0.0
    """Since the first line that has a time."""
    _first_s: float | None = None
    _policy: Policy | None = None

    def __post_init__(self) -> None:
        objectives = Objectives(DEFAULT_TTFT_MS, DEFAULT_TPOT_MS)
        self.recorder = ConsoleRecorder(self.name, scheduler_pb2.GetPolicyResponse(), objectives)

    def watch(self, run: Replay, event: events.Event) -> None:
        """A line has been run."""
        self._set_clock(event)
        match event:
            case events.PolicySet() | events.FallbackSet():
                self._set_policy(run)
            case events.Placed() if run.placement is not None:
                self.recorder.placed(run.placement, self.now_ms, self._pools(event.request.model))
            case events.Ended() if (request := self.recorder.open.get(event.request_id)) is not None:
                ended_ms = self.now_ms - request.placed_ms
                message = frontend_pb2.EndedRequest(
                    status=200,
                    prompt_tokens=request.prompt_tokens,
                    arrived_unix_ms=int(request.placed_ms),
                    admitted_ms=0.0,
                    placed_ms=0.0,
                    ended_ms=ended_ms,
                )
                self.recorder.ends(request, message)
            case _:
                pass
        if self._first_s is not None and self.recorder.moments.is_due(self.now_ms):
            self.recorder.look(self.now_ms, self._instances(run), {})

    def encode(self, outcome: Replayed) -> bytes:
        """The recorded run as JSON."""
        facts = {
            "placements": f"{outcome.placements:,}",
            "decode instances chosen later": f"{outcome.decode_placements:,}",
            "decisions that come out as recorded": f"{outcome.equal:,} of {outcome.decisions:,}",
            "policies": ", ".join(outcome.policies),
        }
        return self.recorder.encode(facts)

    def _set_clock(self, event: events.Event) -> None:
        now_s: float | None = getattr(event, "now_s", None)
        if isinstance(event, events.Placed | events.DecodePlaced):
            now_s = event.request.now_s
        if now_s is None:
            return
        if self._first_s is None:
            self._first_s = now_s
        self.now_ms = max(self.now_ms, 1000 * (now_s - self._first_s))

    def _set_policy(self, run: Replay) -> None:
        policy = self._policy = run.policy
        self.recorder.policy = scheduler_pb2.GetPolicyResponse(
            policy=policy.name, parameters=policy.parameters.values()
        )

    def _pools(self, model: str) -> Mapping[str, str]:
        policy = self._policy
        return policy.pools(model) if policy is not None and has_pools(policy) else NO_POOLS

    def _instances(self, run: Replay) -> Iterator[InstanceNow]:
        table = run.table
        for model in () if table is None else table.models():
            assert table is not None, "it has models"
            snapshot = table.snapshot(model)
            if snapshot is None:
                continue
            pools = self._pools(model)
            for row, instance in enumerate(snapshot.instances):
                name = instance.instance_id
                yield InstanceNow(
                    instance,
                    table.load(name),
                    InstanceState(snapshot.state(row)),
                    table.index.held_blocks(int(snapshot.slots[row])),
                    is_stale=bool(snapshot.stale[row]),
                    pool=pools.get(name, ""),
                )
