"""What the pull managers of one instance say, done to a modelled instance."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from controlplane.model.incarnation import Incarnation
from controlplane.model.placement import PrefixPull
from controlplane.protocols.prefix_pull.source import (
    Answer,
    CallEnded,
    EndCall,
    HoldAsked,
    HoldEvent,
    HoldInstruction,
    HoldManager,
    Pin,
    Pinned,
    Unpin,
)
from controlplane.protocols.prefix_pull.target import (
    AskHold,
    CancelFetch,
    EndHold,
    Fetch,
    Fetched,
    Held,
    NotFetched,
    NotHeld,
    PullEnded,
    PullEvent,
    PullFollowed,
    PullInstruction,
    PullManager,
    PullOrdered,
    Submit,
    Tick,
)
from mesh.errors import RequestRefused
from mesh.invariants import invariants
from simulator.cluster.events import Event, EventQueue, Rank
from simulator.cluster.host_loads import HostLoads
from simulator.cluster.kv_links import KvLinks, Transfer
from simulator.cluster.worker import Worker
from simulator.instance.counted_request import CountedRequest

SubmitRequest: TypeAlias = Callable[[], None]


@dataclass(slots=True, eq=False)
class _Pull:
    """What is needed of a pull to here until it ends."""

    source_id: str
    prefix: CountedRequest
    transfer: Transfer | None = None


@dataclass(slots=True, eq=False)
class _Hold:
    """A prefix that a peer wants held, until it hangs up."""

    caller: Incarnation
    prefix: CountedRequest
    wanted_blocks: int = 0
    patience: Event | None = None
    """Until then blocks are waited for that are being computed here."""
    is_pinned: bool = False


class PullingCluster(Protocol):
    """The cluster as one of its pullers knows it: `PrefixPulls`."""

    events: EventQueue
    links: KvLinks
    loads: HostLoads
    tick_ms: float

    def prefill_ms(self, instance_id: str, tokens: int) -> float:
        """About what it takes the instance to compute so many tokens of a prompt."""

    def ask(self, target: "SimulatedPuller", source_id: str, ask: AskHold, prefix: CountedRequest) -> None:
        """Call the source: it is to hold a prefix."""

    def hang_up(self, source_id: str, pull_id: str) -> None:
        """End that call."""

    def answer(self, target: Incarnation, event: Held | NotHeld) -> None:
        """What the source says on it."""

    def ended(self, ended: PullEnded) -> None:
        """A pull is over."""


class SimulatedPuller:
    """One life of an instance: what `PulledPrefixes` and `HeldPrefixes` are to a worker."""

    def __init__(self, worker: Worker, cluster: PullingCluster) -> None:
        description = worker.description
        self.own = Incarnation(description.instance_id, description.incarnation_id)
        self.worker = worker
        self.target = PullManager(f"{self.own.instance_id}.{self.own.incarnation_id}")
        self.source = HoldManager()
        self._cluster = cluster
        self._waiting: dict[str, tuple[CountedRequest, SubmitRequest]] = {}
        """Requests that wait for their prefixes."""
        self._pulls: dict[str, _Pull] = {}
        self._holds: dict[str, _Hold] = {}
        self._events: deque[PullEvent] = deque()
        """Not handled yet: what an instruction leads to comes behind the instructions that are under way."""
        self._is_handling = False
        self._timer: Event | None = None
        self._is_alive = True

    @property
    def waiting(self) -> tuple[str, ...]:
        """Requests that are kept back until their prefixes are here."""
        return tuple(self._waiting)

    def begin(self, request: CountedRequest, pull: PrefixPull | None, submit: SubmitRequest) -> bool:
        """Whether the request waits for its prefix: for `pull`, or for what is pulled already for another one.
        `submit` is called then, once it is here or is not waited for any longer."""
        if pull is None:
            return self._follow(request, submit)
        block_tokens = self.worker.instance.config.block_tokens
        tokens = min(pull.tokens, request.prompt_tokens + request.emitted_tokens - 1)
        blocks = min(tokens // block_tokens, len(request.block_hashes))
        source_id = pull.source.instance_id
        if blocks <= 0 or source_id == self.own.instance_id:
            return False
        compute_ms = self._cluster.prefill_ms(self.own.instance_id, blocks * block_tokens)
        self._waiting[request.request_id] = request, submit
        key = request.block_hashes[blocks - 1]
        self.handle(PullOrdered(request.request_id, source_id, key, blocks, compute_ms, pull.comes_ms))
        return True

    def _follow(self, request: CountedRequest, submit: SubmitRequest) -> bool:
        pull_id = self.target.bringing(request.block_hashes) if self.target.pulls else None
        if pull_id is None:
            return False
        self._waiting[request.request_id] = request, submit
        self.handle(PullFollowed(request.request_id, pull_id))
        return True

    def handle(self, event: PullEvent) -> None:
        """Tell the target's manager and carry out what it says."""
        self._events.append(event)
        if self._is_handling:
            return
        self._is_handling = True
        while self._events:
            for instruction in self.target.handle(self._events.popleft(), self._now_ms):
                self._carry_out(instruction)
        self._is_handling = False
        self._wind_timer()

    def handle_hold(self, event: HoldEvent) -> None:
        """Tell the source's manager and carry out what it says."""
        for instruction in self.source.handle(event, self._now_ms):
            self._carry_out_hold(instruction)
        self._wind_timer()

    def asked(self, caller: Incarnation, ask: AskHold, prefix: CountedRequest) -> None:
        """A peer calls."""
        self._holds[ask.pull_id] = _Hold(caller, prefix)
        self.handle_hold(HoldAsked(ask.pull_id, ask.blocks, ask.wait_ms))

    def hung_up(self, pull_id: str) -> None:
        """A peer has ended its call."""
        self.handle_hold(CallEnded(pull_id))
        self._holds.pop(pull_id, None)

    def after_step(self) -> None:
        """A step of the instance may have computed what somebody waits for."""
        for hold_id, hold in list(self._holds.items()):
            if hold.patience is not None and self._has(hold):
                self._pin_now(hold_id, hold)

    def peer_lost(self, peer: Incarnation) -> None:
        """Another instance has died, and its calls have ended."""
        for hold_id in [each for each, hold in self._holds.items() if hold.caller == peer]:
            self.hung_up(hold_id)
        for pull_id in [each for each, pull in self._pulls.items() if pull.source_id == peer.instance_id]:
            self.handle(NotHeld(pull_id, f"{peer.instance_id} is gone"))

    def stop(self) -> None:
        """The instance has died."""
        self._is_alive = False
        for event in (self._timer, *(hold.patience for hold in self._holds.values())):
            if event is not None:
                event.cancel()
        for pull in self._pulls.values():
            if pull.transfer is not None:
                self._cluster.links.cancel(pull.transfer)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken` where what is kept contradicts itself."""
        self.target.validate()
        self.source.validate()
        assert all(map(self.target.waits, self._waiting)), "who waits waits for a pull"
        assert self.source.hold_ids == tuple(self._holds), "who is called holds something"

    @property
    def _now_ms(self) -> float:
        return self._cluster.events.now_ms

    # -- prefixes that come

    def _carry_out(self, instruction: PullInstruction) -> None:
        match instruction:
            case AskHold(pull_id, source_id, request_id, blocks):
                prefix = self._prefix(pull_id, self._waiting[request_id][0], blocks)
                self._pulls[pull_id] = _Pull(source_id, prefix)
                self._cluster.ask(self, source_id, instruction, prefix)
            case Fetch(pull_id, blocks):
                self._fetch(pull_id, self._pulls[pull_id], blocks)
            case CancelFetch(pull_id):
                transfer = self._pulls[pull_id].transfer
                assert transfer is not None, "what is stopped had begun, or the manager would know"
                self._cluster.links.cancel(transfer)
                self._give_up(pull_id, "it was stopped")
            case EndHold(pull_id):
                self._cluster.hang_up(self._pulls.pop(pull_id).source_id, pull_id)
            case Submit(request_id):
                _, submit = self._waiting.pop(request_id)
                submit()
            case PullEnded():
                self._cluster.ended(instruction)

    def _fetch(self, pull_id: str, pull: _Pull, blocks: int) -> None:
        instance = self.worker.instance
        self.worker.touch(self._now_ms)
        try:
            wanted = instance.admit_carrier(pull.prefix, blocks)
        except RequestRefused as error:
            self.handle(NotFetched(pull_id, str(error)))
            return
        self.worker.wake(self._now_ms)

        def arrived(_: float) -> None:
            self._change(lambda: instance.store_carried(pull_id))
            self.handle(Fetched(pull_id, len(wanted.block_ids)))

        if not wanted.block_ids:
            arrived(self._now_ms)
            return
        size_bytes = len(wanted.block_ids) * instance.config.block_bytes
        pull.transfer = self._cluster.links.transfer(
            pull.source_id, self.own.instance_id, size_bytes, arrived, lambda _, reason: self._give_up(pull_id, reason)
        )

    def _give_up(self, pull_id: str, reason: str) -> None:
        self._change(lambda: self.worker.instance.abort(pull_id))
        self.handle(NotFetched(pull_id, reason))

    def _prefix(self, pull_id: str, request: CountedRequest, blocks: int) -> CountedRequest:
        """What names a prefix to an instance: its blocks, and one token more."""
        tokens = blocks * self.worker.instance.config.block_tokens
        return CountedRequest(pull_id, tokens + 1, 1, block_hashes=request.block_hashes[:blocks])

    # -- prefixes that are held for others

    def _carry_out_hold(self, instruction: HoldInstruction) -> None:
        match instruction:
            case Pin(hold_id, blocks, wait_ms):
                hold = self._holds[hold_id]
                hold.wanted_blocks = blocks
                self.worker.look(self._now_ms)
                if wait_ms <= 0 or self._has(hold) or not self._is_computing(hold):
                    self._load_and_pin(hold_id, hold)
                else:
                    hold.patience = self._after(wait_ms, lambda: self._pin_now(hold_id, hold))
            case Unpin(hold_id):
                hold = self._holds[hold_id]
                if hold.patience is not None:
                    hold.patience.cancel()
                    hold.patience = None
                if hold.is_pinned:
                    self._change(lambda: self.worker.instance.abort(hold_id))
                    hold.is_pinned = False
            case Answer(hold_id):
                hold = self._holds[hold_id]
                self._cluster.answer(hold.caller, Held(hold_id, hold.wanted_blocks))
            case EndCall(hold_id, reason):
                caller = self._holds.pop(hold_id).caller
                self._cluster.answer(caller, NotHeld(hold_id, reason, is_refusal=True))

    def _load_and_pin(self, hold_id: str, hold: _Hold) -> None:
        """Once what lacks has come from the memory of its host, as far as that has it."""

        def loaded() -> None:
            if self._holds.get(hold_id) is hold and self._is_alive:
                self._pin_now(hold_id, hold)

        if not self._cluster.loads.bring(self.own.instance_id, hold.prefix, hold.wanted_blocks, loaded):
            self._pin_now(hold_id, hold)

    def _pin_now(self, hold_id: str, hold: _Hold) -> None:
        if hold.patience is not None:
            hold.patience.cancel()
            hold.patience = None
        self.worker.touch(self._now_ms)
        hold.wanted_blocks = len(self.worker.instance.hold_prefix(hold.prefix, hold.wanted_blocks))
        hold.is_pinned = True
        self.worker.wake(self._now_ms)
        self.handle_hold(Pinned(hold_id, hold.wanted_blocks))

    def _has(self, hold: _Hold) -> bool:
        return self.worker.instance.cached_blocks(hold.prefix) >= hold.wanted_blocks

    def _is_computing(self, hold: _Hold) -> bool:
        """Whether a request here has yet to compute what is wanted; only that is worth waiting for."""
        hashes = hold.prefix.block_hashes
        kept_back = (request.block_hashes[: len(hashes)] for request, _ in self._waiting.values())
        return self.worker.instance.is_to_compute(hashes) or hashes in kept_back

    # -- time

    def _change(self, act: Callable[[], object]) -> None:
        self.worker.touch(self._now_ms)
        act()
        self.worker.wake(self._now_ms)

    def _after(self, delay_ms: float, act: Callable[[], None]) -> Event:
        return self._cluster.events.at(self._now_ms + delay_ms, Rank.MESSAGE, lambda _: act())

    def _wind_timer(self) -> None:
        def tick() -> None:
            self._timer = None
            self.handle(Tick())
            self.handle_hold(Tick())

        if self._timer is None and self._is_alive and (self.target.pulls or self.source.hold_ids):
            self._timer = self._after(self._cluster.tick_ms, tick)
