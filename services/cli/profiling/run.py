"""Profile one instance of a running mesh, from its address to the stored profile."""

import time
from collections.abc import Callable
from pathlib import Path

from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.instance_profile import InstanceProfile
from engine_worker.vocabulary import read_vocabulary
from mesh.errors import ConfigurationError, PeerUnavailable
from mesh.membership import Directory, Member
from services.cli.profiling.closed_loop import ClosedLoop, Measured
from services.cli.profiling.fitting import fit_profile
from services.cli.profiling.plan import Configuration, ProfileBounds, configurations, uneven_pairs
from services.cli.profiling.samples_file import ProfiledInstance, SamplesFile
from services.cli.profiling.worker_session import WorkerSession, worker_session
from simulator.traces.prompt import TokenRange

OnProgress = Callable[[Configuration | None, int, int], None]
"""The configuration that is about to run (None: all are done), how many are done, and how many there are."""
PAIR_TURNS = 3
"""What is compared is measured in turns: a machine that gets slower meanwhile slows both."""
_FALLBACK_TOKENS = TokenRange(3, 500)


def instances_of(directory: Directory, instance_id: str | None, model: str | None) -> list[Member]:
    """The instances of one model that are meant, by their ids. Raises `PeerUnavailable` where there is none,
    `ConfigurationError` where it is not clear which model."""
    members = [
        member
        for member in directory.members("worker")
        if (instance_id is None or member.member_id == instance_id)
        and (model is None or member.attributes.get("model") == model)
    ]
    if not members:
        known = ", ".join(member.member_id for member in directory.members("worker")) or "none"
        raise PeerUnavailable(f"no such instance is in the mesh; there are: {known}")
    kinds = {(member.attributes.get("engine"), member.attributes.get("model")) for member in members}
    if instance_id is None and len(kinds) > 1:
        names = ", ".join(member.member_id for member in members)
        raise ConfigurationError(f"the mesh serves several models; name one with --instance or --model: {names}")
    return sorted(members, key=lambda member: member.member_id)


def find_instance(directory: Directory, instance_id: str | None, model: str | None) -> Member:
    """The first of them. Raises as `instances_of` does."""
    return instances_of(directory, instance_id, model)[0]


async def profile_instance(
    member: Member,
    bounds: ProfileBounds,
    samples_path: Path,
    on_progress: OnProgress,
    *,
    in_use: bool = False,
    shape: ReplicaShape | None = None,
) -> InstanceProfile:
    """Measure and fit. Raises what `measure_instance` does, and `ConfigurationError` for too few samples."""
    return fit_profile(*await measure_instance(member, bounds, samples_path, on_progress, in_use=in_use, shape=shape))


async def measure_instance(
    member: Member,
    bounds: ProfileBounds,
    samples_path: Path,
    on_progress: OnProgress,
    *,
    in_use: bool = False,
    shape: ReplicaShape | None = None,
) -> tuple[ProfiledInstance, list[Measured]]:
    """Measure what `samples_path` does not hold yet; returns everything.

    `shape`: for a worker that does not say how many GPUs it spans. Raises `ConfigurationError` for an instance that has
    other work, unless that is `in_use` on purpose, and where nobody says the shape or the worker says another.
    """
    async with worker_session(member) as session:
        shape = known_shape(session.name, session.shape, shape)
        await _check_idle(session, in_use)
        profiled = ProfiledInstance(session.engine, session.model, session.device, session.sizes, bounds, shape)
        samples = SamplesFile(samples_path, profiled)
        pairs = uneven_pairs(bounds, session.sizes)
        alone = configurations(bounds, session.sizes)
        planned = (*alone, *(each for pair in pairs for each in (pair.even, pair.uneven)))
        loop = ClosedLoop(session, bounds, _tokens(session), time.monotonic)
        await loop.warm_up()
        for done, configuration in enumerate(alone):
            if configuration not in samples.measured:
                on_progress(configuration, done, len(planned))
                samples.add(await loop.measure(configuration))
        for number, pair in enumerate(pairs):
            if pair.even not in samples.measured or pair.uneven not in samples.measured:
                on_progress(pair.even, len(alone) + 2 * number, len(planned))
                for measured in await loop.measure_in_turns((pair.even, pair.uneven), PAIR_TURNS):
                    samples.add(measured)
        on_progress(None, len(planned), len(planned))
    return profiled, [samples.measured[configuration] for configuration in planned]


def known_shape(name: str, said: ReplicaShape | None, given: ReplicaShape | None) -> ReplicaShape:
    """What the worker says of itself, else what its operator says. Raises `ConfigurationError` where they contradict
    each other and where neither says anything."""
    if said is None and given is None:
        raise ConfigurationError(f"{name} does not say how many GPUs it spans: give penstock profile --tp and --pp")
    if said is not None and given not in (None, said):
        raise ConfigurationError(f"{name} says that it runs with {said}, not {given}: leave --tp and --pp out")
    return said or given or ReplicaShape(1)


async def _check_idle(session: WorkerSession, in_use: bool) -> None:
    load = await session.load()
    busy = load.running_requests + load.queued_requests
    if busy and not in_use:
        raise ConfigurationError(
            f"{session.name} has {busy} requests, which would be measured with the profile's own: wait for their end, "
            "or give --in-use"
        )


def _tokens(session: WorkerSession) -> TokenRange:
    """Ordinary tokens of the model, where its files are on this machine."""
    vocabulary = read_vocabulary(Path(session.model_path))
    if vocabulary is None:
        return _FALLBACK_TOKENS
    return TokenRange(vocabulary.first_token_id, vocabulary.last_token_id + 1)
