"""What is remembered of requests that ended, without their texts: percentiles and stories are made of it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Final, NamedTuple

from controlplane.protocols.ownership import EPOCHS_PER_ADOPTION, EPOCHS_PER_RECOVERY
from penstock.v1 import frontend_pb2
from services.frontend.requests.usage import ModelUsage
from services.frontend.workers.relay import Relay

KEPT: Final = 4096
"""Requests that are remembered; some two megabytes."""
MAX_LISTED: Final = 1024
"""Of one answer to `ListEnded`."""


class Tokens(NamedTuple):
    """Of all prompts and all choices of one request."""

    prompt: int = 0
    cached: int = 0
    """Of the prompt's: found in a prefix cache."""
    generated: int = 0


NO_TOKENS: Final = Tokens()


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """What one tier of a cascade made of a request."""

    model: str
    score: float | None
    """None: its answer was not judged."""
    seconds: float | None
    """None: it failed."""
    failure: str
    """Why it gave no answer, or none that could be accepted; empty: it gave one."""


@dataclass(slots=True)
class Progress:
    """How far one request has come; points in time are on the frontend's clock, None: not yet."""

    admitted_s: float | None = None
    placed_s: float | None = None
    first_token_s: float | None = None
    instance_id: str = ""
    last_instance_id: str = ""
    policy: str = ""
    choices: int = 0
    moves: int = 0
    recoveries: int = 0
    tokens: Tokens = NO_TOKENS
    tier: str = ""
    """Of a cascade: which one answered, and why that was accepted."""
    because: str = ""
    tiers: Sequence[TierOutcome] = ()
    """All that were asked, in turn."""
    tier_usage: Sequence[ModelUsage] = ()
    """Of these, as far as they came."""

    def placed(self, instance_ids: Sequence[str], policies: Sequence[str], now_s: float) -> None:
        """Its choices are with workers: where, and who said so."""
        self.placed_s = now_s
        self.instance_id, self.policy = ",".join(dict.fromkeys(instance_ids)), ",".join(dict.fromkeys(policies))

    def ended(self, relays: Sequence[Relay], tokens: Tokens, first_token_s: float | None) -> None:
        """No more tokens come. How often a choice changed its owner shows in its epoch."""
        self.tokens, self.first_token_s, self.choices = tokens, first_token_s, len(relays)
        self.last_instance_id = ",".join(dict.fromkeys(relay.instance_id for relay in relays))
        for relay in relays:
            epoch = relay.request.stream.epoch % EPOCHS_PER_ADOPTION
            self.moves += epoch % EPOCHS_PER_RECOVERY
            self.recoveries += epoch // EPOCHS_PER_RECOVERY


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked, by whom and when."""

    request_id: str
    model: str
    endpoint: str
    owner: str
    """Name of the API key; empty without one."""
    arrived_s: float
    """On the frontend's clock."""


@dataclass(frozen=True, slots=True)
class _Ended:
    """As it is kept: made a message only for whoever asks, which takes several times as long as this."""

    number: int
    asked: Asked
    progress: Progress
    status: int
    now_s: float
    unix_s: float

    def message(self) -> frontend_pb2.EndedRequest:
        asked, progress = self.asked, self.progress
        message = frontend_pb2.EndedRequest(
            number=self.number,
            request_id=asked.request_id,
            model=asked.model,
            endpoint=asked.endpoint,
            owner=asked.owner,
            status=self.status,
            instance_id=progress.instance_id,
            last_instance_id=progress.last_instance_id or progress.instance_id,
            policy=progress.policy,
            moves=progress.moves,
            recoveries=progress.recoveries,
            arrived_unix_ms=int(1000 * (self.unix_s - (self.now_s - asked.arrived_s))),
            admitted_ms=_since_arrival_ms(asked, progress.admitted_s),
            placed_ms=_since_arrival_ms(asked, progress.placed_s),
            first_token_ms=_since_arrival_ms(asked, progress.first_token_s),
            ended_ms=1000 * (self.now_s - asked.arrived_s),
            choices=progress.choices,
            prompt_tokens=progress.tokens.prompt,
            cached_tokens=progress.tokens.cached,
            generated_tokens=progress.tokens.generated,
            tier=progress.tier,
            because=progress.because,
        )
        for tier in progress.tiers:
            message.tiers.add(model=tier.model, score=tier.score, seconds=tier.seconds, failure=tier.failure)
        return message


@dataclass(slots=True)
class EndedLog:
    """The last requests that ended at this frontend, numbered from 1."""

    _kept: deque[_Ended] = field(default_factory=lambda: deque(maxlen=KEPT))
    last: int = 0
    """Number of the last one."""

    def add(self, asked: Asked, progress: Progress, status: int, now_s: float, unix_s: float) -> None:
        """Remember one that has just ended; its `progress` must not change any more. `unix_s`: the same moment on the
        wall clock."""
        self.last += 1
        self._kept.append(_Ended(self.last, asked, progress, status, now_s, unix_s))

    def since(self, after: int, limit: int = 0, request_id: str = "") -> Sequence[frontend_pb2.EndedRequest]:
        """Those behind the number `after`, the latest `limit` of them (0: as many as a message holds), oldest first;
        or of those only that with the id."""
        limit = min(limit or MAX_LISTED, MAX_LISTED)
        newest_first = takewhile(lambda each: each.number > after, reversed(self._kept))
        wanted = (each for each in newest_first if not request_id or each.asked.request_id == request_id)
        return [each.message() for each in islice(wanted, limit)][::-1]


def _since_arrival_ms(asked: Asked, at_s: float | None) -> float | None:
    return None if at_s is None else 1000 * (at_s - asked.arrived_s)
