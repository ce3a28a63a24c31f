"""A recording run through a cluster table and policies again."""

from collections.abc import Callable, Iterable

import msgspec

from controlplane.model.cluster import ClusterTable
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.placement import Placement
from controlplane.policies.interface import Policy, has_pools, is_observer
from controlplane.policies.place import place, place_decode
from controlplane.policies.registry import create_policy
from controlplane.policies.stages.placement import Stages
from controlplane.recording import events
from mesh.errors import ConfigurationError, PlacementError

MAX_DIFFERENCES = 100
_SWEEP_PLACES = 1 << 16


class Difference(msgspec.Struct, frozen=True):
    """A decision that the replay took otherwise than the recording."""

    line: int
    """Of the recording, counted from 1."""
    request_id: str
    recorded: str
    replayed: str


class Replayed(msgspec.Struct):
    """The result of a replay: how many decisions were taken again, and which of them came out otherwise."""

    placements: int = 0
    decode_placements: int = 0
    observations: int = 0
    policies: list[str] = []
    """In the order in which they came into force."""
    equal: int = 0
    """Decisions of both kinds over equal snapshots, with equal outcomes."""
    different: list[Difference] = []
    """The first ones."""

    @property
    def decisions(self) -> int:
        """Placements and decode placements together."""
        return self.placements + self.decode_placements


class Replay:
    """Feed it the events of one scheduler's life, from its start."""

    def __init__(self) -> None:
        self.outcome = Replayed()
        self.placement: Placement | None = None
        """What the last line came to, if it asked for a placement and one was found."""
        self._limits: ClusterLimits | None = None
        self._tables: dict[int, ClusterTable] = {}
        self._configured: Policy | None = None
        self._fallbacks: dict[str, Policy] = {}
        """By name; each remembers what it decided when it stood in before."""
        self._fallback: Policy | None = None
        self._line = 0

    def take(self, event: events.Event) -> None:
        """The next line. Raises `ConfigurationError` for a recording that begins in the midst of something."""
        self._line += 1
        self.placement = None
        match event:
            case events.Begun():
                self._limits = event.limits
            case events.PolicySet():
                self._configured = create_policy(event.name, event.parameters)
                self.outcome.policies.append(event.name)
            case events.PoolsResumed():
                self._resume(event)
            case events.LayoutSet():
                self._use_layout(event)
            case events.FallbackSet():
                self._fallback = self._named_fallback(event.policy) if event.is_in_force else None
            case _:
                self._take(event, self._table(event.table))

    def _take(self, event: events.Event, table: ClusterTable) -> None:
        match event:
            case events.Joined():
                table.joined(event.instance)
            case events.Lost():
                table.lost(event.instance_id, event.incarnation_id)
                self._sweep(table)
            case events.Reported():
                table.reported(
                    event.instance_id,
                    event.incarnation_id,
                    event.load,
                    event.state,
                    event.admitted_request_ids,
                    event.ended_request_ids,
                )
            case events.Staled():
                table.staled(event.instance_id, event.incarnation_id, event.stale)
            case events.Unmonitored():
                table.unmonitor(event.instance_id, event.incarnation_id)
            case events.Adopted():
                table.adopt(self._table(event.source), event.instance_id)
            case events.Cached():
                table.cached(event.instance_id, event.incarnation_id, event.blocks)
                self._sweep(table)
            case events.Costed():
                table.costed(event.instance_id, event.incarnation_id, event.costs)
            case events.KvCosted():
                table.kv_costed(event.instance_id, event.incarnation_id, event.costs)
            case events.Ended():
                table.ended(event.request_id)
            case events.Corrected():
                table.corrected(event.instance_id, event.present, event.now_s)
            case events.Shared():
                table.shared(event.event, event.now_s)
            case events.TakenOver():
                table.take_over(self._table(event.former))
            case events.Forgotten():
                table.forget_unreported(event.now_s)
            case events.Observed():
                self._observe(event, table)
            case events.Placed():
                self._place(event, table)
            case events.DecodePlaced():
                self._place_decode(event, table)

    def _resume(self, event: events.PoolsResumed) -> None:
        if self._configured is None or not has_pools(self._configured):
            raise ConfigurationError(f"line {self._line} of the recording has pools, and the policy keeps none")
        self._configured.resume(event.model, event.pools)

    def _use_layout(self, event: events.LayoutSet) -> None:
        if not isinstance(self._configured, Stages):
            raise ConfigurationError(f"line {self._line} of the recording has stages, and the policy knows none")
        self._configured.use_layout(event.model, event.layout)

    def _observe(self, event: events.Observed, table: ClusterTable) -> None:
        policy = self.policy
        self.outcome.observations += 1
        if is_observer(policy):
            for model in table.models():
                if (snapshot := table.snapshot(model)) is not None:
                    policy.observe(snapshot, event.now_s)

    def _place(self, event: events.Placed, table: ClusterTable) -> None:
        request = event.request
        seen = events.digest(table.snapshot(request.model))
        replayed = events.Placed(event.table, request, snapshot_digest=seen)
        try:
            placement = self.placement = place(table, self.policy, request, asks_later=True)
            replayed = events.Placed(
                event.table,
                request,
                placement.instance.instance_id,
                placement.decode_instance.instance_id,
                placement.is_decode_open,
                placement.cached_tokens,
                seen,
                "" if placement.pull is None else placement.pull.source.instance_id,
                0 if placement.pull is None else placement.pull.tokens,
            )
        except PlacementError:
            pass  # refused, as it may have been then
        self.outcome.placements += 1
        self._compare(request.request_id, event, replayed)

    def _place_decode(self, event: events.DecodePlaced, table: ClusterTable) -> None:
        seen = events.digest(table.snapshot(event.request.model))
        chosen = place_decode(table, self.policy, event.request, event.prefill_instance_id)
        replayed = msgspec.structs.replace(
            event, instance_id="" if chosen is None else chosen.instance_id, snapshot_digest=seen
        )
        self.outcome.decode_placements += 1
        self._compare(event.request.request_id, event, replayed)

    def _compare(self, request_id: str, recorded: events.Event, replayed: events.Event) -> None:
        if recorded == replayed:
            self.outcome.equal += 1
        elif len(self.outcome.different) < MAX_DIFFERENCES:
            self.outcome.different.append(Difference(self._line, request_id, _shown(recorded), _shown(replayed)))

    @property
    def policy(self) -> Policy:
        """The one in force. Raises `ConfigurationError` before any."""
        if self._fallback is not None:
            return self._fallback
        if self._configured is None:
            raise ConfigurationError(
                f"line {self._line} of the recording needs a policy and none was named before: record from the "
                "scheduler's start"
            )
        return self._configured

    @property
    def table(self) -> ClusterTable | None:
        """The newest one; None before any."""
        return self._tables[max(self._tables)] if self._tables else None

    def _named_fallback(self, name: str) -> Policy:
        if name not in self._fallbacks:
            self._fallbacks[name] = create_policy(name)
        return self._fallbacks[name]

    def _table(self, number: int) -> ClusterTable:
        if self._limits is None:
            raise ConfigurationError("the recording does not begin with the start of a scheduler")
        if number not in self._tables:
            self._tables[number] = ClusterTable(self._limits)
        return self._tables[number]

    @staticmethod
    def _sweep(table: ClusterTable) -> None:
        """What the scheduler does in the background, a slice at a time."""
        while table.index.sweep(_SWEEP_PLACES):
            continue


def replay(lines: Iterable[bytes], watch: Callable[[Replay, events.Event], None] | None = None) -> Replayed:
    """Run a whole recording; of a scheduler that was killed the last line may be half written, and is left out.
    `watch` is called behind each line. Raises `ConfigurationError` for lines that are none of it."""
    run = Replay()
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            event = events.DECODER.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigurationError(f"line {number} is none of a scheduler's recording: {error}") from None
        run.take(event)
        if watch is not None:
            watch(run, event)
    return run.outcome


def _shown(event: events.Event) -> str:
    match event:
        case events.Placed(instance_id=chosen, decode_instance_id=decode, snapshot_digest=seen):
            return f"{chosen or 'refused'}, decoded by {decode or 'nobody'}, snapshot {seen:016x}"
        case events.DecodePlaced(instance_id=chosen, snapshot_digest=seen):
            return f"decoded by {chosen or 'the same'}, snapshot {seen:016x}"
    return str(event)
