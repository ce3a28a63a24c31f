"""One HTTP request on its way through a gateway that has its endpoint picked here. Pure.

    WAITING --headers--> READING --body, whole--> PICKING --picked--> SENT --answer's headers--> ANSWERING --> ENDED
       |                    |                        |
       |                    '------- refused --------+--> ENDED
       '-- headers without a body --> SENT

Every state but ENDED may become ENDED (the gateway has closed the stream, or it takes too long) or ANSWERING (the
gateway answers by itself).

The protocol is that of the Kubernetes Gateway API inference extension over Envoy's external processing, bodies in full
duplex: whatever Envoy has is sent here, and goes on only as far as it is given back. A request's headers are kept back
until its body is whole, since only that says which model and which prompt it is for. From then on everything is given
back as it comes.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias, assert_never

from mesh.errors import IllegalTransition
from mesh.invariants import invariants

MAX_PIECE_BYTES: Final = 48 * 1024
"""Of a body that is given back. Envoy takes no more than its stream's buffer at once, 64 KiB by default."""


class PickingState(StrEnum):
    """How far the request has come."""

    WAITING = "waiting"
    """The headers have not come yet."""
    READING = "reading"
    """The body is coming, and is held."""
    PICKING = "picking"
    """An endpoint is looked for."""
    SENT = "sent"
    """The request is on its way to its endpoint."""
    ANSWERING = "answering"
    """The answer's headers have come."""
    ENDED = "ended"


TRANSITIONS: Final[dict[PickingState, frozenset[PickingState]]] = {
    PickingState.WAITING: frozenset({PickingState.READING, PickingState.SENT, PickingState.ENDED}),
    PickingState.READING: frozenset({PickingState.PICKING, PickingState.ANSWERING, PickingState.ENDED}),
    PickingState.PICKING: frozenset({PickingState.SENT, PickingState.ANSWERING, PickingState.ENDED}),
    PickingState.SENT: frozenset({PickingState.ANSWERING, PickingState.ENDED}),
    PickingState.ANSWERING: frozenset({PickingState.ENDED}),
    PickingState.ENDED: frozenset(),
}


_COMING: Final = frozenset({PickingState.WAITING, PickingState.READING})
_HELD: Final = _COMING | {PickingState.PICKING}


class Way(StrEnum):
    """Which body or trailers are meant."""

    REQUEST = "request"
    ANSWER = "answer"


# -- events


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    """`ends`: there is no body. `hears_answer`: the answer's body will pass, too; if not, it ends with the stream."""

    ends: bool
    hears_answer: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """Of a body. `ends`: its last."""

    way: Way
    content: bytes
    ends: bool


@dataclass(frozen=True, slots=True)
class Trailers:
    """They end what they belong to."""

    way: Way


@dataclass(frozen=True, slots=True)
class AnswerHeaders:
    """`ends`: the answer has no body."""

    status: int
    ends: bool


@dataclass(frozen=True, slots=True)
class Picked:
    """Where the request goes: the endpoint first, then those to try if it cannot be reached. None: the gateway is to
    choose by itself."""

    endpoints: tuple[str, ...]


class Because(StrEnum):
    """Why a request is refused."""

    TOO_LARGE = "too_large"
    """More body than is held of one request."""
    TOO_SLOW = "too_slow"
    """Its body did not come in time."""
    NOT_PICKED = "not_picked"
    """Who looked for an endpoint says why."""


@dataclass(frozen=True, slots=True)
class NotPicked:
    """There is no endpoint for it, or no room to hold its body. Of no effect on one that was sent already."""


@dataclass(frozen=True, slots=True)
class BodyLate:
    """The time for the body is over."""


@dataclass(frozen=True, slots=True)
class RequestLate:
    """The time for the whole request is over."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The gateway has closed the stream: the request is over, or its client has gone. Allowed in every state."""


Event: TypeAlias = (
    RequestHeaders | Piece | Trailers | AnswerHeaders | Picked | NotPicked | BodyLate | RequestLate | Closed
)


# -- instructions


@dataclass(frozen=True, slots=True)
class Pick:
    """Look for an endpoint; say `Picked` or `NotPicked`."""

    body: bytes


@dataclass(frozen=True, slots=True)
class SendHeaders:
    """Let the request's headers go on, to one of these endpoints."""

    endpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SendAnswerHeaders:
    """Let the answer's headers go on."""


@dataclass(frozen=True, slots=True)
class SendPiece:
    """Let this much of a body go on."""

    way: Way
    content: bytes
    ends: bool


@dataclass(frozen=True, slots=True)
class SendTrailers:
    """Let the trailers go on."""

    way: Way


@dataclass(frozen=True, slots=True)
class Refuse:
    """Have the gateway answer by itself, and nothing else."""

    because: Because


@dataclass(frozen=True, slots=True)
class End:
    """The request is at its endpoint no more. Said once of each that an endpoint was picked for."""

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Hang:
    """Close the stream: the gateway ends the request by itself."""


Instruction: TypeAlias = Pick | SendHeaders | SendAnswerHeaders | SendPiece | SendTrailers | Refuse | End | Hang


@dataclass(slots=True)
class PickingManager:
    """Of one request. Raises `IllegalTransition`, with the request's story, for what no gateway may say."""

    max_body_bytes: int
    state: PickingState = PickingState.WAITING
    held_bytes: int = 0
    _held: list[bytes] = field(default_factory=list)
    _has_trailers: bool = False
    _hears_answer: bool = True
    _is_counted: bool = False
    """An endpoint was picked, and the request's end was not told yet."""
    _status: int = 0
    _body: bytes = b""
    """The whole one, while an endpoint is looked for."""

    def handle(self, event: Event) -> list[Instruction]:
        """What to do, in this order, now that this has happened."""
        match event:
            case RequestHeaders(ends, hears_answer):
                self._expect(event, PickingState.WAITING)
                self._hears_answer = hears_answer
                if not ends:
                    self._go(PickingState.READING)
                    return []
                self._go(PickingState.SENT)
                return [SendHeaders(())]
            case Piece(way, content, ends):
                if way is Way.REQUEST:
                    return self._read(event, content, ends=ends)
                self._expect(event, PickingState.ANSWERING)
                return [SendPiece(way, content, ends), *(self._answered() if ends else ())]
            case Trailers(way):
                if way is Way.REQUEST:
                    return self._read_trailers(event)
                self._expect(event, PickingState.ANSWERING)
                return [SendTrailers(way), *self._answered()]
            case Picked(endpoints):
                return self._picked(event, endpoints)
            case NotPicked():
                return self._refuse(Because.NOT_PICKED) if self.state in _HELD else []
            case AnswerHeaders(status, ends):
                self._expect(event, PickingState.READING, PickingState.PICKING, PickingState.SENT)
                self._go(PickingState.ANSWERING)
                self._forget()
                self._status = status
                return [SendAnswerHeaders(), *(self._answered() if ends else ())]
            case BodyLate():
                return self._refuse(Because.TOO_SLOW) if self.state in _COMING else []
            case RequestLate():
                return [*self._end(ok=False, reason="deadline"), Hang()]
            case Closed():
                if self.state is PickingState.ANSWERING and not self._hears_answer:
                    return self._answered()
                return self._end(ok=False, reason="aborted")
            case _:
                assert_never(event)

    @property
    def is_coming(self) -> bool:
        """Whether the request has not come whole yet."""
        return self.state in _COMING

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert 0 <= self.held_bytes <= self.max_body_bytes, self._story()
        assert self.held_bytes == len(self._body) + sum(map(len, self._held)), self._story()
        if self.state not in (PickingState.READING, PickingState.PICKING):
            assert not self.held_bytes, self._story()
        if self._is_counted:
            assert self.state in (PickingState.SENT, PickingState.ANSWERING), self._story()

    def _read(self, event: Event, content: bytes, *, ends: bool) -> list[Instruction]:
        if self.state in (PickingState.ANSWERING, PickingState.ENDED):
            return [SendPiece(Way.REQUEST, content, ends)]  # the gateway has answered without waiting for all of it
        self._expect(event, PickingState.READING)
        if self.held_bytes + len(content) > self.max_body_bytes:
            return self._refuse(Because.TOO_LARGE)
        self._held.append(content)
        self.held_bytes += len(content)
        return self._pick() if ends else []

    def _read_trailers(self, event: Event) -> list[Instruction]:
        if self.state in (PickingState.ANSWERING, PickingState.ENDED):
            return [SendTrailers(Way.REQUEST)]
        self._expect(event, PickingState.READING)
        self._has_trailers = True
        return self._pick()

    def _pick(self) -> list[Instruction]:
        self._go(PickingState.PICKING)
        self._body = b"".join(self._held)
        self._held.clear()
        return [Pick(self._body)]

    def _picked(self, event: Event, endpoints: tuple[str, ...]) -> list[Instruction]:
        if self.state in (PickingState.ANSWERING, PickingState.ENDED):
            return [End(ok=False, reason="aborted")] if endpoints else []
        self._expect(event, PickingState.PICKING)
        self._go(PickingState.SENT)
        self._is_counted = bool(endpoints)
        body = self._body
        self._forget()
        pieces = [body[start : start + MAX_PIECE_BYTES] for start in range(0, len(body), MAX_PIECE_BYTES)] or [b""]
        last = len(pieces) - 1
        return [
            SendHeaders(endpoints),
            *(
                SendPiece(Way.REQUEST, piece, ends=index == last and not self._has_trailers)
                for index, piece in enumerate(pieces)
            ),
            *([SendTrailers(Way.REQUEST)] if self._has_trailers else []),
        ]

    def _refuse(self, because: Because) -> list[Instruction]:
        self._end(ok=False, reason=because.value)
        return [Refuse(because)]

    def _answered(self) -> list[Instruction]:
        return self._end(ok=self._status < 500, reason="finished" if self._status < 400 else f"status_{self._status}")

    def _end(self, *, ok: bool, reason: str) -> list[Instruction]:
        if self.state is not PickingState.ENDED:
            self._go(PickingState.ENDED)
        self._forget()
        was_counted, self._is_counted = self._is_counted, False
        return [End(ok, reason)] if was_counted else []

    def _forget(self) -> None:
        self._held.clear()
        self._body, self.held_bytes = b"", 0

    def _go(self, state: PickingState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"{self._story()} cannot become {state}")
        self.state = state

    def _expect(self, event: Event, *states: PickingState) -> None:
        if self.state not in states:
            raise IllegalTransition(f"{self._story()} does not await {type(event).__name__}")

    def _story(self) -> str:
        return f"a request that is {self.state}, {self.held_bytes} bytes of its body held, answered {self._status}"
