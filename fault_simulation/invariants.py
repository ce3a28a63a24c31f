"""What must hold in every simulation, checked while it runs.

Of the answers: what a client was sent is exact, or the exact beginning where its answer broke off; and it breaks off
only where it must:

- A frontend that says it cannot (a status of 400 or more, or an error in a stream) is wrong if at that moment a live
  worker of the model was connected to it, and had been for `CONNECTED_S`. Connected is what the frontend's own pool
  calls so; live is a process that runs, is not paused, has not been told to end, and that the network lets frames
  through to and from. The only other excuses are a frontend whose drain was cut, and one that gave the request up for
  want of a worker while nothing got through to the client, who hears of it once there is a worker again.
- A connection that breaks is wrong if the frontend's process lived through the whole exchange.
- A frontend that cannot, as it is connected to nobody, is wrong if it did not wait for a worker as long as its settings
  say (`instance_wait_s`).
- The rest of a stream that broke off is to be had while the workers that were there when it was asked for live on, are
  connected to the frontend that is asked, and are asked soon enough.
- A connection that is refused is wrong if the frontend's port was open before and its process was not told to end.

Of the processes: the state of each is whole, by its role's `validate` and by its engine's.
"""

import errno
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, runtime_checkable

from controlplane.model.instance import InstanceState
from controlplane.planner.role import PlannerRole
from controlplane.protocols.adoption import PATIENCE_S
from controlplane.scheduler.role import SchedulerRole
from engine_worker.engines.simulated_movable import MovableSimulatedEngine
from engine_worker.role import WorkerRole
from fault_simulation.background import Promises
from fault_simulation.delays import (
    Delays,
    Schedulers,
    announced_workers,
    delays_of,
    delays_of_drain,
    delays_of_questions,
    is_unready,
)
from fault_simulation.flaws import flaws
from fault_simulation.machines import Life
from fault_simulation.node import NodeState
from fault_simulation.nodes import DRAIN_S, HTTP_PORT, SimulatedMesh
from fault_simulation.timeline import CLIENT, MODEL, STORE
from fault_simulation.workload import RETURNING, Asked, Attempt
from mesh.exit_status import ExitStatus
from mesh.membership import ChangeKind, MemberChange
from services.frontend.role import FrontendRole
from services.frontend.workers.link import WorkerLink

CONNECTED_S: Final = 2.0
"""Within so long a frontend is to have made use of a worker."""
RESUMED_S: Final = 6.0
"""Whoever asks for the rest of a stream within so long gets it: a worker keeps it for longer (`orphan_s`)."""
FOUND_S: Final = 1.0
"""A frontend that looks for a stream asks each worker within so long after it is connected to it."""
NEAR_STORE_S: Final = 12.0
"""A member that was within reach of the store for so long is announced there, and nobody takes it for gone."""
SAMPLED_EVERY_S: Final = 0.1
VALIDATED_EVERY: Final = 10
"""Samples."""


LATENESS: Final = frozenset(
    (
        # The kinds of `delays`.
        "asks for ever",
        "asks the unready",
        "drain stands still",
        "fallback goes on",
        "forgotten instance",
        "left on a lost worker",
        "waits in vain",
        # Those of `aftermath`: what is to go within `QUIET_S` goes later, or stays.
        "left on a frontend",
        "left on a host",
        "left on a worker",
        "left task",
        # A client may come back and be served, or is served later.
        "gave up early",
        "new request not served",
    )
)
"""Kinds of violations that leave every answer right and whole. All others break what the mesh promises."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be. Two of the same kind are taken for the same bug."""

    kind: str
    at_s: float
    who: str
    detail: str

    @property
    def is_lateness(self) -> bool:
        """Whether something merely lasts too long: no token is lost, doubled or wrong, and nothing has two owners."""
        return self.kind in LATENESS

    def __str__(self) -> str:
        return f"{self.at_s:.3f} {self.who}: {self.kind}: {self.detail}"


@runtime_checkable
class Validated(Protocol):
    """A role with managers that can tell whether their state makes sense."""

    def validate(self) -> None:
        """Raises `InvariantBroken` where it does not."""


class Watch:
    """Looks at all roles every tenth of a second, and at every answer as it ends."""

    def __init__(
        self,
        mesh: SimulatedMesh,
        models: Sequence[str] = (MODEL,),
        *,
        may_lose_workers: bool,
        may_lose_settings: bool = False,
    ) -> None:
        """`models`: that it serves. `may_lose_settings`: the store may be wiped, and then nobody knows of cascades."""
        self.violations: list[Violation] = []
        self.promises = Promises()
        self._models = models
        self._may_lose_settings = may_lose_settings
        self._may_lose_workers = may_lose_workers
        self._mesh = mesh
        self._connected_s: dict[tuple[Life, Life, str], float] = {}
        """Since when a worker has been of use to a frontend, with its model."""
        self._unserved_s: dict[tuple[Life, str], float] = {}
        """Since when a frontend has been connected to no worker of a model."""
        self._unheard_s: dict[tuple[Life, str], float] = {}
        """When a frontend last gave up requests of a model, for want of a worker, unheard by their clients."""
        self._delays = Delays()
        self._schedulers = Schedulers()
        self._lived_s: dict[Life, tuple[float, float]] = {}
        """When a process was first and last seen to run."""
        self._near_store_s: dict[Life, float] = {}
        """Since when the store lives, and a live process can reach it."""
        self._opened: set[Life] = set()
        """Frontends whose port was open."""
        self._asked_to_end_s: dict[Life, float] = {}
        self._deciders: dict[tuple[str, int], Life] = {}
        """Who led a duty in an epoch."""
        self._ended: set[Life] = set()
        self._followed: set[Life] = set()
        """Whose directory is listened to."""
        self._seen: set[tuple[str, str, str]] = set()
        self._samples = 0

    def violated(self, kind: str, who: str, detail: str) -> None:
        """Take note, once for each kind and who."""
        if (kind, who, "") not in self._seen:
            self._seen.add((kind, who, ""))
            self.violations.append(Violation(kind, round(self._mesh.loop.now_s, 3), who, detail))

    def sample(self) -> None:
        """Look at everything."""
        self._samples += 1
        lives = [machine.life for machine in self._mesh.machines.values() if machine.life is not None]
        for life in lives:
            self._note_end(life)
        running = [life for life in lives if life.node.state is NodeState.RUNNING and life.role is not None]
        self._follow_directories(running)
        for promise in self.promises.sample(lives):
            self.violated("lost response", promise.asked.name, f"{promise.response_id}: nobody has it any more")
        frontends = [life for life in running if isinstance(life.role, FrontendRole)]
        workers = [life for life in running if isinstance(life.role, WorkerRole)]
        for life in frontends:
            listener = self._mesh.network.listeners.get((life.machine.name, HTTP_PORT))
            if listener is not None and listener.node is life.node and listener.is_open:
                self._opened.add(life)
            self._check_frontend(life)
        self._note_connections(frontends, workers)
        self._note_given_up(frontends)
        self._check_delays(frontends)
        self._check_deciders(running)
        self._check_owners(workers)
        if self._samples % VALIDATED_EVERY == 0:
            for life in running:
                self._validate(life.machine.name, life.role)
            self._validate(STORE, self._mesh.up)
            for disk in self._mesh.host_disks.values():
                self._validate(disk.store_id, disk)

    def attempt_ended(self, asked: Asked, attempt: Attempt) -> None:
        """Called at the moment that a client has its answer or knows that it gets none."""
        answer, life, now_s = attempt.answer, attempt.life, self._mesh.loop.now_s
        for flaw in flaws(asked, attempt, may_lack_logprobs=self._may_lose_workers):
            self.violated("wrong answer", asked.name, flaw)
        if asked.has_left or not answer.error or answer.error == RETURNING:
            return
        told = f"{answer.status or 'no status'}: {answer.error}"
        if attempt.is_refused:
            if life in self._opened and life.node.state is NodeState.RUNNING and not life.shutdown.asked.is_set():
                self.violated("refused connection", attempt.frontend, told)
            return
        if answer.is_broken:
            lived = life is not None and self._lives(life)
            if lived and asked.request.behaviour != "stalls":
                self.violated("broken connection", attempt.frontend, f"{asked.name}: {told}")
            return
        if life is None:
            return
        self._note_end(life)  # it may have been asked to since the last sample, with no time to drain
        ended_s = self._asked_to_end_s.get(life)
        drain_s = DRAIN_S if life.shutdown.drain_s is None else life.shutdown.drain_s
        if life.shutdown.cut_asked.is_set() or (ended_s is not None and now_s - ended_s >= drain_s - 0.5):
            return
        serving = self._serving(life, (answer.tier,) if answer.tier else asked.models)
        if answer.status == 404:  # which is said at once, of what is known then; its client may hear of it later
            serving = [(name, since_s) for name, since_s in serving if since_s >= now_s - attempt.began_s]
        if answer.status == 404 and asked.tiers and self._may_lose_settings:
            return
        if answer.status == 404 and attempt.had is not None and not self._has_all(asked, life):
            return
        if any(self._unheard_s.get((life, model), 0.0) > attempt.began_s for model in asked.models):
            return  # it was given up while nobody could be asked, and its client hears of that only now
        if serving or answer.status in (400, 401, 413, 422):
            since = ", ".join(f"{name} for {since_s:.1f} s" for name, since_s in serving)
            self.violated("failed request", attempt.frontend, f"{asked.name}: {told}; connected: {since or 'nobody'}")
        elif (answer.status == 200 or answer.status >= 500) and ended_s is None and not asked.tiers:
            waited_s = now_s - attempt.began_s
            if waited_s < self._patience_s(life):
                self.violated("gave up early", attempt.frontend, f"{asked.name}: {told}, after {waited_s:.1f} s")

    def _patience_s(self, frontend: Life) -> float:
        """For how long a request waits for a worker, at least."""
        assert isinstance(frontend.role, FrontendRole)
        service = frontend.role.service
        return 0.0 if service is None else service.settings.instance_wait_s - 0.1

    def _has_all(self, asked: Asked, frontend: Life) -> bool:
        """Whether a frontend can be given the rest of a stream: by workers of which none has gone since it began."""
        began_s = asked.attempts[0].began_s
        broken_s = max(each.ended_s or 0.0 for each in asked.attempts[:-1] if each.answer.request_id)
        workers = {
            life: first_s
            for life, (first_s, last_s) in self._lived_s.items()
            if isinstance(life.role, WorkerRole) and last_s > began_s - CONNECTED_S
        }
        return (
            self._mesh.loop.now_s - PATIENCE_S - broken_s < RESUMED_S  # it may have been long on its way
            and all(first_s < began_s for first_s in workers.values())
            and len(workers) == len(self._serving(frontend, self._models, FOUND_S))
            and not any(choice.finish for choice in asked.attempts[-1].answer.choices.values())
        )

    def _serving(self, frontend: Life, models: Sequence[str], within_s: float = CONNECTED_S) -> list[tuple[str, float]]:
        """Workers of some models that a frontend could have used, and for how long, if for so long."""
        now_s = self._mesh.loop.now_s
        return [
            (worker.machine.name, now_s - since_s)
            for (life, worker, model), since_s in self._connected_s.items()
            if life is frontend
            and model in models
            and now_s - since_s >= within_s
            and self._is_of_use(frontend, worker)
        ]

    def _is_of_use(self, frontend: Life, worker: Life) -> bool:
        assert isinstance(worker.role, WorkerRole)
        instance = worker.role.instance
        leaves = instance is None or instance.state is InstanceState.DRAINING or worker.shutdown.asked.is_set()
        return self._lives(worker) and not leaves and not self._is_lost(frontend, worker)

    def _lives(self, life: Life) -> bool:
        return life.node.state is not NodeState.DEAD and life.machine.life is life

    def _note_connections(self, frontends: Iterable[Life], workers: Iterable[Life]) -> None:
        now_s, former = self._mesh.loop.now_s, self._connected_s
        by_incarnation = {life.context.incarnation_id: life for life in workers if life.context is not None}
        self._connected_s = {}
        for frontend in frontends:
            assert isinstance(frontend.role, FrontendRole)
            if frontend.role.service is None:
                continue
            for model in self._models:
                for link in frontend.role.service.pool.connected(model):
                    worker = by_incarnation.get(link.sender.incarnation_id)
                    if worker is not None and self._is_of_use(frontend, worker):
                        key = frontend, worker, model
                        self._connected_s[key] = former.get(key, now_s)

    def _note_given_up(self, frontends: Iterable[Life]) -> None:
        now_s, former = self._mesh.loop.now_s, self._unserved_s
        served = {(frontend, model) for frontend, _, model in self._connected_s}
        self._unserved_s = {}
        for frontend, model in itertools.product(frontends, self._models):
            if (frontend, model) in served:
                continue
            key = frontend, model
            self._unserved_s[key] = former.get(key, now_s)
            names = frontend.machine.name, CLIENT
            is_heard = all(self._mesh.network.is_way_open(*way) for way in (names, names[::-1]))
            if not is_heard and now_s - self._unserved_s[key] >= self._patience_s(frontend):
                self._unheard_s[key] = now_s

    def _check_delays(self, frontends: Iterable[Life]) -> None:
        lives = [machine.life for machine in self._mesh.machines.values() if machine.life is not None]
        workers = {life.context.incarnation_id: life for life in lives if life.context is not None}
        schedulers = [life for life in lives if isinstance(life.role, SchedulerRole) and life.context is not None]
        unready_ids = {each.context.incarnation_id for each in schedulers if each.context and is_unready(each)}
        found = [
            delay
            for life in frontends
            if life not in self._asked_to_end_s
            for delay in delays_of(
                life, self._serves_all(life), partial(self._is_link_dead, life, workers), unready_ids
            )
        ]
        for life in schedulers:
            if life.node.state is NodeState.RUNNING:
                found += self._schedulers.delays_of(life, self._linked(life))
        running = [life for life in lives if isinstance(life.role, WorkerRole) and life.node.state is NodeState.RUNNING]
        for life in running:
            others = (each for each in running if each is not life and not self._is_lost(life, each))
            found += delays_of_drain(life, others, partial(self._announced_to, life))
            found += delays_of_questions(life)
        for delay in self._delays.over(found, self._mesh.loop.now_s):
            self.violated(delay.kind, delay.who, delay.what)

    def _announced_to(self, life: Life) -> set[str]:
        """Incarnations of the workers of whom the store would tell a process that asked it now."""
        store = self._mesh.machines[STORE].life
        return set() if store is None or life not in self._near_store_s else announced_workers(store)

    def _serves_all(self, frontend: Life) -> bool:
        """Whether a frontend could use a worker of each model."""
        return all(self._serving(frontend, (model,)) for model in self._models)

    def _linked(self, scheduler: Life) -> set[str]:
        """Incarnations of workers that a frontend could use which this scheduler hears."""
        heard = {
            frontend
            for frontend, _, _ in self._connected_s
            if not self._is_lost(frontend, scheduler) and _asks(frontend, scheduler)
        }
        return {
            worker.context.incarnation_id
            for frontend, worker, _ in self._connected_s
            if frontend in heard and worker.context is not None
        }

    def _is_link_dead(self, frontend: Life, lives: Mapping[str, Life], link: WorkerLink) -> bool:
        """A worker that is heard and has got all that it was sent goes on as well as ever."""
        worker = lives.get(link.sender.incarnation_id)
        if worker is None or worker.node.state is not NodeState.RUNNING:
            return True
        names = frontend.machine.name, worker.machine.name
        is_heard = self._mesh.network.is_way_open(*reversed(names))
        return not is_heard or (link.unheard > 0 and not self._mesh.network.is_way_open(*names))

    def _is_lost(self, one: Life, other: Life) -> bool:
        """Whether the other does not run, or cannot be reached and heard."""
        names = one.machine.name, other.machine.name
        ways = self._mesh.network.is_way_open(*names) and self._mesh.network.is_way_open(*reversed(names))
        return other.node.state is not NodeState.RUNNING or not ways

    def _follow_directories(self, lives: Iterable[Life]) -> None:
        """Hear of whatever any process takes for gone, and keep in mind who could reach the store since when."""
        now_s, store, former = self._mesh.loop.now_s, self._mesh.machines[STORE].life, self._near_store_s
        self._near_store_s = {}
        for life in lives:
            self._lived_s[life] = self._lived_s.get(life, (now_s, now_s))[0], now_s
            if life.context is not None and life not in self._followed:
                self._followed.add(life)
                life.context.directory.subscribe(partial(self._heard, life))
            if store is None or store.node.state is not NodeState.RUNNING or self._mesh.machines[STORE].disk.is_full:
                continue
            ways = (life.machine.name, STORE), (STORE, life.machine.name)
            if all(self._mesh.network.is_way_open(*way) for way in ways):
                self._near_store_s[life] = former.get(life, now_s)

    def _heard(self, observer: Life, change: MemberChange) -> None:
        member = change.member
        life = self._mesh.machines[member.member_id].life if member.member_id in self._mesh.machines else None
        if change.kind is not ChangeKind.LEFT or life is None or life.context is None or life.shutdown.asked.is_set():
            return
        if life.context.incarnation_id != member.incarnation_id or life.node.state is not NodeState.RUNNING:
            return
        near_s = self._near_store_s.get(life)
        if near_s is not None and self._mesh.loop.now_s - near_s >= NEAR_STORE_S:
            what = f"{observer.machine.name} takes it for gone, but it lives"
            self.violated("live member dropped", member.member_id, what)

    def _note_end(self, life: Life) -> None:
        if life.shutdown.asked.is_set():
            self._asked_to_end_s.setdefault(life, self._mesh.loop.now_s)
        if life.status is None or life in self._ended:
            return
        self._ended.add(life)
        is_wrong = life.status in (ExitStatus.FAILED, ExitStatus.WRONG_SETTINGS, ExitStatus.SUPERSEDED)
        if is_wrong and os.strerror(errno.ENOSPC) not in life.failure:
            self.violated("process ended", life.machine.name, f"{life.status.name.lower()} {life.failure}".strip())

    def _check_deciders(self, lives: Iterable[Life]) -> None:
        for life in lives:
            if not isinstance(life.role, (SchedulerRole, PlannerRole)):
                continue
            for leadership in life.role.leaderships:
                if leadership.is_leading:
                    decider = self._deciders.setdefault((leadership.duty, leadership.epoch), life)
                    if decider is not life:
                        names = f"{decider.machine.name} (life {decider.machine.lives}) and {life.machine.name}"
                        self.violated("two deciders", leadership.duty, f"{names} have led in epoch {leadership.epoch}")

    def _check_owners(self, workers: Iterable[Life]) -> None:
        owners: dict[tuple[str, int], str] = {}
        for life in workers:
            assert isinstance(life.role, WorkerRole)
            if life.role.instance is None:
                continue
            for tracked in life.role.instance.table:
                if tracked.state == "running":
                    name = life.machine.name
                    owner = owners.setdefault((tracked.request.request_id, tracked.epoch), name)
                    if owner != name:
                        self.violated(
                            "two owners",
                            tracked.request.request_id,
                            f"runs on {owner} and on {name} under epoch {tracked.epoch}",
                        )

    def _check_frontend(self, life: Life) -> None:
        assert isinstance(life.role, FrontendRole)
        service = life.role.service
        if service is None:
            return
        settings = service.settings
        bounded = {
            "requests": (service.gate.queue.running, settings.max_running_requests),
            "queue": (service.gate.queue.queued, 3 * settings.max_queued_requests),
            "waiting room": (len(service.room), settings.max_waiting_requests),
        }
        for what, (size, most) in bounded.items():
            if size > most:
                self.violated("out of bounds", life.machine.name, f"{what}: {size}, and at most {most}")

    def _validate(self, name: str, role: object) -> None:
        engine = role.engine if isinstance(role, WorkerRole) else None
        try:
            if isinstance(engine, MovableSimulatedEngine):
                engine.instance.validate()
            if isinstance(role, Validated):
                role.validate()
        # Whatever is wrong with it is to be told, not to end the simulation.
        except Exception as error:  # noqa: BLE001
            self.violated("broken state", name, f"{type(error).__name__}: {error}")


def _asks(frontend: Life, scheduler: Life) -> bool:
    """Whether a frontend has a stream to this life of a scheduler."""
    if not isinstance(frontend.role, FrontendRole) or frontend.role.service is None or scheduler.context is None:
        return False
    links = frontend.role.service.placement.links()
    return any(link.is_open and link.member.incarnation_id == scheduler.context.incarnation_id for link in links)
