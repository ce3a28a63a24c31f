"""Relays under any course of events: each token comes once, and at the end nothing is left."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.ownership import EPOCHS_PER_ADOPTION
from controlplane.protocols.relay.events import (
    Abort,
    Adopted,
    DeltaCame,
    Dropped,
    FailBroken,
    Forget,
    Loss,
    LossReason,
    Moved,
    Pass,
    Recover,
    RelayedRequest,
    RelayState,
    Release,
    Released,
    Submitted,
    Tick,
    WorkerGaveUp,
    WorkerLost,
)
from tests.unit.controlplane.protocols.test_relay import MAX_TOKENS, TRUTH, A, B, C, Manager, Step


@dataclass
class Life:
    """A request at one worker, which computes the same tokens wherever it runs."""

    request_id: str
    epoch: int
    begins: int
    emitted: int
    outbox: list[Any] = field(default_factory=list)
    """Events that are on their way to the frontend, in order."""
    is_over: bool = False
    is_first: bool = False


class AnyCourse(RuleBasedStateMachine):
    """Workers run, hand off, fail and die; the frontend submits, drops, releases and adopts; and each stream between
    them keeps its own order only. At any time each token came to its client once, and at the end nothing is left."""

    workers = st.sampled_from([A, B, C])
    ids = st.sampled_from(["r", "s"])

    def __init__(self) -> None:
        super().__init__()
        self.manager = Manager()
        self.now_s = 0.0
        self.requests: dict[str, RelayedRequest[Step]] = {}
        self.passed: dict[str, list[int]] = {"r": [], "s": []}
        self.lives: dict[Incarnation, list[Life]] = {A: [], B: [], C: []}
        self.waits: set[str] = set()
        """Lost, and to be placed again."""
        self.forgotten: set[str] = set()

    @initialize()
    def begin(self) -> None:
        for request_id, worker in (("r", A), ("s", B)):
            self.requests[request_id] = RelayedRequest[Step](request_id, MAX_TOKENS)
            self.submit(request_id, worker)

    # -- the frontend

    def tell(self, event: Any) -> None:
        self.carry_out(self.manager.handle(event, self.now_s))

    def carry_out(self, instructions: Iterable[Any]) -> None:
        for instruction in instructions:
            match instruction:
                case Pass(request_id, passed):
                    assert request_id not in self.forgotten
                    self.passed[request_id] += [token for one in passed for token in one.token_ids]
                case Abort(worker, request_id) | Release(worker, request_id):
                    for life in self.lives[worker]:
                        if life.request_id == request_id:
                            life.is_over = True
                case Recover(request_id):
                    assert request_id not in self.waits
                    self.waits.add(request_id)
                case Forget(request_id):
                    assert request_id not in self.forgotten, "said once"
                    self.forgotten.add(request_id)
                    self.waits.discard(request_id)
                case FailBroken(_, gap):
                    raise AssertionError(f"honest workers leave no gap: {gap}")

    def submit(self, request_id: str, worker: Incarnation) -> None:
        request = self.requests[request_id]
        self.tell(Submitted(request, worker))
        tokens = len(request.stream.token_ids)
        self.lives[worker] = [life for life in self.lives[worker] if life.request_id != request_id]
        self.lives[worker].append(Life(request_id, request.stream.epoch, tokens, tokens))

    @precondition(lambda self: self.waits)
    @rule(worker=workers, data=st.data())
    def place_again(self, worker: Incarnation, data: Any) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.waits)))
        self.waits.discard(request_id)
        self.submit(request_id, worker)

    @rule(request_id=ids, how=st.sampled_from([Dropped, Released]))
    def leave(self, request_id: str, how: Any) -> None:
        self.tell(how(request_id))

    @rule(request_id=ids, worker=workers)
    def come_back(self, request_id: str, worker: Incarnation) -> None:
        """Its client is back: the worker that has it says how far it is, and goes on under a higher epoch."""
        live = [life for life in self.lives[worker] if life.request_id == request_id and not life.is_over]
        lives = [life for lives in self.lives.values() for life in lives if life.request_id == request_id]
        if not live or live[0].epoch < max(life.epoch for life in lives):
            return
        life = live[0]
        life.epoch += EPOCHS_PER_ADOPTION
        life.outbox = [event for event in life.outbox if not isinstance(event, DeltaCame)]
        self.forgotten.discard(request_id)
        request = self.requests[request_id] = RelayedRequest[Step](request_id, MAX_TOKENS, TRUTH[: life.emitted])
        self.tell(Adopted(request, worker, life.epoch))
        self.forgotten.discard(request_id)
        self.passed[request_id] = TRUTH[: life.emitted]

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.tell(Tick())

    # -- the workers

    @rule(worker=workers, tokens=st.integers(1, 3))
    def compute(self, worker: Incarnation, tokens: int) -> None:
        for life in self.lives[worker]:
            if life.is_over:
                continue
            end = min(MAX_TOKENS, life.emitted + tokens)
            told = TRUTH[: life.emitted] if life.is_first else []
            finish = int(end == MAX_TOKENS)
            delta = Step(life.request_id, life.epoch, life.emitted, TRUTH[life.emitted : end], told, finish)
            life.outbox.append(DeltaCame(worker, delta))
            life.emitted, life.is_over, life.is_first = end, bool(finish), False

    @rule(worker=workers, to=workers, says_so=st.booleans())
    def hand_off(self, worker: Incarnation, to: Incarnation, says_so: bool) -> None:
        for life in self.lives[worker]:
            here = any(each.request_id == life.request_id for each in self.lives[to])
            if life.is_over or here:
                continue
            life.is_over = True
            new = Life(life.request_id, life.epoch + 1, life.emitted, life.emitted, is_first=True)
            self.lives[to].append(new)
            if says_so:
                life.outbox.append(Moved(life.request_id, worker, to, new.epoch))

    @rule(worker=workers, to=workers)
    def be_heard_before_the_former_owner(self, worker: Incarnation, to: Incarnation) -> None:
        self.compute(worker, 1)
        self.hand_off(worker, to, says_so=True)
        self.compute(to, 1)
        self.deliver(to)

    @rule(worker=workers)
    def give_up(self, worker: Incarnation) -> None:
        for life in self.lives[worker]:
            if not life.is_over:
                life.is_over = True
                life.outbox.append(WorkerGaveUp(life.request_id, worker, life.epoch, "no", LossReason.UNAVAILABLE))

    @rule(worker=workers)
    def deliver(self, worker: Incarnation) -> None:
        """The next message of each request on this worker's stream."""
        for life in self.lives[worker]:
            if not life.outbox:
                continue
            event = life.outbox.pop(0)
            request = self.requests[life.request_id]
            is_here = life.request_id not in self.forgotten
            if isinstance(event, DeltaCame) and is_here and request.stream.push(worker, event.delta):
                self.passed[life.request_id] += event.delta.token_ids
            else:
                self.tell(event)

    @rule(worker=workers, is_connected=st.booleans())
    def lose(self, worker: Incarnation, is_connected: bool) -> None:
        loss = Loss(LossReason.WORKER_HUNG if is_connected else LossReason.WORKER_LOST, worker.instance_id, "gone")
        self.tell(WorkerLost(worker, loss, is_connected))
        if not is_connected:  # otherwise what it has sent may still come
            self.lives[worker] = []

    # -- what must hold

    @invariant()
    def each_token_came_once(self) -> None:
        self.manager.validate()
        for request_id, passed in self.passed.items():
            assert passed == TRUTH[: len(passed)], request_id

    @invariant()
    def a_request_is_here_until_it_has_ended(self) -> None:
        here = {each for each, request in self.requests.items() if request.state is not RelayState.ENDED}
        assert here == self.requests.keys() - self.forgotten
        assert len(self.manager) == len(here)
        assert {each for each in here if self.requests[each].state is RelayState.LOST} == self.waits

    def teardown(self) -> None:
        for request_id in self.requests:
            self.tell(Dropped(request_id))
        self.manager.validate()
        assert len(self.manager) == 0
        assert not self.manager._holding


TestAnyCourse = AnyCourse.TestCase
