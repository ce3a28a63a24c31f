"""Places requests and recovers them in simulated time: carries out what each one's recovery manager says."""

from collections.abc import Callable

from controlplane.model.placement import Placement, PlacementRequest
from controlplane.policies.place import place
from controlplane.protocols.bouncing import is_bounced
from controlplane.protocols.recovery import (
    Begin,
    Bounced,
    Choose,
    Chosen,
    Ended,
    Event,
    GiveUp,
    Instruction,
    Lost,
    NoneChosen,
    Nothing,
    Pause,
    Run,
    Submit,
    Submitted,
    Wait,
    Woken,
)
from mesh.errors import NoInstance, QueueFull, RequestRefused
from mesh.invariants import invariants
from simulator.cluster import events
from simulator.cluster.events import EventQueue, Rank
from simulator.cluster.fleet import SimulatedFleet, incarnation_of
from simulator.cluster.ledger import Ledger, OpenRequest
from simulator.cluster.prefix_pull.pulls import PrefixPulls
from simulator.cluster.schedulers import Schedulers

REFUSED_BY_ALL = "every instance that was asked refused the request; raise max_queued_requests or lower the load"


class Placements:
    """What the frontend's placement service is in the live mesh, and the worker's side of it. An instance refuses in no
    time, and is connected as soon as it has joined."""

    def __init__(
        self,
        model: str,
        schedulers: Schedulers,
        queue: EventQueue,
        ledger: Ledger,
        fleet: SimulatedFleet,
        pulls: PrefixPulls,
        placed: Callable[[OpenRequest, Placement], None],
        failed: Callable[[OpenRequest, str, float], None],
        bounce_tokens: int = 0,
    ) -> None:
        """`placed` hears of every request that an instance was given, with the reasons; `failed` of every one that
        nobody will serve, with the reason. `bounce_tokens`: see `SchedulersConfig`."""
        self._model = model
        self._schedulers = schedulers
        self._events = queue
        self._ledger = ledger
        self._fleet = fleet
        self._pulls = pulls
        self._placed = placed
        self._failed = failed
        self._bounce_tokens = bounce_tokens
        self.bounces = 0
        """Requests that an instance has given back because more waited there than was believed."""
        self._alarms: dict[str, events.Event] = {}
        """The end of its pause or wait, of each request that has no instance."""
        self._waiting: dict[str, OpenRequest] = {}
        """Those that look again as soon as an instance joins."""

    def arrived(self, entry: OpenRequest, now_ms: float) -> None:
        """Place a new request, which waits if there is no instance."""
        self._handle(entry, Begin(entry.recovery.limits.wait_s), now_ms)

    def lost(self, entry: OpenRequest, instance_id: str, emitted_tokens: int, now_ms: float) -> None:
        """Place a request again whose instance has died or given it up: it goes on after its last token."""
        self._ledger.taken_back(entry.request.request_id, emitted_tokens)
        self._handle(entry, Lost(instance_id, emitted_tokens), now_ms)

    def joined(self, now_ms: float) -> None:
        """An instance is there: whoever waits for one looks again."""
        for entry in list(self._waiting.values()):
            self._wake(entry, now_ms, has_news=True)

    def ended(self, entry: OpenRequest, now_ms: float) -> None:
        """A request has all its tokens."""
        entry.recovery.handle(Ended(), now_ms / 1000)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken` where what is kept contradicts itself."""
        assert self._waiting.keys() <= self._alarms.keys() <= self._ledger.open.keys(), (
            "who waits is open, and is woken"
        )
        for request_id, entry in self._ledger.open.items():
            entry.recovery.validate()
            assert (entry.ownership.owner is None) == (request_id in self._alarms), f"{request_id} runs, or is woken"

    def _handle(self, entry: OpenRequest, event: Event | None, now_ms: float) -> None:
        while event is not None:
            event = self._carry_out(entry, entry.recovery.handle(event, now_ms / 1000), now_ms)

    def _carry_out(self, entry: OpenRequest, instruction: Instruction, now_ms: float) -> Event | None:
        match instruction:
            case Choose(excluded):
                return self._choose(entry, frozenset(excluded), now_ms)
            case Submit(instance_id, may_bounce=may_bounce):
                return self._submit(entry, instance_id, may_bounce, now_ms)
            case Pause(0.0):
                return Woken()
            case Pause(seconds):
                self._set_alarm(entry, seconds, now_ms)
            case Wait(seconds):
                self._waiting[entry.request.request_id] = entry
                self._set_alarm(entry, seconds, now_ms)
            case GiveUp(_, reason):
                self._failed(entry, reason or REFUSED_BY_ALL, now_ms)
            case Run() | Nothing():
                pass
        return None

    def _choose(self, entry: OpenRequest, excluded: frozenset[str], now_ms: float) -> Event:
        """A table knows of exactly the instances that there are, so a policy that finds none is never overruled."""
        request = entry.request
        asked = PlacementRequest(
            request_id=request.request_id,
            model=self._model,
            prompt_tokens=request.prompt_tokens + request.emitted_tokens,
            now_s=now_ms / 1000,
            block_hashes=request.block_hashes,
            max_tokens=request.output_tokens,
            priority=request.priority,
            excluded_instance_ids=excluded,
            is_decoding=request.emitted_tokens > 0,
        )
        self._fleet.see(now_ms)
        try:
            scheduler = self._schedulers.of(request.request_id)
            placement = place(scheduler.table, scheduler.policy, asked, asks_later=True)
        except NoInstance as error:
            return NoneChosen(str(error))
        self._schedulers.placed(placement)
        entry.placement = placement
        return Chosen(placement.instance.instance_id)

    def _submit(self, entry: OpenRequest, instance_id: str, may_bounce: bool, now_ms: float) -> Event | None:
        request_id, worker = entry.request.request_id, self._fleet.workers[instance_id]
        placement, entry.placement = entry.placement, None  # its arrays are as long as the cluster
        assert placement is not None, f"{request_id} is submitted to what was chosen for it"
        self._ledger.placed(request_id, incarnation_of(worker))
        self._handle(entry, Submitted(instance_id), now_ms)

        if self._bounce_tokens and may_bounce and self._is_given_back(entry, placement, now_ms):
            return Bounced(instance_id, entry.request.emitted_tokens)

        def give_later() -> None:
            now_ms = self._events.now_ms
            self._handle(entry, self._give(entry, placement, now_ms), now_ms)

        if self._pulls.begin(instance_id, entry.request, placement.pull, give_later):
            return None
        return self._give(entry, placement, now_ms)

    def _is_given_back(self, entry: OpenRequest, placement: Placement, now_ms: float) -> bool:
        """Whether more waits at the instance than its scheduler believed, which then knows."""
        instance_id, belief = placement.instance.instance_id, placement.belief
        present = self._fleet.workers[instance_id].present_load(now_ms)
        if not is_bounced(belief, present, self._bounce_tokens):
            return False
        request_id = entry.request.request_id
        table = self._schedulers.of(request_id).table
        table.ended(request_id)
        table.corrected(instance_id, present, now_ms / 1000)
        self._ledger.taken_back(request_id, entry.request.emitted_tokens)
        self.bounces += 1
        return True

    def _give(self, entry: OpenRequest, placement: Placement, now_ms: float) -> Event | None:
        """Hand the instance a request whose prefix is there, or is not waited for any longer."""
        request_id, instance_id = entry.request.request_id, placement.instance.instance_id
        belief = placement.belief
        assert belief is not None, "`place` says what it believed"
        try:
            self._fleet.workers[instance_id].submit(entry.request, belief.new_prefill_tokens, now_ms)
        except QueueFull:
            self._schedulers.of(request_id).table.ended(request_id)
            self._ledger.taken_back(request_id, entry.request.emitted_tokens)
            return Lost(instance_id, entry.request.emitted_tokens)
        except RequestRefused as error:
            self._failed(entry, str(error), now_ms)
            return None
        self._placed(entry, placement)
        return None

    def _set_alarm(self, entry: OpenRequest, seconds: float, now_ms: float) -> None:
        at_ms = now_ms + 1000 * seconds
        self._fleet.will_look(at_ms)
        self._alarms[entry.request.request_id] = self._events.at(
            at_ms, Rank.ARRIVAL, lambda at_ms: self._wake(entry, at_ms, has_news=False)
        )

    def _wake(self, entry: OpenRequest, now_ms: float, *, has_news: bool) -> None:
        request_id = entry.request.request_id
        self._waiting.pop(request_id, None)
        self._alarms.pop(request_id).cancel()
        self._handle(entry, Woken(has_news), now_ms)
