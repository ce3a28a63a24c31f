"""Where a request goes: asked of the schedulers of the mesh, decided here while none of them answers."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from controlplane.model.incarnation import Incarnation
from controlplane.model.queue_belief import QueueBelief
from controlplane.model.request import PrefixSource
from controlplane.protocols.placing import (
    Ask,
    Candidate,
    FallBack,
    Instruction,
    PlacementAttempt,
    Retract,
    Use,
    least_outstanding,
)
from mesh.errors import NoInstance, UnknownModel
from mesh.membership import ChangeKind, MemberChange
from mesh.runtime import Transport
from mesh.tasks import TaskSet
from penstock.v1 import scheduler_pb2
from services.frontend.metrics import PlacementMetrics
from services.frontend.placement.scheduler_link import AnswerHandlers, LinkHandlers, SchedulerLink, link_key

log = logging.getLogger(__name__)

SCHEDULER_ROLE: Final = "scheduler"
FALLBACK_POLICY: Final = "frontend_round_robin"
HEDGE_S: Final = 0.1
"""A scheduler that has not answered by then is kept, and another one asked besides. A placement takes a millisecond."""
MAX_PLACED: Final = 1_000_000
"""Far above what a frontend can serve at once: more would be a leak."""
PLACED_ELSEWHERE: Final = "placed_elsewhere"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes and who said so."""

    instance_id: str
    policy: str
    decode_instance_id: str = ""
    """Who decodes it after its first token; empty: the same instance."""
    is_decode_open: bool = False
    """The instance is to ask the scheduler who decodes, after the first token."""
    prefix: PrefixSource | None = None
    """Whose cached prefix the instance pulls before it computes the rest; None: nobody's."""
    belief: QueueBelief | None = None
    """What the instance was believed to have to do; None: nobody looked, or the scheduler is of a former release."""


class PlacementClient:
    """Shares placements over all schedulers of the mesh; without one that answers, falls back, loudly, to round robin
    over the workers."""

    def __init__(
        self,
        candidates: Callable[[scheduler_pb2.PlaceRequest], Sequence[str]],
        deadline_s: float,
        transport: Transport,
        metrics: PlacementMetrics,
        on_failed: Callable[[BaseException], None],
        clock: Callable[[], float],
        frontend_id: str = "",
    ) -> None:
        """`candidates` gives the instances for a request that the fallback may choose from; `frontend_id` is who this
        frontend is to workers."""
        self._frontend_id = frontend_id
        self._candidates = candidates
        self._deadline_s = deadline_s
        self._transport = transport
        self._metrics = metrics
        self._on_failed = on_failed
        self._clock = clock
        self._turns: Counter[str] = Counter()
        """By model: the requests of several that come in turn must not meet on the same few instances."""
        self._links: dict[str, SchedulerLink] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._scheduler_turn = 0
        self._leader_id = ""
        """The scheduler to ask while it answers, because the policy keeps pools; empty: any."""
        self._placed_by: dict[str, str] = {}
        """Key of the link that placed a request, until the request ends."""
        self._workers: tuple[Incarnation, ...] = ()
        self._tasks = TaskSet("placement")
        self.fallback = ""
        """Name of the fallback while it is in force, otherwise empty."""
        self._overruled: set[str] = set()
        """Models for which the schedulers found no instance for too long, and have found none since."""

    def on_change(self, change: MemberChange) -> None:
        """Follow the directory. A scheduler whose lease ran out may still answer: its link stays while its stream is
        open, or while there is no other, and is used if no announced one can be."""
        member = change.member
        if member.role != SCHEDULER_ROLE:
            return
        link = self._links.get(link_key(member))
        if change.kind is ChangeKind.LEFT:
            if link is not None:
                link.is_announced = False
        elif link is not None:
            link.is_announced = True
            link.readdress(member)
        else:
            link = SchedulerLink(
                member,
                self._deadline_s,
                self._metrics,
                self._clock,
                self._transport,
                self._handlers(),
                self._frontend_id,
            )
            self._open(link)
        self._drop_departed()

    def links(self) -> tuple[SchedulerLink, ...]:
        """The links to all schedulers that may be asked, those included whose lease ran out."""
        return tuple(self._links.values())

    @property
    def connected(self) -> bool:
        """Whether a scheduler can be asked."""
        return any(link.is_usable for link in self._links.values())

    @property
    def placed(self) -> int:
        """Requests that some scheduler has placed and not heard the end of."""
        return len(self._placed_by)

    async def place(self, request: scheduler_pb2.PlaceRequest) -> Placement:
        """An instance for a request. Raises UnknownModel or NoInstance."""
        response = await self._ask(request)
        if response is None:
            return self.place_here(request)
        match response.outcome:
            case scheduler_pb2.PLACE_OUTCOME_PLACED:
                self._overruled.discard(request.model)
                return Placement(
                    response.instance_id,
                    response.policy,
                    response.decode_instance_id,
                    response.is_decode_open,
                    _prefix(response),
                    _belief(response),
                )
            case scheduler_pb2.PLACE_OUTCOME_UNKNOWN_MODEL:
                raise UnknownModel(response.message or f"no instance serves {request.model}")
            case _:
                raise NoInstance(response.message or f"no instance of {request.model} can take a request now")

    def ended(self, request_id: str, ok: bool, reason: str) -> None:
        """Tell the scheduler that placed a request how the request ended; call it for every placement."""
        link = self._links.get(self._placed_by.pop(request_id, ""))
        if link is not None:
            link.ended(request_id, ok, reason)

    def tell_workers(self, workers: tuple[Incarnation, ...]) -> None:
        """The workers that this frontend is connected to now: schedulers place its requests on no others."""
        self._workers = workers
        for link in self._links.values():
            link.tell_workers(workers)

    async def stop(self) -> None:
        """Close the streams to all schedulers; nobody is told of requests that still run."""
        await self._tasks.cancel()

    async def _ask(self, request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceResponse | None:
        """A scheduler's answer; None if there was none from any."""
        asking = _Asking(self._links, request, PlacementAttempt(self._choose), HEDGE_S)
        try:
            key, response, reason = await asking.result()
        finally:
            asking.close()
        if response is None:
            self._fall_back(reason)
            return None
        former = self._links.get(self._placed_by.get(request.request_id, ""))
        if former is not None and former.key != key:
            former.ended(request.request_id, False, PLACED_ELSEWHERE)
        self._placed_by[request.request_id] = key
        assert len(self._placed_by) <= MAX_PLACED, "every placement is told as ended"
        self._leader_id = response.leader_id
        if asking.is_hedged:
            self._metrics.hedged_placements.inc()
        self._recover()
        return response

    def _choose(self, asked: Collection[str]) -> str | None:
        usable = [link for link in self._links.values() if link.is_usable and link.key not in asked]
        leading = [link for link in usable if link.member.member_id == self._leader_id] if self._leader_id else []
        among = leading or [link for link in usable if link.is_announced] or usable
        self._scheduler_turn += 1
        return least_outstanding([Candidate(link.key, link.outstanding) for link in among], self._scheduler_turn)

    def is_overruled(self, model: str) -> bool:
        """Whether the schedulers were overruled for this model and have placed nothing of it since: who comes next need
        not wait for them again."""
        return model in self._overruled

    def overrule(self, request: scheduler_pb2.PlaceRequest) -> Placement:
        """By the fallback, although a scheduler has answered that there is no instance. Raises NoInstance."""
        if request.model not in self._overruled:
            extra = {"model": request.model, "policy": FALLBACK_POLICY}
            log.error("the schedulers find no instance of a model, and some are connected", extra=extra)
            self._overruled.add(request.model)
        return self.place_here(request)

    def place_here(self, request: scheduler_pb2.PlaceRequest) -> Placement:
        """By the fallback, whatever the scheduler says. Raises NoInstance."""
        candidates = [one for one in self._candidates(request) if one not in request.excluded_instance_ids]
        if not candidates:
            raise NoInstance(f"no instance of {request.model} is connected to this frontend")
        self._metrics.fallback_placements.inc()
        turn = self._turns[request.model]
        self._turns[request.model] += 1
        return Placement(candidates[turn % len(candidates)], FALLBACK_POLICY)

    def _fall_back(self, reason: str) -> None:
        if not self.fallback:
            log.error("placing requests by the fallback", extra={"policy": FALLBACK_POLICY, "reason": reason})
        self.fallback = FALLBACK_POLICY
        self._metrics.fallback_in_force.set(1)

    def _recover(self) -> None:
        if self.fallback:
            log.info("a scheduler can be asked again")
            self.fallback = ""
            self._metrics.fallback_in_force.set(0)

    def _handlers(self) -> LinkHandlers:
        return LinkHandlers(self._usable, self._drop_departed)

    def _usable(self, leader_id: str) -> None:
        self._leader_id = leader_id
        self._recover()

    def _open(self, link: SchedulerLink) -> None:
        log.info("using scheduler", extra={"member_id": link.member.member_id, "address": link.member.address})
        self._links[link.key] = link
        link.tell_workers(self._workers)
        self._runs[link.key] = self._tasks.spawn(link.run(), name=link.key, on_error=self._on_failed)

    def _drop_departed(self) -> None:
        announced = {link.member.member_id for link in self.links() if link.is_announced}
        for link in self.links():
            is_replaced = link.member.member_id in announced
            if not link.is_announced and (is_replaced or (not link.is_open and len(self._links) > 1)):
                log.info("using a scheduler no more", extra={"member_id": link.member.member_id})
                del self._links[link.key]
                self._runs.pop(link.key).cancel()
                if not is_replaced:
                    self._metrics.scheduler_usable.remove(link.member.member_id)


def _prefix(response: scheduler_pb2.PlaceResponse) -> PrefixSource | None:
    prefix = response.prefix
    return PrefixSource(prefix.instance_id, prefix.tokens, prefix.comes_ms) if response.HasField("prefix") else None


def _belief(response: scheduler_pb2.PlaceResponse) -> QueueBelief | None:
    belief = response.belief
    return (
        QueueBelief(belief.queued_prefill_tokens, belief.new_prefill_tokens, belief.may_bounce)
        if response.HasField("belief")
        else None
    )


class _Asking:
    """Carries out what a placement attempt decides."""

    def __init__(
        self,
        links: dict[str, SchedulerLink],
        request: scheduler_pb2.PlaceRequest,
        attempt: PlacementAttempt,
        hedge_s: float,
    ) -> None:
        self._links = links
        self._request = request
        self._attempt = attempt
        self._hedge_s = hedge_s
        self._responses: dict[str, scheduler_pb2.PlaceResponse] = {}
        self._result: asyncio.Future[tuple[str, scheduler_pb2.PlaceResponse | None, str]]
        self._result = asyncio.get_running_loop().create_future()
        self._hedge: asyncio.TimerHandle | None = None
        self.is_hedged = False
        """Another scheduler was asked because the first one was slow."""

    async def result(self) -> tuple[str, scheduler_pb2.PlaceResponse | None, str]:
        """Key of the link that answered, and its answer; or no answer, and why."""
        self._carry_out(self._attempt.begin())
        if len(self._links) > 1 and not self._result.done():
            self._hedge = asyncio.get_running_loop().call_later(self._hedge_s, self._slow)
        return await self._result

    def close(self) -> None:
        """Ask no further scheduler, and tell those that have not answered that the request has ended there."""
        if self._hedge is not None:
            self._hedge.cancel()
        self._carry_out(self._attempt.abandon())

    def _slow(self) -> None:
        instructions = self._attempt.slow()
        if instructions:
            self.is_hedged = True
            self._hedge = asyncio.get_running_loop().call_later(self._hedge_s, self._slow)
            self._carry_out(instructions)

    def _answered(self, key: str, response: scheduler_pb2.PlaceResponse) -> None:
        self._responses[key] = response
        self._carry_out(self._attempt.answered(key))

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Ask(key):
                    self._links[key].ask(self._request, self._handlers(key))
                case Retract(key):
                    link = self._links.get(key)
                    if link is not None:
                        link.ended(self._request.request_id, False, PLACED_ELSEWHERE)
                case Use(key):
                    self._conclude(key, self._responses[key], "")
                case FallBack(reason):
                    self._conclude("", None, reason)

    def _conclude(self, key: str, response: scheduler_pb2.PlaceResponse | None, reason: str) -> None:
        if not self._result.done():  # whoever asked may have been cancelled
            self._result.set_result((key, response, reason))

    def _handlers(self, key: str) -> AnswerHandlers:
        return AnswerHandlers(
            lambda response: self._answered(key, response),
            lambda reason: self._carry_out(self._attempt.missed(key, reason)),
        )
