"""The requests that run here, the streams they belong to, and what each stream gets. Pure: events in, instructions out.

A request lives from `admit` to the engine's own ending delta. Its stream hears of exactly one end, which may
come earlier (deadline, drain, a broken engine): the entry then stays as `discarded`, swallowing what the engine
still sends, so that the id cannot be taken twice inside the engine.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal

from controlplane.model.request import EngineRequest, FinishReason, StepOutput, TokenDelta
from controlplane.policies.fair_share import GENERATED_WEIGHT, FairShare, turn_of
from controlplane.protocols.bouncing import QueuedPrefills
from controlplane.protocols.ownership import EPOCHS_PER_ADOPTION
from engine_worker.deltas import Delta, Failure, FailureCode
from engine_worker.finished_tails import FinishedTail, FinishedTails
from mesh.errors import IllegalTransition
from mesh.invariants import invariants

State = Literal["running", "aborting", "discarded"]

_TRANSITIONS: dict[State, tuple[State, ...]] = {
    "running": ("aborting", "discarded"),
    # The frontend took the request back; its stream still awaits the end.
    "aborting": ("discarded",),
    # The stream is gone or was told the end; only the engine's own end is awaited.
    "discarded": (),
}

_ENDS = (FinishReason.STOP, FinishReason.LENGTH)

MAX_REMEMBERED_IDS = 8192
"""Requests that were admitted, or have ended, since a report."""
NO_STREAM = 0
"""The stream of a request whose frontend has gone and which waits for another one."""


@dataclass(slots=True)
class TrackedRequest:
    """One request inside the engine: everything another worker would need to go on with it."""

    request: EngineRequest
    stream_id: int
    frontend_id: str
    admitted_s: float
    deadline_s: float | None
    emitted_token_ids: list[int]
    """All generated tokens: those that the request brought along and those that the engine added."""
    epoch: int = 0
    """Under which its deltas are sent; grows with each handoff and each recovery."""
    state: State = "running"
    started: bool = False
    """The engine has answered at least once."""
    orphaned_until_s: float | None = None
    """While it has no frontend: when it is given up."""
    cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache."""
    taken_over: bool = False
    """It came by a migration, and its first delta here must name the tokens before it."""
    predicted_end_tokens: int | None = None
    """Tokens that it is predicted to have generated at its end; None before the first prediction."""
    predicted_band_tokens: tuple[int, int] | None = None
    """With a probability of 10 and of 90 % as many or fewer; None where nobody has said so."""

    def left_ms(self, now_s: float) -> int:
        """Of its time; 0 where it has no deadline, at least 1 where it has one."""
        return 0 if self.deadline_s is None else max(1, round(1000 * (self.deadline_s - now_s)))

    @property
    def remaining_tokens(self) -> int | None:
        """Tokens that it is predicted still to generate; one that outlives its prediction may end at any moment."""
        if self.predicted_end_tokens is None:
            return None
        return max(0, self.predicted_end_tokens - len(self.emitted_token_ids))

    @property
    def predicted_ends(self) -> tuple[int | None, tuple[int, int] | None]:
        """Tokens at its end as predicted, and their 10 and 90 % quantiles."""
        return self.predicted_end_tokens, self.predicted_band_tokens

    @property
    def band_tokens(self) -> tuple[int, int] | None:
        """With a probability of 10 and of 90 % as many or fewer remain."""
        if self.predicted_band_tokens is None:
            return None
        low, high = self.predicted_band_tokens
        return max(0, low - len(self.emitted_token_ids)), max(0, high - len(self.emitted_token_ids))

    def become(self, state: State) -> None:
        """Change state. Raises `IllegalTransition` for a change that the table of transitions does not have."""
        if state not in _TRANSITIONS[self.state]:
            raise IllegalTransition(
                f"request {self.request.request_id} of frontend {self.frontend_id} cannot go from {self.state} to "
                f"{state} after {len(self.emitted_token_ids)} tokens; this is a bug of the worker"
            )
        self.state = state


@dataclass(frozen=True, slots=True)
class Adoption:
    """A request that another frontend goes on with."""

    request: EngineRequest
    """The request with all tokens generated so far."""
    epoch: int
    """The epoch of its deltas from now on."""
    deadline_s: float | None = None
    cached_tokens: int | None = None
    is_ended: bool = False
    finish_reason: FinishReason | None = None
    """None for one that has ended: at a stop string, which the frontend finds in the tokens."""


@dataclass(slots=True)
class Instructions:
    """What the worker is to do now: deltas to send and requests to abort."""

    messages: dict[int, list[Delta]] = field(default_factory=dict)
    """Deltas to send, by stream."""
    aborts: list[str] = field(default_factory=list)
    """Requests that the engine is to drop."""
    epochs: dict[str, int] = field(default_factory=dict)
    """Of the deltas in `messages`, by request; those of epoch 0 are left out."""
    before: dict[str, Sequence[int]] = field(default_factory=dict)
    """All tokens before the first delta that a request brings here after it was taken over."""

    def send(self, stream_id: int, delta: Delta, epoch: int = 0) -> None:
        """Add one delta for a stream, to be sent under the request's epoch. A delta for an orphan (`NO_STREAM`) is
        dropped."""
        if stream_id == NO_STREAM:
            return
        if epoch:
            self.epochs[delta.request_id] = epoch
        told = self.messages.get(stream_id)
        if told is None:
            self.messages[stream_id] = [delta]
        else:
            told.append(delta)


class RequestTable:
    """All requests inside the engine, in the order of their admission."""

    def __init__(self, max_orphans: int = 0) -> None:
        """`max_orphans`: requests that may wait for another frontend at once."""
        self._max_orphans = max_orphans
        self._requests: dict[str, TrackedRequest] = {}
        self.shares = FairShare()
        """Of the tenants whose requests the engine has, in tokens that it computes for them."""
        self.prefills = QueuedPrefills()
        """Of those that have not begun to answer."""
        self.tails = FinishedTails()
        """What ended of late and can be resumed."""
        self._recent_admissions: deque[str] = deque(maxlen=MAX_REMEMBERED_IDS)
        self._recent_ends: deque[str] = deque(maxlen=MAX_REMEMBERED_IDS)
        self.on_end: Callable[[str, int], None] = lambda _request_id, _tokens: None
        """Told the id and the number of tokens of each request that ended by itself or at its limit."""
        self.admissions_total = 0
        self.ends_total = 0
        """Requests that the engine has no more, those that another instance has taken over included."""
        self.strays_total = 0
        """Deltas for requests that are not here: a bug of the engine."""
        self.orphaned_total = 0
        self.expired_orphans_total = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[TrackedRequest]:
        return iter(self._requests.values())

    def find(self, request_id: str) -> TrackedRequest | None:
        """The request of that id, if the engine has it."""
        return self._requests.get(request_id)

    def live(self, stream_id: int | None = None) -> list[TrackedRequest]:
        """Requests whose end was not told yet, of one stream or of all."""
        return [tracked for tracked in self if tracked.state != "discarded" and stream_id in (None, tracked.stream_id)]

    def newest(self, count: int) -> list[TrackedRequest]:
        """The `count` requests admitted last, latest first."""
        return list(islice(reversed(self._requests.values()), count))

    def admitted_since(self, position: int) -> list[str]:
        """Ids admitted after the first `position` admissions, as far as they are remembered."""
        return _newest(self._recent_admissions, self.admissions_total - position)

    def ended_since(self, position: int) -> list[str]:
        """Ids of requests that have ended or moved away after the first `position` that did, likewise."""
        return _newest(self._recent_ends, self.ends_total - position)

    def with_turn(self, request: EngineRequest) -> EngineRequest:
        """A request that is about to be submitted, in its turn; `take_out` it if the engine refuses."""
        computed_tokens = len(request.prompt_token_ids) + len(request.emitted_token_ids)
        turn = turn_of(self.shares.enter(request.request_id, request.tenant, computed_tokens))
        return replace(request, turn=turn) if turn else request

    def admit(
        self,
        request: EngineRequest,
        *,
        stream_id: int,
        frontend_id: str,
        now_s: float,
        deadline_s: float | None = None,
        epoch: int = 0,
        taken_over: bool = False,
        new_prefill_tokens: int | None = None,
    ) -> None:
        """Record a request that the engine has taken. `new_prefill_tokens`: what its placement believed it to compute;
        None: all of it. Raises IllegalTransition if the id is here already."""
        if request.request_id in self._requests:
            raise IllegalTransition(f"request {request.request_id} is admitted twice; this is a bug of the worker")
        self._requests[request.request_id] = TrackedRequest(
            request,
            stream_id,
            frontend_id,
            now_s,
            deadline_s,
            list(request.emitted_token_ids),
            epoch,
            taken_over=taken_over,
        )
        if taken_over:  # with the KV of all that was computed elsewhere
            self.shares.enter(request.request_id, request.tenant, 0)
            self.shares.begin(request.request_id)
        else:
            context_tokens = len(request.prompt_token_ids) + len(request.emitted_token_ids)
            believed_tokens = context_tokens if new_prefill_tokens is None else new_prefill_tokens
            self.prefills.add(request.request_id, min(believed_tokens, context_tokens))
        self._recent_admissions.append(request.request_id)
        self.admissions_total += 1

    def route(self, step: StepOutput) -> Instructions:
        """Share the deltas of one engine step out among the streams."""
        instructions = Instructions()
        for delta in step.deltas:
            tracked = self._requests.get(delta.request_id)
            if tracked is None:
                self.strays_total += 1
                continue
            self._charge(tracked, delta)
            if delta.finish_reason is not None:
                self.take_out(delta.request_id)
            if tracked.state == "discarded":
                continue
            if delta.offset == len(tracked.emitted_token_ids):
                if tracked.taken_over and not tracked.started:
                    instructions.before[delta.request_id] = tuple(tracked.emitted_token_ids)
                tracked.emitted_token_ids += delta.token_ids
                if not tracked.started:
                    tracked.started = True
                    self.prefills.done(delta.request_id)
                instructions.send(tracked.stream_id, delta, tracked.epoch)
                if delta.cached_tokens is not None:
                    tracked.cached_tokens = delta.cached_tokens
                if delta.finish_reason in _ENDS:
                    self.on_end(delta.request_id, len(tracked.emitted_token_ids))
                    self._keep_tail(tracked, delta.finish_reason)
            else:
                self._end_broken(tracked, delta, instructions)
        return instructions

    def predicted(
        self,
        request_id: str,
        generated_tokens: int,
        remaining_tokens: int,
        band_tokens: tuple[int, int] | None = None,
    ) -> None:
        """A prediction, made when the request had generated so many tokens, and its 10 and 90 % quantiles where they
        are known. One of a request that has ended or moved meanwhile is dropped."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.predicted_end_tokens = generated_tokens + remaining_tokens
            low, high = band_tokens or (0, 0)
            is_said = band_tokens is not None
            tracked.predicted_band_tokens = (generated_tokens + low, generated_tokens + high) if is_said else None

    def take_out(self, request_id: str) -> TrackedRequest | None:
        """Forget a request that the engine does not have any more: no end of it will come."""
        self.shares.leave(request_id)
        self.prefills.done(request_id)
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            self._recent_ends.append(request_id)
            self.ends_total += 1
        return tracked

    def abort(self, stream_id: int, request_id: str, epoch: int, *, is_done: bool = False) -> Instructions:
        """A frontend takes a request back, in the life of this epoch or one before; `is_done`: because its client has
        all that it wanted. Unknown ids, other streams' requests and later lives are left alone: an abort may cross the
        request's own end, and the way of its next life to here."""
        instructions = Instructions()
        tracked = self._requests.get(request_id)
        is_meant = tracked is not None and tracked.stream_id == stream_id and tracked.epoch <= epoch
        if tracked is not None and is_meant and tracked.state == "running":
            if is_done:
                self._keep_tail(tracked, None)
            tracked.become("aborting")
            instructions.aborts.append(request_id)
        return instructions

    @property
    def orphans(self) -> list[TrackedRequest]:
        """Requests whose frontend has gone and which wait for another one."""
        return self.live(NO_STREAM)

    def close_stream(self, stream_id: int, orphaned_until_s: float | None = None) -> Instructions:
        """A stream has ended: drop its requests, but those that can be resumed wait until then for another frontend."""
        instructions = Instructions()
        for tracked in self.live(stream_id):
            self._orphan(tracked, orphaned_until_s, instructions)
        return instructions

    def release(self, stream_id: int, request_id: str, epoch: int, orphaned_until_s: float | None) -> Instructions:
        """A client has left, in the life of this epoch or one before, that may come back to any frontend. If it is back
        already, in a later life, that one is left alone."""
        instructions = Instructions()
        tracked = self._requests.get(request_id)
        is_meant = tracked is not None and tracked.stream_id == stream_id and tracked.epoch <= epoch
        if tracked is not None and is_meant and tracked.state == "running":
            self._orphan(tracked, orphaned_until_s, instructions)
        return instructions

    def drop_orphans(self, frontend_id: str) -> Instructions:
        """A frontend is back that had lost its connection only, and has placed its requests again."""
        instructions = Instructions()
        for tracked in self.orphans:
            if tracked.frontend_id == frontend_id:
                self._discard(tracked, instructions)
        return instructions

    def adopt(
        self,
        client_request_id: str,
        stream_id: int,
        frontend_id: str,
        may_adopt: Callable[[str], bool] = lambda _: True,
    ) -> tuple[list[Adoption], Instructions]:
        """A frontend has the client of this request: all choices that are here are its own from now on, also those that
        have just ended, and those that another frontend believes to have still; but not those that it may not adopt
        just now."""
        instructions, adoptions = Instructions(), list[Adoption]()
        for tracked in self.live():
            resume = tracked.request.resume
            if resume is None or resume.client_request_id != client_request_id or tracked.state != "running":
                continue
            if not may_adopt(tracked.request.request_id):
                continue
            told = len(tracked.emitted_token_ids)
            message = "its client has come back to another frontend, which goes on with it"
            failure = Failure(tracked.request.request_id, told, FailureCode.ADOPTED, message)
            instructions.send(tracked.stream_id, failure, tracked.epoch)
            tracked.stream_id, tracked.frontend_id = stream_id, frontend_id
            tracked.orphaned_until_s = None
            tracked.started = True
            tracked.epoch += EPOCHS_PER_ADOPTION
            adoptions.append(
                Adoption(_whole(tracked), tracked.epoch, tracked.deadline_s, cached_tokens=tracked.cached_tokens)
            )
        for tail in self.tails.of(client_request_id):
            adoptions.append(
                Adoption(
                    tail.request,
                    tail.epoch + EPOCHS_PER_ADOPTION,
                    cached_tokens=tail.cached_tokens,
                    is_ended=True,
                    finish_reason=tail.finish_reason,
                )
            )
        return adoptions, instructions

    def refuse_duplicate(self, stream_id: int, request_id: str, epoch: int = 0) -> Instructions | None:
        """Answer to a request whose id is here already; None if it is not. The answer bears the `epoch` of the
        second request. One that comes back while the first is being dropped may be tried again, here or elsewhere; so
        may the next life of a request, whose former one (of a handoff that the frontend never heard of, or of a
        connection that is dead) is dropped for it.

        On the stream that runs the first one, the answer ends both: the stream could not tell a refusal of the
        second from an end of the first. A former life on that stream, held up on its way while a later one moved to
        here, is waited for by nobody and not answered.
        """
        first = self._requests.get(request_id)
        if first is None:
            return None
        instructions = Instructions()
        if first.stream_id == stream_id and epoch < first.epoch:
            return instructions
        overtakes = epoch > 0 and epoch >= first.epoch
        if overtakes or first.state != "running":
            code, message = FailureCode.UNAVAILABLE, "an earlier request of this id is still being dropped; retry"
        else:
            code, message = FailureCode.REFUSED, "a request of this id is running here; ids must be unique"
        if first.state == "discarded" or first.stream_id != stream_id:
            if overtakes and first.state != "discarded":
                self._discard(first, instructions)
            instructions.send(stream_id, Failure(request_id, 0, code, message), epoch)
        else:
            first.epoch = max(first.epoch, epoch)
            self._fail(first, code, message, instructions)
        return instructions

    def expire(self, now_s: float) -> Instructions:
        """End the requests whose deadline has passed, and those that nobody has adopted in time."""
        instructions = Instructions()
        for tracked in self.orphans:
            if tracked.orphaned_until_s is not None and now_s >= tracked.orphaned_until_s:
                self.expired_orphans_total += 1
                self._discard(tracked, instructions)
        for tracked in self.live():
            if tracked.deadline_s is not None and now_s >= tracked.deadline_s:
                age_s = now_s - tracked.admitted_s
                self._fail(tracked, FailureCode.DEADLINE, f"not finished after {age_s:.1f} s", instructions)
        return instructions

    def fail_all(self, code: FailureCode, message: str) -> Instructions:
        """End every live request with this failure, as after the engine's death."""
        instructions = Instructions()
        for tracked in self.live():
            self._fail(tracked, code, message, instructions)
        return instructions

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        self.shares.validate()
        assert len(self.orphans) <= self._max_orphans, "requests without a frontend are bounded"
        assert len(self._requests) == self.admissions_total - self.ends_total, (
            "what is here was admitted, and not ended"
        )
        for request_id, tracked in self._requests.items():
            brought = list(tracked.request.emitted_token_ids)
            assert request_id == tracked.request.request_id, "each request by its own id"
            assert tracked.epoch >= 0, "epochs count from 0"
            assert tracked.emitted_token_ids[: len(brought)] == brought, f"{request_id} keeps the tokens it came with"
            if tracked.state == "discarded":
                continue
            is_orphan = tracked.stream_id == NO_STREAM
            assert is_orphan == (tracked.orphaned_until_s is not None), f"{request_id} waits for a frontend, or has one"
            if is_orphan:
                assert tracked.state == "running", f"{request_id} has nobody who could take it back"
                assert tracked.request.resume is not None, f"{request_id} cannot be resumed, and waits to be"

    def _charge(self, tracked: TrackedRequest, delta: TokenDelta) -> None:
        if not tracked.started and not tracked.taken_over:  # what moved here had its context counted elsewhere
            self.shares.begin(delta.request_id)
            self.shares.charge(delta.request_id, -(delta.cached_tokens or 0))
        self.shares.charge(delta.request_id, GENERATED_WEIGHT * len(delta.token_ids))

    def _end_broken(self, tracked: TrackedRequest, delta: TokenDelta, instructions: Instructions) -> None:
        expected = len(tracked.emitted_token_ids)
        message = f"the engine went on at token {delta.offset} instead of {expected}; this is a bug of the engine"
        instructions.send(
            tracked.stream_id, Failure(delta.request_id, expected, FailureCode.ENGINE, message), tracked.epoch
        )
        if delta.finish_reason is None:
            self._discard(tracked, instructions)

    def _fail(self, tracked: TrackedRequest, code: FailureCode, message: str, instructions: Instructions) -> None:
        failure = Failure(tracked.request.request_id, len(tracked.emitted_token_ids), code, message)
        instructions.send(tracked.stream_id, failure, tracked.epoch)
        self._discard(tracked, instructions)

    def _orphan(self, tracked: TrackedRequest, until_s: float | None, instructions: Instructions) -> None:
        can_wait = until_s is not None and tracked.request.resume is not None and tracked.state == "running"
        if not can_wait or len(self.orphans) >= self._max_orphans:
            self._discard(tracked, instructions)
            return
        tracked.stream_id, tracked.orphaned_until_s = NO_STREAM, until_s
        self.orphaned_total += 1

    def _keep_tail(self, tracked: TrackedRequest, finish_reason: FinishReason | None) -> None:
        if tracked.request.resume is not None and self._max_orphans:
            request = replace(_whole(tracked), media=None)  # its tokens are all that is asked for
            self.tails.keep(FinishedTail(request, finish_reason, tracked.cached_tokens, tracked.epoch))

    def _discard(self, tracked: TrackedRequest, instructions: Instructions) -> None:
        if tracked.state == "running":
            instructions.aborts.append(tracked.request.request_id)
        tracked.become("discarded")


def _newest(ids: deque[str], count: int) -> list[str]:
    newest_first = list(islice(reversed(ids), count))
    return newest_first[::-1]


def _whole(tracked: TrackedRequest) -> EngineRequest:
    """The request with all tokens so far."""
    return replace(tracked.request, emitted_token_ids=tuple(tracked.emitted_token_ids))
