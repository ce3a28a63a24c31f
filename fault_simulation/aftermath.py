"""What must hold once nothing is broken any more and everybody has been answered: nothing is left over, nobody is
missing, and new requests are served."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from controlplane.deployment.deployment_status import DEPLOYMENTS_PREFIX, DRAINED, DeploymentStatus
from controlplane.model.cascade_record import CASCADES_PREFIX, CascadeRecord
from controlplane.scheduler.policy_config import POLICY_KEY, PolicyRecord
from controlplane.scheduler.role import SchedulerRole
from engine_worker.coordinator.coordinator import Coordinator
from engine_worker.engines.simulated_movable import MovableSimulatedEngine
from engine_worker.role import WorkerRole
from fault_simulation.actions import ApplyPlan
from fault_simulation.machines import Life
from fault_simulation.node import NodeState, NodeTask
from fault_simulation.nodes import SimulatedMesh
from fault_simulation.oracle import COMPLETIONS_PATH
from fault_simulation.timeline import HEALED_S, STORE, Request, Timeline
from mesh.store.host import StoreHost
from services.frontend.role import FrontendRole

PROBED_S: Final = HEALED_S + 11.0
"""When a new request is sent to each frontend, if all others have ended."""
PROBE_S: Final = 4.0
"""In which it is to be answered."""

ROLES: Final = ("frontend", "scheduler", "monitor", "worker", "predictor", "cascade", "planner")

KEPT_TASKS: Final = frozenset(
    {
        "worker Call.code",
        "worker Connection.listen",
        "worker Coordinator._run_link",
        "worker StageLinks._run",
        "worker StreamUnaryCall._conduct_rpc",
        "worker _write",
        "worker TargetLink._write",
        "worker TargetLink._read",
    }
)
"""Of connections between two workers that are opened when first needed and stay: for migrations, and between stages.
`_left_open` looks at how many there are."""
KEPT_COROUTINES: Final = frozenset({"FramedCall._send", "UnaryCalls._read", "_ServerCall._handle", "ServerCall._serve"})
"""In any process of a mesh whose streams go in frames: those of unary calls are opened when first needed, too, and gRPC
serves, besides, what could not be opened in frames."""


def probe(number: int, model: str) -> Request:
    """A request that is sent after the end."""
    body = {"model": model, "prompt": "Is all well?", "max_tokens": 8, "temperature": 0.0, "stream": True}
    return Request(number, PROBED_S, COMPLETIONS_PATH, body)


def leftovers(mesh: SimulatedMesh, timeline: Timeline, usual: set[str]) -> Iterator[tuple[str, str, str]]:
    """(kind, who, what) for all that is not as it was before the first request. `usual`: see `task_names`."""
    members = _members(mesh, timeline)
    for memory in (*mesh.host_memories.values(), *mesh.host_disks.values()):
        yield from (("left on a host", memory.store_id, what) for what in memory.held())
    for name in (STORE, *members):
        life = mesh.machines[name].life
        if life is None or not mesh.machines[name].is_up:
            yield "not up", name, "it has not come back"
            continue
        if name == STORE:
            continue
        if life.context is None:
            yield "not up", name, "it has not begun to serve"
            continue
        yield from (("missing member", name, what) for what in _missing(mesh, members, life))
        if isinstance(life.role, WorkerRole):
            yield from (("left on a worker", name, what) for what in _left_on_worker(life.role))
            yield from (("left on a worker", name, what) for what in _left_open(mesh, life))
        elif isinstance(life.role, FrontendRole):
            yield from (("left on a frontend", name, what) for what in _left_on_frontend(life.role))
            links = _running(mesh, life, "WorkerLink.run")
            if links > len(_workers(mesh)):
                yield "left on a frontend", name, f"{links} streams to {len(_workers(mesh))} workers"
        elif isinstance(life.role, SchedulerRole):
            yield from (("not as new", name, what) for what in _ill_of_scheduler(life.role, _workers(mesh)))
    store = mesh.machines[STORE].life
    if store is not None and store.store is not None and not store.store.closed:
        yield from (("other setting", name, what) for name, what in _other_settings(mesh, store.store))
        if mesh.up is not None:
            yield from (("plan not followed", STORE, what) for what in _not_as_planned(store.store))
    for task_name in sorted(task_names(mesh) - usual - KEPT_TASKS):
        role, _, coroutine = task_name.partition(" ")
        if not (mesh.is_framed and coroutine in KEPT_COROUTINES):
            yield "left task", role, task_name


def task_names(mesh: SimulatedMesh) -> set[str]:
    """What runs in each kind of process: role and the name of the coroutine."""
    names = set()
    for task in asyncio.all_tasks(mesh.loop):
        if isinstance(task, NodeTask) and task.node.name in mesh.machines and task.node.state is not NodeState.DEAD:
            role = mesh.role(task.node.name)
            kind = task.node.name if role is None else role.name
            names.add(f"{kind} {getattr(task.get_coro(), '__qualname__', '')}")
    return names


def _running(mesh: SimulatedMesh, life: Life, qualified_name: str) -> int:
    """How many tasks of a process run that coroutine."""
    tasks = (task for task in asyncio.all_tasks(mesh.loop) if isinstance(task, NodeTask) and task.node is life.node)
    return sum(getattr(task.get_coro(), "__qualname__", "") == qualified_name for task in tasks)


def _members(mesh: SimulatedMesh, timeline: Timeline) -> tuple[str, ...]:
    """Who is to be there: of workers, whom the supervisor runs, where plans have told it how many."""
    topology = timeline.topology
    if mesh.up is None or not any(isinstance(each.action, ApplyPlan) for each in timeline.operations):
        return topology.member_ids
    others = (*topology.control_ids, *topology.frontend_ids)
    return (*others, *sorted(mesh.up.supervisor.names() - set(others)))


def _other_settings(mesh: SimulatedMesh, store: StoreHost) -> Iterator[tuple[str, str]]:
    """Who goes by other settings than the store's."""
    policy = store.get(POLICY_KEY)
    name = None if policy is None else msgspec.json.decode(policy.value, type=PolicyRecord).name
    cascades = {
        entry.key.removeprefix(CASCADES_PREFIX): msgspec.json.decode(entry.value, type=CascadeRecord)
        for entry in store.range(CASCADES_PREFIX).entries
    }
    for who in mesh.machines:
        role = mesh.role(who)
        if isinstance(role, SchedulerRole) and role.placements is not None and name is not None:
            if role.placements.switch.configured.name != name:
                yield who, f"its policy is {role.placements.switch.configured.name}, not {name}"
        elif isinstance(role, FrontendRole) and role.cascade is not None and role.cascade.cascades.records != cascades:
            yield who, f"its cascades are {dict(role.cascade.cascades.records)}, not {cascades}"


def _not_as_planned(store: StoreHost) -> Iterator[str]:
    for entry in store.range(DEPLOYMENTS_PREFIX).entries:
        record = msgspec.json.decode(entry.value, type=DeploymentStatus)
        missing = [each for each in record.missing if each.why != DRAINED]
        if record.plans and (missing or record.leaving):
            yield f"{record.supervisor}: missing {missing}, leaving {record.leaving}"


def _workers(mesh: SimulatedMesh) -> list[str]:
    """Names of the workers that live."""
    return [name for name in mesh.machines if isinstance(mesh.role(name), WorkerRole)]


def _missing(mesh: SimulatedMesh, members: Iterable[str], life: Life) -> Iterator[str]:
    assert life.context is not None
    directory = life.context.directory
    known = {member.member_id: member.incarnation_id for role in ROLES for member in directory.members(role)}
    for name in members:
        other = mesh.machines[name].life
        if other is None or other.context is None or not directory.knows(other.context.role):
            continue
        if name not in known:
            yield f"{name} is not in its directory"
        elif known[name] != other.context.incarnation_id:
            yield f"{name} is in its directory by a former life"


def _ill_of_scheduler(role: SchedulerRole, workers: Iterable[str]) -> Iterator[str]:
    """It places by the policy that it is told to, on all instances."""
    placements = role.placements
    if placements is None:
        yield "it does not place"
        return
    if placements.switch.fallback_reason and not placements.switch.is_standby:
        yield f"it places by {placements.switch.in_force.name}: {placements.switch.fallback_reason}"
    table = placements.feed.table
    known = {each.instance_id for each in table.instances() if not table.is_stale(each.instance_id)}
    if unknown := set(workers) - known:
        yield f"it places nothing on {', '.join(sorted(unknown))}"


def _left_on_worker(role: WorkerRole) -> Iterator[str]:
    instance, engine, coordinator = role.instance, role.engine, role.coordinator
    if instance is None or not isinstance(engine, MovableSimulatedEngine):
        yield "it has no engine"
        return
    if len(instance.table):
        yield "requests " + ", ".join(f"{one.request.request_id} ({one.state})" for one in instance.table)
    if engine.instance.request_ids:
        yield "requests in the engine " + ", ".join(engine.instance.request_ids)
    if engine.load().kv_blocks_used:
        yield f"{engine.load().kv_blocks_used} KV blocks are held"
    yield from engine.transfers
    if coordinator is not None:
        yield from _left_to_move(coordinator)
    if (puller := role.puller) is not None:
        yield from (f"pull {pull_id} from {source} ({state})" for pull_id, source, state in puller.target.manager.pulls)
        yield from (f"prefix held as {hold_id}" for hold_id in puller.source.manager.hold_ids)
        if len(puller.target):
            yield f"{len(puller.target)} requests that wait for a prefix"


def _left_open(mesh: SimulatedMesh, life: Life) -> Iterator[str]:
    """One connection of each kind to each other worker is enough, and a call is of a connection."""
    others = len(_workers(mesh)) - 1
    streams = _running(mesh, life, "StageLinks._run")
    if streams > others:
        yield f"{streams} stage streams to {others} other workers"
    if (calls := _running(mesh, life, "StreamUnaryCall._conduct_rpc")) > streams:
        yield f"{calls} calls of {streams} stage streams"
    if (links := _running(mesh, life, "Coordinator._run_link")) > others:
        yield f"{links} links for migrations to {others} other workers"


def _left_to_move(coordinator: Coordinator) -> Iterator[str]:
    counts = {
        "migrations away": coordinator.manager.orders,
        "migrations to here": coordinator.incoming.manager.running,
        "transfers of a finished prefill": coordinator.manager.transfers,
    }
    yield from (f"{count} {what}" for what, count in counts.items() if count)


def _left_on_frontend(role: FrontendRole) -> Iterator[str]:
    service = role.service
    if service is None:
        yield "it does not serve"
        return
    counts = {
        "running requests": len(service.running),
        "admitted requests": service.gate.queue.running,
        "queued requests": service.gate.queue.queued,
        "waiting requests": len(service.room),
        "relays": len(service.pool.relays),
        "placements that schedulers have not been told the end of": service.placement.placed,
    }
    yield from (f"{count} {what}" for what, count in counts.items() if count)
