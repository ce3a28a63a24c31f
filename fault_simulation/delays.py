"""What may be for a moment and must not last. Waiting hides bugs: a request that waits out a fault is answered in the
end, so that no answer tells of a frontend that could have gone on long before."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from controlplane.model.instance import InstanceState
from controlplane.scheduler.role import SchedulerRole
from engine_worker.instance import Instance
from engine_worker.role import WorkerRole
from fault_simulation.machines import Life
from mesh.membership import MEMBERS_PREFIX, WITHDRAWN, Member
from services.frontend.role import FrontendRole
from services.frontend.workers.link import WorkerLink

FORGOTTEN_S: Final = 2.0
"""A scheduler goes on with an instance that only its monitor has lost."""
FALLBACK_S: Final = 1.0
"""A frontend that can ask a scheduler says so, without a request that would have it ask."""
WAITING_S: Final = 4.0
"""A frontend that is connected to a worker places requests there itself, if no scheduler does."""
LOST_S: Final = 5.0
"""Requests are taken from a worker that is frozen or cannot be reached. Without heartbeats it would be the 13 s of a
connection's keep-alive."""
DRAINED_S: Final = 8.0
"""A draining worker offers its requests again, at the latest five seconds after nobody would have them."""
UNREADY_S: Final = 0.5
"""A frontend asks no scheduler that has not heard of any instance since its start: it places requests itself."""
ASKED_S: Final = 2.5
"""A worker that asks who decodes a request asks at most three schedulers, for half a second each."""


@dataclass(frozen=True, slots=True)
class Delay:
    """Something that is so now."""

    kind: str
    who: str
    what: str
    longest_s: float
    """How long it may be so."""


class Delays:
    """Since when everything is so that is."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[str, str, str], float] = {}

    def over(self, delays: Iterable[Delay], now_s: float) -> Iterator[Delay]:
        """Those that last too long. Call it often, with all that is so."""
        former, self._since_s = self._since_s, {}
        for delay in delays:
            key = (delay.kind, delay.who, delay.what)
            self._since_s[key] = former.get(key, now_s)
            if now_s - self._since_s[key] > delay.longest_s:
                yield delay


class Schedulers:
    """Which instances each scheduler knows, and is to know for as long as its directory does and a frontend that it
    serves is connected to them."""

    def __init__(self) -> None:
        self._known: dict[Life, set[str]] = {}
        """By scheduler: incarnations."""

    def delays_of(self, scheduler: Life, linked: set[str]) -> Iterator[Delay]:
        """`linked`: incarnations that some frontend with a stream to this scheduler could use."""
        assert isinstance(scheduler.role, SchedulerRole)
        if scheduler.role.placements is None or scheduler.context is None:
            return
        table = scheduler.role.placements.feed.table
        there = {each.incarnation_id: each.instance_id for each in table.instances()}
        announced = {each.incarnation_id for each in scheduler.context.directory.members("worker")}
        known = self._known[scheduler] = (self._known.get(scheduler, set()) | there.keys()) & linked & announced
        for incarnation_id in sorted(known - there.keys()):
            what = f"it has forgotten {incarnation_id}, to which a frontend is connected"
            yield Delay("forgotten instance", scheduler.machine.name, what, FORGOTTEN_S)


def is_unready(scheduler: Life) -> bool:
    """Whether no monitor has told this scheduler of instances since its start."""
    assert isinstance(scheduler.role, SchedulerRole)
    placements = scheduler.role.placements
    return placements is not None and placements.feed.heard_s is None


def delays_of_drain(worker: Life, others: Iterable[Life], announced: Callable[[], Collection[str]]) -> Iterator[Delay]:
    """`others`: workers that it reaches and that reach it. `announced`: incarnations of those that the store would tell
    it of now."""
    assert isinstance(worker.role, WorkerRole)
    instance = worker.role.instance
    if instance is None or worker.context is None or instance.state is not InstanceState.DRAINING:
        return
    directory = worker.context.directory
    # A worker follows the others once it needs them. That one which drains does not even begin to is no excuse.
    known = {each.incarnation_id for each in directory.members("worker")} if directory.knows("worker") else announced()
    if any(tracked.state == "running" for tracked in instance.table.live()) and any(
        other.context is not None and other.context.incarnation_id in known and _could_take_from(other, instance)
        for other in others
    ):
        yield Delay("drain stands still", worker.machine.name, "requests stay, and another has none", DRAINED_S)


def announced_workers(store: Life) -> set[str]:
    """Their incarnations, by the records that a store has."""
    if store.store is None or store.store.closed:
        return set()
    entries = store.store.range(f"{MEMBERS_PREFIX}worker/").entries
    records = [entry.value for entry in entries if entry.value != WITHDRAWN]
    return {msgspec.json.decode(record, type=Member).incarnation_id for record in records}


def delays_of_questions(worker: Life) -> Iterator[Delay]:
    """Of requests whose prompt is computed."""
    assert isinstance(worker.role, WorkerRole)
    if worker.role.coordinator is not None:
        for request_id in worker.role.coordinator.manager.asking:
            yield Delay("asks for ever", worker.machine.name, f"who decodes {request_id}", ASKED_S)


def _could_take_from(other: Life, instance: Instance) -> bool:
    assert isinstance(other.role, WorkerRole)
    there = other.role.instance
    if there is None or there.state is not InstanceState.READY or len(there.table) or there.transfer_obstacle:
        return False
    described, here = there.description, instance.description
    return described.model == here.model and described.phase.decodes and not other.machine.is_engine_broken


def delays_of(
    frontend: Life, serves: bool, is_dead: Callable[[WorkerLink], bool], unready_ids: Collection[str]
) -> Iterator[Delay]:
    """`serves`: whether the frontend could use a worker of every model. `is_dead`: whether the worker of a link is
    dead, stopped, not heard, or does not get what it is sent. `unready_ids`: incarnations of schedulers that no monitor
    has told of instances."""
    assert isinstance(frontend.role, FrontendRole)
    service, name = frontend.role.service, frontend.machine.name
    if service is None:
        return
    if service.placement.fallback and service.placement.connected:
        yield Delay(
            "fallback goes on", name, f"{service.placement.fallback}, and a scheduler could be asked", FALLBACK_S
        )
    for scheduler in service.placement.links():
        if scheduler.is_usable and scheduler.member.incarnation_id in unready_ids:
            what = f"{scheduler.member.member_id} is asked, and knows no instance yet"
            yield Delay("asks the unready", name, what, UNREADY_S)
    if len(service.room) and serves:
        yield Delay("waits in vain", name, "requests wait for an instance, and one is connected", WAITING_S)
    dead = [link for link in service.pool.links() if is_dead(link)]
    if len(dead) == len(service.pool.links()):
        return  # it hears nobody: it is more likely cut off itself, and nobody could take the requests
    for link in dead:
        if link.requests:
            yield Delay("left on a lost worker", name, f"requests stay on {link.instance_id}", LOST_S)
