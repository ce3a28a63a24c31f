"""The last minutes of requests and loads, from which rates, percentiles and shares are made. Pure: time comes with
each look."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.v1 import frontend_pb2, worker_pb2
from services.frontend.console.state import Percentiles, ServiceRow

WINDOW_S: Final = 300.0
MAX_ENDED: Final = 20_000
_CLIENT_CLOSED: Final = 499

Ended = frontend_pb2.EndedRequest


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request is to keep to count as served well."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class EndedAt:
    """A request that ended, and at which frontend."""

    frontend: str
    request: Ended

    @property
    def at_unix_ms(self) -> float:
        """When it ended."""
        return self.request.arrived_unix_ms + self.request.ended_ms


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one instance, per second; -1 before there are two loads to compare."""

    generated_s: float = -1.0
    prefilled_s: float = -1.0
    finished_s: float = -1.0


@dataclass(frozen=True, slots=True)
class _Counted:
    incarnation_id: str
    at_unix_ms: int
    generated: int
    prefilled: int
    finished: int


@dataclass(slots=True)
class LoadRates:
    """Rates of instances from counters that grow over the life of each incarnation."""

    _last: dict[str, _Counted] = field(default_factory=dict)

    def add(self, at_unix_ms: int, loads: Iterable[tuple[str, str, worker_pb2.LoadReport]]) -> dict[str, Rates]:
        """The rates since the look before, by instance. `loads`: instance, incarnation, load."""
        now: dict[str, _Counted] = {}
        rates: dict[str, Rates] = {}
        for instance_id, incarnation_id, load in loads:
            counted = _Counted(
                incarnation_id,
                at_unix_ms,
                load.generated_tokens_total,
                load.prefilled_tokens_total,
                load.finished_requests_total,
            )
            now[instance_id] = counted
            rates[instance_id] = _rates(self._last.get(instance_id), counted)
        self._last = now
        return rates


def _rates(before: _Counted | None, now: _Counted) -> Rates:
    if before is None or before.incarnation_id != now.incarnation_id or now.at_unix_ms <= before.at_unix_ms:
        return Rates()
    seconds = (now.at_unix_ms - before.at_unix_ms) / 1000
    grown = (now.generated - before.generated, now.prefilled - before.prefilled, now.finished - before.finished)
    return Rates(*(round(max(0, each) / seconds, 2) for each in grown))


@dataclass(slots=True)
class EndedWindow:
    """Requests that ended within the last minutes, at any frontend."""

    kept: deque[EndedAt] = field(default_factory=lambda: deque(maxlen=MAX_ENDED))
    _began_unix_ms: int | None = None

    def add(self, at_unix_ms: int, ended: Iterable[EndedAt]) -> None:
        """Take in what ended since the last look, and forget what is older than the window."""
        self.kept.extend(sorted(ended, key=lambda each: each.at_unix_ms))
        while self.kept and self.kept[0].at_unix_ms < at_unix_ms - 1000 * WINDOW_S:
            self.kept.popleft()
        if self._began_unix_ms is None:
            self._began_unix_ms = at_unix_ms
            if self.kept:  # frontends remember what was before the first look
                self._began_unix_ms = min(at_unix_ms, int(self.kept[0].at_unix_ms))

    def span_s(self, at_unix_ms: int) -> float:
        """How long a time what is kept covers, in seconds: the window, or less at first."""
        assert self._began_unix_ms is not None, "`add` comes first"
        return min(WINDOW_S, max(1.0, (at_unix_ms - self._began_unix_ms) / 1000))

    def since(self, unix_ms: float) -> list[EndedAt]:
        """Those that ended from then on, oldest first."""
        found = []
        for each in reversed(self.kept):
            if each.at_unix_ms < unix_ms:
                break
            found.append(each)
        return found[::-1]

    def by(self, key: Callable[[Ended], str]) -> dict[str, list[Ended]]:
        """In groups, by name."""
        groups: dict[str, list[Ended]] = {}
        for each in self.kept:
            groups.setdefault(key(each.request), []).append(each.request)
        return dict(sorted(groups.items()))


def ttft_ms(request: Ended) -> float | None:
    """From the arrival to the first token; None if none came."""
    return request.first_token_ms if request.HasField("first_token_ms") else None


def tpot_ms(request: Ended) -> float | None:
    """Mean time from one token to the next of a choice; None for answers of one token, and for those that were cut."""
    tokens = request.generated_tokens / max(1, request.choices)
    if request.status != 200 or not request.HasField("first_token_ms") or tokens <= 1:
        return None
    return (request.ended_ms - request.first_token_ms) / (tokens - 1)


def percentiles(values: Sequence[float]) -> Percentiles:
    """By the nearest rank."""
    if not values:
        return Percentiles()
    ranked = sorted(values)
    return Percentiles(*(round(ranked[max(0, -(-len(ranked) * share // 100) - 1)], 2) for share in (50, 95, 99)))


def cached_share(requests: Iterable[Ended]) -> float | None:
    """Of the prompt tokens; None without any."""
    prompt = cached = 0
    for request in requests:
        prompt, cached = prompt + request.prompt_tokens, cached + request.cached_tokens
    return round(cached / prompt, 4) if prompt else None


def service_row(name: str, requests: Sequence[Ended], span_s: float, objectives: Objectives) -> ServiceRow:
    """How these requests were served. `span_s`: how long a time they are of."""
    finished = [each for each in requests if each.status == 200]
    failed = sum(each.status >= 500 for each in requests)
    kept = sum(_keeps(each, objectives) for each in finished)
    return ServiceRow(
        name=name,
        requests=len(requests),
        failed=failed,
        refused=sum(400 <= each.status < 500 and each.status != _CLIENT_CLOSED for each in requests),
        requests_s=round(len(requests) / span_s, 3),
        generated_s=round(sum(each.generated_tokens for each in requests) / span_s, 1),
        ttft_ms=percentiles([value for each in finished if (value := ttft_ms(each)) is not None]),
        tpot_ms=percentiles([value for each in finished if (value := tpot_ms(each)) is not None]),
        e2e_ms=percentiles([each.ended_ms for each in finished]),
        attained=round(kept / (len(finished) + failed), 4) if finished or failed else None,
        cached_share=cached_share(requests),
        moves=sum(each.moves for each in requests),
        recoveries=sum(each.recoveries for each in requests),
    )


def _keeps(request: Ended, objectives: Objectives) -> bool:
    first, between = ttft_ms(request), tpot_ms(request)
    return (first is None or first <= objectives.ttft_ms) and (between is None or between <= objectives.tpot_ms)
