"""Passes the tokens of a frontend's requests on, each once, and says what becomes of the requests whose workers are
lost. Pure; time is an argument.

    NEW --submitted or adopted--> RUNNING --lost--> LOST
     ^                             |  ^              |
     '---------withdrawn-----------'  '--submitted---'

Every state but ENDED may become ENDED: the client has all tokens, wants no more, or the request has failed.

`TokenStream` says which tokens of one request count. The manager has the streams of all requests that were given to a
worker, and knows what must be done besides: which workers are to drop a request, which requests are placed again, and
which workers are to keep one for a client that may come back. How often a request is placed again is decided by
`RecoveryManager`, whether a worker is hung by the frontend's `LivenessMonitor`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Generic

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.ownership import Filled, TokenGap
from controlplane.protocols.relay.events import (
    Abort,
    Adopted,
    D,
    DeltaCame,
    Dropped,
    E,
    Event,
    Fail,
    FailAdopted,
    FailBroken,
    FinishAtLength,
    Forget,
    Instruction,
    Loss,
    Moved,
    Pass,
    Recover,
    RelayedDelta,
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
from mesh.errors import IllegalTransition
from mesh.invariants import invariants

MAX_ENDED: Final = 4096
"""Requests that are remembered past their end, which a worker that has just got them does not know of yet."""


class RelayManager(Generic[D, E]):
    """Of all requests of a frontend that a worker has, or has had. Feed events to `handle` and carry out what it
    returns, in order.

    Deltas go to `TokenStream.push` of their request first, and here only where that does not take them.

    Raises `IllegalTransition`, with the request's story, for what only a bug can ask for. Events that come too late to
    matter return nothing.
    """

    def __init__(self) -> None:
        self._requests: dict[str, RelayedRequest[D]] = {}
        """RUNNING and LOST ones, by id: a request's tokens may come from any worker."""
        self._holding: dict[str, RelayedRequest[D]] = {}
        """Those that wait for tokens of a former owner."""
        self._ended: dict[str, None] = {}
        """Ids of those that have ended here or were withdrawn, the oldest first, but for those left to their worker."""

    def handle(self, event: Event[D, E], now_s: float) -> tuple[Instruction[D, E], ...]:
        """What is to be done about `event`."""
        return tuple(self._handle(event, now_s))

    # -- what there is

    def __len__(self) -> int:
        return len(self._requests)

    def owned(self) -> Counter[Incarnation]:
        """How many requests each worker has."""
        owners = (request.stream.owner for request in self._requests.values())
        return Counter(owner for owner in owners if owner is not None)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert len(self._ended) <= MAX_ENDED, "what is remembered is bounded"
        assert not self._ended.keys() & self._requests.keys(), "a request is here or has ended"
        for request_id, request in self._requests.items():
            stream = request.stream
            assert request.request_id == request_id, "kept by its own id"
            assert request.state in (RelayState.RUNNING, RelayState.LOST), request.story
            assert (stream.owner is None) == (request.state is RelayState.LOST), request.story
            assert stream.holds == (request_id in self._holding), f"nobody watches what is held: {request.story}"
            stream.validate()
        assert self._holding.keys() <= self._requests.keys(), "only what is here can hold tokens"

    # -- events

    def _handle(self, event: Event[D, E], now_s: float) -> Iterator[Instruction[D, E]]:
        match event:
            case DeltaCame(sender, delta):
                yield from self._on_delta(sender, delta, now_s)
            case Submitted(request, owner):
                if self._requests.get(request.request_id, request) is not request:
                    raise IllegalTransition(f"another {request.story} is here; this is a bug of the frontend")
                request.go(RelayState.RUNNING)
                request.stream.place(owner)
                self._add(request)
            case Adopted(request, owner, epoch):
                yield from self._on_adopted(request, owner, epoch)
            case Withdrawn(request_id):
                yield from self._on_withdrawn(request_id)
            case WorkerGaveUp():
                yield from self._on_given_up(event)
            case Moved():
                yield from self._on_moved(event)
            case WorkerLost(sender, loss, is_connected):
                yield from self._on_worker_lost(sender, loss, is_connected=is_connected)
            case Dropped(request_id, is_done):
                request_ = self._requests.get(request_id)
                if request_ is not None:
                    if request_.stream.owner is not None:
                        why = Why.DONE if is_done else Why.UNWANTED
                        yield Abort(request_.stream.owner, request_id, request_.stream.epoch, why)
                    yield self._end(request_)
            case Released(request_id):
                yield from self._on_released(request_id)
            case Tick():
                for held in list(self._holding.values()):
                    yield from self._pass(held, held.stream.expire(now_s))

    def _on_delta(self, sender: Incarnation, delta: D, now_s: float) -> Iterator[Instruction[D, E]]:
        request = self._requests.get(delta.request_id)
        if request is None:
            if delta.emitted_token_ids:  # it moved there while its client took it back elsewhere
                yield self._refuse(sender, delta.request_id, delta.epoch)
            return
        try:
            passed = request.stream.receive(sender, delta, now_s)
        except TokenGap as gap:
            yield Abort(sender, request.request_id, delta.epoch, Why.BROKEN)
            yield FailBroken(request.request_id, gap)
            yield self._end(request)
            return
        if passed is None:
            yield Abort(sender, request.request_id, delta.epoch, Why.STRAY)
        else:
            yield from self._pass(request, passed)

    def _on_adopted(self, request: RelayedRequest[D], owner: Incarnation, epoch: int) -> Iterator[Instruction[D, E]]:
        former = self._requests.get(request.request_id)
        if former is not None:  # its client came back to the frontend that it had left, which had not noticed
            yield FailAdopted(former.request_id)
            yield self._end(former)
        request.go(RelayState.RUNNING)
        request.stream.adopt(owner, epoch)
        self._add(request)

    def _on_withdrawn(self, request_id: str) -> Iterator[Instruction[D, E]]:
        request = self._requests.get(request_id)
        if request is None:
            return
        owner, epoch = request.stream.owner, request.stream.epoch
        request.go(RelayState.NEW)
        request.stream.take_back()
        self._remove(request)
        self._remember(request_id)
        assert owner is not None, "a running request has an owner"
        yield Abort(owner, request_id, epoch, Why.UNWANTED)

    def _on_given_up(self, event: WorkerGaveUp[E]) -> Iterator[Instruction[D, E]]:
        request = self._requests.get(event.request_id)
        if request is None:
            return
        if not request.stream.gives_up(event.sender, event.epoch):
            yield from self._pass(request, request.stream.silenced(event.sender))
            return
        yield from self._pass(request, request.stream.settle())
        if not self._has(request):
            return
        if event.reason is None:
            yield Fail(event.request_id, event.error)
            yield self._end(request)
        else:
            yield from self._lose(request, Loss(event.reason, event.sender.instance_id, event.error, event.present))

    def _on_moved(self, event: Moved[E]) -> Iterator[Instruction[D, E]]:
        request = self._requests.get(event.request_id)
        if request is None:  # its client took it back from the former owner meanwhile
            if event.target_lost is None:
                yield self._refuse(event.target, event.request_id, event.epoch)
            return
        yield from self._pass(request, request.stream.moved(event.sender, event.target, event.epoch))
        if event.target_lost is not None:
            yield from self._silence(request, event.target, event.target_lost)

    def _on_worker_lost(self, sender: Incarnation, loss: Loss[E], *, is_connected: bool) -> Iterator[Instruction[D, E]]:
        owned = [request for request in self._requests.values() if request.stream.owner == sender]
        if is_connected:
            yield from (Abort(sender, request.request_id, request.stream.epoch, Why.HUNG) for request in owned)
        yield ReportLoss(sender.instance_id, loss.reason, len(owned))
        for request in list(self._requests.values()):
            yield from self._silence(request, sender, loss)

    def _on_released(self, request_id: str) -> Iterator[Instruction[D, E]]:
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.stream.owner is not None:
            yield Release(request.stream.owner, request_id, request.stream.epoch)
        yield self._end(request)
        del self._ended[request_id]

    # -- steps

    def _refuse(self, worker: Incarnation, request_id: str, epoch: int) -> Abort | Release:
        """A worker has got a request from another one, and nobody here waits for it.

        One that has not ended here was left to its worker, perhaps by an earlier life of this frontend, and has moved
        since. Its client may come back.
        """
        if request_id in self._ended:
            return Abort(worker, request_id, epoch, Why.UNWANTED)
        return Release(worker, request_id, epoch)

    def _pass(self, request: RelayedRequest[D], passed: Sequence[D | Filled]) -> Iterator[Instruction[D, E]]:
        """Nothing counts behind the delta that ends the request."""
        last = _last_of(passed)
        if last is not None:
            yield Pass(request.request_id, tuple(passed[: last + 1]))
            yield self._end(request)
            return
        if passed:
            yield Pass(request.request_id, tuple(passed))
        self._watch(request)

    def _silence(self, request: RelayedRequest[D], sender: Incarnation, loss: Loss[E]) -> Iterator[Instruction[D, E]]:
        """Nothing more comes from this sender."""
        if not self._has(request):
            return
        if sender != request.stream.owner:
            yield from self._pass(request, request.stream.silenced(sender))
            return
        yield from self._pass(request, request.stream.settle())
        if self._has(request):
            yield from self._lose(request, loss)

    def _lose(self, request: RelayedRequest[D], loss: Loss[E]) -> Iterator[Instruction[D, E]]:
        request.last_instance_id = loss.instance_id
        request.stream.take_back()
        if len(request.stream.token_ids) >= request.max_tokens:  # only the word that this was all is missing
            yield FinishAtLength(request.request_id)
            yield self._end(request)
        else:
            request.go(RelayState.LOST)
            yield Recover(request.request_id, loss)

    def _has(self, request: RelayedRequest[D]) -> bool:
        """Whether it has not ended."""
        return request.request_id in self._requests

    def _add(self, request: RelayedRequest[D]) -> None:
        self._requests[request.request_id] = request
        self._ended.pop(request.request_id, None)

    def _end(self, request: RelayedRequest[D]) -> Forget:
        request.go(RelayState.ENDED)
        self._remove(request)
        self._remember(request.request_id)
        return Forget(request.request_id)

    def _remember(self, request_id: str) -> None:
        self._ended[request_id] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _remove(self, request: RelayedRequest[D]) -> None:
        del self._requests[request.request_id]
        self._holding.pop(request.request_id, None)

    def _watch(self, request: RelayedRequest[D]) -> None:
        if request.stream.holds:
            self._holding[request.request_id] = request
        else:
            self._holding.pop(request.request_id, None)


def _last_of(passed: Iterable[RelayedDelta | Filled]) -> int | None:
    """Where the delta is that ends the request; None if there is none."""
    for index, one in enumerate(passed):
        if not isinstance(one, Filled) and one.finish_reason:
            return index
    return None
