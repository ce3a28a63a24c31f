"""Relays under any course of events: each token comes once, workers are told what they must be and no more, nobody
waits for a worker that is gone, and at the end nothing is left."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.ownership import EPOCHS_PER_ADOPTION, HOLD_S, Ownership
from controlplane.protocols.relay.events import (
    Abort,
    Adopted,
    DeltaCame,
    Dropped,
    Fail,
    FailAdopted,
    FailBroken,
    FinishAtLength,
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
    ReportLoss,
    Submitted,
    Tick,
    Why,
    Withdrawn,
    WorkerGaveUp,
    WorkerLost,
)
from tests.unit.controlplane.protocols.test_relay import MAX_TOKENS, TRUTH, Manager, Step

ABORTED = 2
"""Finish reason of what was dropped."""


@dataclass
class Life:
    """A request at one worker, which computes the same tokens wherever it runs."""

    request_id: str
    epoch: int
    emitted: int
    outbox: list[Any] = field(default_factory=list)
    """Events that are on their way to the frontend, in order."""
    is_over: bool = False
    is_first: bool = False
    """Its next delta tells of all tokens before."""
    is_orphan: bool = False
    """Its client may come back: it runs on and tells nobody."""


@dataclass
class Worker:
    """One life of a process."""

    incarnation: Incarnation
    lives: list[Life] = field(default_factory=list)
    inbox: list[Abort | Release] = field(default_factory=list)
    """Orders that are on their way from the frontend, in order."""

    def of(self, request_id: str) -> list[Life]:
        return [life for life in self.lives if life.request_id == request_id]


class AnyCourse(RuleBasedStateMachine):
    """Workers run, hand off, give up, hang and die; the frontend submits, withdraws, drops, releases and adopts; what
    workers send comes in the order of its stream only, and they hear of orders late.

    Beside the manager runs a model: who has each request by the rules of `Ownership`, which orders each event must
    bring (`_foresee`), and what each client has got.
    """

    slots = st.sampled_from("abc")
    ids = st.sampled_from(["r", "s"])

    def __init__(self) -> None:
        super().__init__()
        self.manager = Manager()
        self.now_s = 0.0
        self.workers = {slot: Worker(Incarnation(slot, "1")) for slot in "abc"}
        self.requests: dict[str, RelayedRequest[Step]] = {}
        # the model
        self.owners: dict[str, Ownership] = {}
        """Of the requests that the manager has."""
        self.withdrawn: dict[str, Ownership] = {}
        self.passed: dict[str, list[int]] = {"r": [], "s": []}
        self.waits: set[str] = set()
        """Lost or withdrawn, and to be placed again."""
        self.released: set[str] = set()
        self.strays: set[tuple[str, Incarnation, int]] = set()
        """Who was told that the request is not its own, since it was placed last."""
        self.held_since_s: dict[str, float] = {}

    @initialize()
    def begin(self) -> None:
        for request_id, slot in (("r", "a"), ("s", "b")):
            self.requests[request_id] = RelayedRequest[Step](request_id, MAX_TOKENS)
            self._submit(request_id, slot)

    # -- the frontend

    @precondition(lambda self: self.waits)
    @rule(slot=slots, data=st.data())
    def place_again(self, slot: str, data: Any) -> None:
        self._submit(data.draw(st.sampled_from(sorted(self.waits))), slot)

    @rule(request_id=ids, how=st.sampled_from([Dropped, Released, lambda each: Dropped(each, is_done=True)]))
    def leave(self, request_id: str, how: Any) -> None:
        if request_id in self.owners:  # one that is withdrawn has no relay
            self._tell(how(request_id))

    @rule(request_id=ids)
    def withdraw(self, request_id: str) -> None:
        """Others that were submitted with it could not be."""
        owner = self.owners.get(request_id)
        if owner is None or owner.owner is not None:
            self._tell(Withdrawn(request_id))

    @rule(request_id=ids, slot=slots)
    def come_back(self, request_id: str, slot: str) -> None:
        """Its client is back: the worker that has it says how far it is, and goes on under a higher epoch."""
        self.hear(slot)
        worker = self.workers[slot]
        live = [life for life in worker.of(request_id) if not life.is_over]
        newest = max((life.epoch for each in self.workers.values() for life in each.of(request_id)), default=0)
        if request_id in self.withdrawn or not live or live[0].epoch < newest:
            return
        life = live[0]
        life.epoch += EPOCHS_PER_ADOPTION
        life.outbox = [event for event in life.outbox if not isinstance(event, DeltaCame)]
        life.is_orphan = life.is_first = False
        request = RelayedRequest[Step](request_id, MAX_TOKENS, TRUTH[: life.emitted])
        self._tell(Adopted(request, worker.incarnation, life.epoch))

    @rule(seconds=st.sampled_from([0.125, 0.5, 1.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self._tell(Tick())
        for request_id, since_s in self.held_since_s.items():
            is_held = self.requests[request_id].stream.holds
            assert not is_held or self.now_s - since_s < HOLD_S, f"{request_id} is held too long"

    # -- the workers

    @rule(slot=slots, tokens=st.sampled_from([1, 2, 3, MAX_TOKENS]))
    def compute(self, slot: str, tokens: int) -> None:
        """Three tokens or more at once do not say that they are the last."""
        for life in self.workers[slot].lives:
            if not life.is_over:
                is_last = life.emitted + (tokens if tokens < 3 else 0) >= MAX_TOKENS
                self._emit(slot, life, min(MAX_TOKENS, life.emitted + tokens), finish=int(is_last))

    @rule(slot=slots, to=slots)
    def hand_off(self, slot: str, to: str) -> None:
        source, target = self.workers[slot], self.workers[to]
        for life in source.lives:
            if life.is_over or target.of(life.request_id):
                continue
            life.is_over = True
            moved = Life(life.request_id, life.epoch + 1, life.emitted, is_first=True)
            target.lives.append(moved)
            if not life.is_orphan:
                life.outbox.append(Moved(life.request_id, source.incarnation, target.incarnation, moved.epoch))

    @rule(slot=slots, to=slots)
    def be_heard_before_the_former_owner(self, slot: str, to: str) -> None:
        self.compute(slot, 1)
        self.hand_off(slot, to)
        self.compute(to, 1)
        self.deliver(to)

    @rule(slot=slots, reason=st.sampled_from([None, LossReason.UNAVAILABLE]))
    def give_up(self, slot: str, reason: LossReason | None) -> None:
        worker = self.workers[slot]
        for life in worker.lives:
            if not life.is_over:
                life.is_over = True
                if not life.is_orphan:
                    life.outbox.append(WorkerGaveUp(life.request_id, worker.incarnation, life.epoch, "no", reason))

    @rule(slot=slots)
    def deliver(self, slot: str) -> None:
        """The next message of each request on this worker's stream."""
        for life in self.workers[slot].lives:
            if not life.outbox:
                continue
            event = life.outbox.pop(0)
            if isinstance(event, Moved) and event.target not in self._connected():
                event = replace(event, target_lost=Loss(LossReason.HANDOFF, event.target.instance_id, "gone"))
            request = self.requests[life.request_id]
            is_new = isinstance(event, DeltaCame) and life.request_id in self.owners
            if is_new and request.stream.push(event.sender, event.delta):
                self.passed[life.request_id] += event.delta.token_ids
            else:
                self._tell(event)

    @rule(slot=slots)
    def hear(self, slot: str) -> None:
        """The frontend's orders arrive."""
        worker = self.workers[slot]
        for order in worker.inbox:
            for life in worker.of(order.request_id):
                if life.is_over:
                    continue
                if isinstance(order, Release):
                    life.is_orphan = True
                elif life.epoch <= order.epoch:
                    self._emit(slot, life, life.emitted, finish=ABORTED)
        worker.inbox.clear()

    @rule(slot=slots, hangs=st.booleans())
    def lose(self, slot: str, hangs: bool) -> None:
        worker = self.workers[slot]
        if not hangs:  # otherwise what it has sent may still come
            self.workers[slot] = Worker(Incarnation(slot, str(int(worker.incarnation.incarnation_id) + 1)))
        reason = LossReason.WORKER_HUNG if hangs else LossReason.WORKER_LOST
        self._tell(WorkerLost(worker.incarnation, Loss(reason, slot, "gone"), hangs))

    # -- steps

    def _submit(self, request_id: str, slot: str) -> None:
        self.hear(slot)
        worker, request = self.workers[slot], self.requests[request_id]
        self._tell(Submitted(request, worker.incarnation))
        worker.lives = [life for life in worker.lives if life.request_id != request_id]
        worker.lives.append(Life(request_id, request.stream.epoch, len(request.stream.token_ids)))

    def _emit(self, slot: str, life: Life, end: int, finish: int) -> None:
        told = TRUTH[: life.emitted] if life.is_first else []
        delta = Step(life.request_id, life.epoch, life.emitted, TRUTH[life.emitted : end], told, finish)
        life.emitted, life.is_over = end, bool(finish)
        if not life.is_orphan:
            life.is_first = False
            life.outbox.append(DeltaCame(self.workers[slot].incarnation, delta))

    def _connected(self) -> set[Incarnation]:
        return {worker.incarnation for worker in self.workers.values()}

    def _tell(self, event: Any) -> None:
        """Tell the manager, and see that it answers as the model foresees."""
        has_relay = set(self.owners)
        wanted, may_be_stray, losses = self._foresee(event)
        instructions = self.manager.handle(event, self.now_s)
        orders = [each for each in instructions if isinstance(each, Abort | Release)]
        if may_be_stray and orders != wanted:
            wanted = [may_be_stray]
            life = (may_be_stray.request_id, may_be_stray.worker, may_be_stray.epoch)
            assert life not in self.strays, "said once"
        assert orders == wanted
        self.strays |= {
            (each.request_id, each.worker, each.epoch)
            for each in orders
            if isinstance(each, Abort) and each.why == Why.STRAY
        }
        for order in orders:
            for worker in self.workers.values():
                if worker.incarnation == order.worker:
                    worker.inbox.append(order)
        assert [each for each in instructions if isinstance(each, FailAdopted)] == [
            FailAdopted(event.request.request_id)
            for _ in [0]
            if isinstance(event, Adopted) and event.request.request_id in has_relay
        ]
        self._carry_out(event, instructions, losses)
        for request_id in losses:
            assert request_id in self.waits or request_id not in self.owners, "who is lost waits or has ended"
        if isinstance(event, Adopted):
            self._adopt(event)

    def _foresee(self, event: Any) -> tuple[list[Abort | Release], Abort | None, dict[str, Loss[str]]]:
        """Follow the event in the model: orders to workers that it must bring, one that it may, and who loses its
        owner."""
        match event:
            case Submitted(request, owner):
                if request.request_id not in self.owners:
                    self.owners[request.request_id] = self.withdrawn.pop(request.request_id, Ownership())
                self.owners[request.request_id].place(owner)
                self.waits.discard(request.request_id)
                self.released.discard(request.request_id)
                self.strays = {each for each in self.strays if each[0] != request.request_id}
            case DeltaCame(sender, delta) if delta.request_id not in self.owners:
                return (
                    ([self._refusal(sender, delta.request_id, delta.epoch)] if delta.emitted_token_ids else []),
                    None,
                    {},
                )
            case DeltaCame(sender, delta):
                owner = self.owners[delta.request_id]
                fits = delta.offset == len(delta.emitted_token_ids) >= len(self.passed[delta.request_id])
                if owner.owner is None or fits:
                    owner.claim(sender, delta.epoch)
                stray = Abort(sender, delta.request_id, delta.epoch, Why.STRAY)
                if owner.owner is None:
                    return ([] if (delta.request_id, sender, delta.epoch) in self.strays else [stray]), None, {}
                return [], (None if owner.owner == sender else stray), {}
            case WorkerGaveUp(request_id, sender, epoch, error, reason) if request_id in self.owners:
                owner = self.owners[request_id]
                owner.claim(sender, epoch)
                if (owner.owner, owner.epoch) == (sender, epoch):
                    return [], None, {request_id: Loss(reason or LossReason.UNAVAILABLE, sender.instance_id, error)}
            case Moved(request_id, _, target, epoch, target_lost) if request_id not in self.owners:
                return ([self._refusal(target, request_id, epoch)] if target_lost is None else []), None, {}
            case Moved(request_id, sender, target, epoch, target_lost):
                owner = self.owners[request_id]
                if owner.owner == sender:
                    owner.claim(target, epoch)
                if target_lost is not None and owner.owner == target:
                    return [], None, {request_id: target_lost}
            case WorkerLost(sender, loss, is_connected):
                owned = [each for each, owner in self.owners.items() if owner.owner == sender]
                orders = [Abort(sender, each, self.owners[each].epoch, Why.HUNG) for each in owned if is_connected]
                return orders, None, dict.fromkeys(owned, loss)
            case Dropped(request_id, is_done):
                return self._to_owner(request_id, Why.DONE if is_done else Why.UNWANTED), None, {}
            case Withdrawn(request_id):
                orders = self._to_owner(request_id, Why.UNWANTED)
                if orders:
                    self.withdrawn[request_id] = self.owners.pop(request_id)
                    self.withdrawn[request_id].take_back()
                    self.held_since_s.pop(request_id, None)
                    self.waits.add(request_id)
                return orders, None, {}
            case Released(request_id):
                self.released.add(request_id)
                return (
                    [Release(each.worker, request_id, each.epoch) for each in self._to_owner(request_id, Why.DONE)],
                    None,
                    {},
                )
        return [], None, {}

    def _to_owner(self, request_id: str, why: Why) -> list[Abort | Release]:
        owner = self.owners.get(request_id)
        return [] if owner is None or owner.owner is None else [Abort(owner.owner, request_id, owner.epoch, why)]

    def _refusal(self, worker: Incarnation, request_id: str, epoch: int) -> Abort | Release:
        is_released = request_id in self.released
        return Release(worker, request_id, epoch) if is_released else Abort(worker, request_id, epoch, Why.UNWANTED)

    def _adopt(self, event: Adopted[Step]) -> None:
        request_id = event.request.request_id
        self.requests[request_id] = event.request
        owner = self.owners[request_id] = Ownership()
        owner.owner, owner.epoch = event.owner, event.epoch
        self.passed[request_id] = list(event.request.stream.token_ids)
        self.released.discard(request_id)
        self.strays = {each for each in self.strays if each[0] != request_id}

    def _carry_out(self, event: Any, instructions: Iterable[Any], losses: dict[str, Loss[str]]) -> None:
        for instruction in instructions:
            match instruction:
                case Pass(request_id, passed):
                    assert request_id in self.owners
                    assert passed
                    self.passed[request_id] += [token for one in passed for token in one.token_ids]
                    if isinstance(event, Tick):
                        assert self.now_s - self.held_since_s[request_id] >= HOLD_S, "others may still send theirs"
                case ReportLoss(instance_id, reason, requests):
                    assert isinstance(event, WorkerLost)
                    assert (instance_id, reason, requests) == (event.loss.instance_id, event.loss.reason, len(losses))
                case Recover(request_id, loss):
                    assert losses[request_id] == loss
                    assert self.passed[request_id] != TRUTH
                    assert self.requests[request_id].instance_id == loss.instance_id
                    assert request_id not in self.waits
                    self.waits.add(request_id)
                    self.owners[request_id].take_back()
                case FinishAtLength(request_id):
                    assert request_id in losses
                    assert self.passed[request_id] == TRUTH
                case Fail(request_id, error):
                    assert (losses[request_id].error, event.reason) == (error, None)
                case Forget(request_id):
                    self.owners.pop(request_id)
                    self.waits.discard(request_id)
                    self.held_since_s.pop(request_id, None)
                case FailBroken(_, gap):
                    raise AssertionError(f"honest workers leave no gap: {gap}")
        if isinstance(event, WorkerLost):
            assert sum(isinstance(each, ReportLoss) for each in instructions) == 1

    # -- what must hold

    @invariant()
    def each_token_came_once(self) -> None:
        self.manager.validate()
        for request_id, passed in self.passed.items():
            assert passed == TRUTH[: len(passed)], request_id

    @invariant()
    def the_manager_believes_what_the_model_does(self) -> None:
        assert len(self.manager) == len(self.owners)
        owned = [owner.owner for owner in self.owners.values() if owner.owner is not None]
        assert self.manager.owned() == Counter(owned)
        for request_id, request in self.requests.items():
            owner = self.owners.get(request_id)
            if owner is None:
                assert request.state is (RelayState.NEW if request_id in self.withdrawn else RelayState.ENDED)
                continue
            assert (request.stream.owner, request.stream.epoch) == (owner.owner, owner.epoch)
            assert request.state is (RelayState.LOST if owner.owner is None else RelayState.RUNNING)
            assert (owner.owner is None) == (request_id in self.waits)
            if request.stream.holds:
                self.held_since_s.setdefault(request_id, self.now_s)
            else:
                self.held_since_s.pop(request_id, None)

    def teardown(self) -> None:
        """All that was sent arrives, and everybody works on: then nobody waits for a worker any more."""
        for _ in range(MAX_TOKENS + 2):
            for slot, worker in self.workers.items():
                self.hear(slot)
                self.compute(slot, 1)
                while any(life.outbox for life in worker.lives):
                    self.deliver(slot)
                    self.the_manager_believes_what_the_model_does()
            self.wait(1.0)
            self.the_manager_believes_what_the_model_does()
        assert self.owners.keys() <= self.waits, "a request whose worker goes on has ended"
        for request_id in list(self.owners):
            self._tell(Dropped(request_id))
        self.manager.validate()
        assert len(self.manager) == 0
        assert not self.manager._holding


TestAnyCourse = AnyCourse.TestCase
