"""The simulator against a mesh on this machine: profile its instances, replay a clip, simulate the same clip.

The machine may get slower or faster meanwhile, so both are done in rounds, in turns: a part of the profile, a part of
the clip, and a part of the profile at the end. All instances are profiled at the same time, since they share the
machine. The clip itself is used for nothing but the comparison. What the mesh around an instance adds (HTTP and
placement to each request, processes that share the machine to each step) is measured on single requests to the idle
mesh. Requests come by the clock, so all is scaled by the machine's pace by the clock (`pace`).
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from controlplane.planning.instance_profile import InstanceProfile, InstanceSizes
from controlplane.policies.registry import DEFAULT_POLICY, create_policy
from mesh.errors import ConfigurationError, PeerUnavailable, PenstockError
from mesh.membership import Member
from services.cli.connection import mesh_directory, mesh_store, run
from services.cli.profile import profile_progress
from services.cli.profiling.closed_loop import Measured
from services.cli.profiling.fitting import fit_profile
from services.cli.profiling.plan import ProfileBounds
from services.cli.profiling.run import OnProgress, instances_of, measure_instance
from services.cli.profiling.samples_file import ProfiledInstance
from services.cli.replay.completions import CompletionForm, ServedModel, complete
from services.cli.replay.open_loop import LoopClock
from services.cli.replay.pool import ConnectionPool, parse_endpoint
from services.cli.replay.run import FIRST_TOKEN_ID, Replay, ReplayPlan, planned_requests
from services.cli.report_output import print_notices
from services.cli.validation.bounds import LIVE_PREFIX
from simulator.cluster.config import ClusterConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.fitted.step_cost import FittedStepCost, profiled_instance
from simulator.report.outcome import RequestOutcome
from simulator.traces.prompt import TokenRange
from simulator.traces.request import TraceRequest
from simulator.traces.source import TraceRecipe
from simulator.validation.case import Case
from simulator.validation.latencies import MeanLatencies
from simulator.validation.slowdown import wall_clock_slowdown

SINGLE_REQUESTS = 8
SINGLE_PROMPT_TOKENS, SINGLE_ANSWER_TOKENS = 64, 32
SINGLE_PAUSE_S = 0.5
"""Before each: after a pause the first token takes 5 ms longer (of 12, on two cores) and each other 0.5 ms than right
after another request, and most requests of a light load come after a pause."""
MOST_FAILED = 0.02
"""Share of failed requests beyond which a comparison says nothing."""
MOST_CUTS = 3
"""Connections that may break while an instance is profiled."""
AFTER_CUT_S = 5.0
_DEADLINE_S = 300.0
_VOCABULARY = TokenRange(FIRST_TOKEN_ID, 500)


@dataclass(frozen=True, slots=True)
class LiveMesh:
    """How to reach the mesh that is measured: its endpoint, its state store and its name."""

    url: str
    store: str | None
    name: str


@dataclass(frozen=True, slots=True)
class LivePlan:
    """What is profiled and replayed on the live mesh."""

    recipe: TraceRecipe
    bounds: ProfileBounds
    rounds: int = 4
    model: str | None = None


def live_cases(mesh: LiveMesh, plan: LivePlan) -> list[Case]:
    """Mean TTFT, TPOT and end-to-end latency of the clip. Raises `PenstockError` where a request failed."""
    parts = [_replay_plan(mesh, plan, recipe) for recipe in rounds_of(plan.recipe, plan.rounds)]
    served = Replay(parts[0]).ask_model()
    rests: list[_Rest] = []
    replayed: list[tuple[list[TraceRequest], list[RequestOutcome]]] = []
    bounds = msgspec.structs.replace(plan.bounds, seconds=plan.bounds.seconds / (len(parts) + 1))
    for number, part in enumerate(parts):
        rests.append(_rest(mesh, part, served, msgspec.structs.replace(bounds, seed=bounds.seed + number)))
        requests = list(planned_requests(part, served.max_model_len_tokens))
        replay = Replay(part)
        if requests and not replay.run(served, len(requests)):
            raise PenstockError("the replay was interrupted: there is nothing to compare")
        replayed.append((requests, replay.log.outcomes))
    rests.append(_rest(mesh, parts[-1], served, msgspec.structs.replace(bounds, seed=bounds.seed + len(parts))))
    outcomes = [outcome for _, part in replayed for outcome in part]
    if not outcomes:
        raise ConfigurationError("no request of the trace arrives within the clip")
    check_failures([outcome.error for outcome in outcomes if outcome.error], len(outcomes))
    profile = fit_profile(rests[0].profiled, [measured for rest in rests for measured in rest.measured])
    runs = [measured.steps for rest in rests for measured in rest.measured]
    pace = wall_clock_slowdown(runs, profile.step.coefficients)
    print_notices([f"the machine is {pace:.2f} times as slow by the clock as by the step"])
    singles = MeanLatencies.of([single for rest in rests for single in rest.singles])
    model = LiveModel.of(profile, singles).slowed(pace)
    instances = rests[0].instances
    simulated = model.simulate([requests for requests, _ in replayed if requests], instances)
    name = f"{LIVE_PREFIX}{profile.engine}/{profile.model}/{profile.device}/{instances}"
    return MeanLatencies.of(outcomes).cases(name, simulated)


def rounds_of(recipe: TraceRecipe, rounds: int) -> list[TraceRecipe]:
    """The clip in as many parts of the same length, each from its own start."""
    if recipe.clip_end_s == float("inf"):
        raise ConfigurationError("a live comparison needs a clip with an end, such as 0:60")
    length_s = (recipe.clip_end_s - recipe.clip_start_s) / rounds
    starts_s = [recipe.clip_start_s + number * length_s for number in range(rounds)]
    # Each with prompts of its own: what an earlier part left in the caches must not help a later one.
    return [
        replace(recipe, clip_start_s=start_s, clip_end_s=start_s + length_s, seed=recipe.seed + number)
        for number, start_s in enumerate(starts_s)
    ]


def check_failures(errors: list[str], requests: int) -> None:
    """Say that some requests failed; raises `PenstockError` where too many did."""
    if not errors:
        return
    story = f"{len(errors)} of {requests} requests of the replay failed, the first: {errors[0]}"
    if len(errors) > MOST_FAILED * requests:
        raise PenstockError(story)
    print_notices([f"WARNING: {story}; the others are compared"])


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A profiled instance with the mesh around it."""

    sizes: InstanceSizes
    cost: FittedStepCost
    request_ms: float = 0.0
    """On top of each request's time to first token."""

    @staticmethod
    def of(profile: InstanceProfile, singles: MeanLatencies) -> "LiveModel":
        """What single requests take beyond what the profile says of them is the mesh's."""
        coefficients = profile.step.coefficients
        single = [[TraceRequest(0.0, SINGLE_PROMPT_TOKENS, SINGLE_ANSWER_TOKENS)]]
        bare = LiveModel(profile.sizes, FittedStepCost(coefficients))
        step_ms = max(0.0, singles.tpot_ms - bare.simulate(single, 1).tpot_ms)
        slower = FittedStepCost(msgspec.structs.replace(coefficients, fixed_ms=coefficients.fixed_ms + step_ms))
        with_steps = replace(bare, cost=slower)
        return replace(with_steps, request_ms=max(0.0, singles.ttft_ms - with_steps.simulate(single, 1).ttft_ms))

    def slowed(self, pace: float) -> "LiveModel":
        """The same model with every step this many times as long."""
        coefficients = self.cost.coefficients
        names = coefficients.__struct_fields__
        slow = msgspec.structs.replace(coefficients, **{name: pace * getattr(coefficients, name) for name in names})
        return LiveModel(self.sizes, FittedStepCost(slow), pace * self.request_ms)

    def simulate(self, parts: Sequence[Sequence[TraceRequest]], instances: int) -> MeanLatencies:
        """Of all requests together; each part finds idle instances."""
        config = ClusterConfig(instances=instances, instance=profiled_instance(self.sizes))
        outcomes: list[RequestOutcome] = []
        for requests in parts:
            policy = create_policy(DEFAULT_POLICY, {})
            outcomes += ClusterSimulation(requests, config, self.cost, policy).run()
        found = MeanLatencies.of(outcomes)
        return replace(found, ttft_ms=found.ttft_ms + self.request_ms, e2e_ms=found.e2e_ms + self.request_ms)


@dataclass(frozen=True, slots=True)
class _Rest:
    profiled: ProfiledInstance
    measured: list[Measured]
    instances: int
    singles: list[RequestOutcome]


def _rest(mesh: LiveMesh, replay: ReplayPlan, served: ServedModel, bounds: ProfileBounds) -> _Rest:
    found = run(_profile_together(mesh, served.name, bounds))
    singles = run(_single_requests(replay, served, seed=bounds.seed + len(found)))
    measured = [each for _, samples in found for each in samples]
    return _Rest(found[0][0], measured, len(found), singles)


async def _profile_together(
    mesh: LiveMesh, model: str, bounds: ProfileBounds
) -> list[tuple[ProfiledInstance, list[Measured]]]:
    async with mesh_store(mesh.store, mesh.name) as store, mesh_directory(store) as directory:
        members = instances_of(directory, None, model)
        with tempfile.TemporaryDirectory(prefix="penstock-validate-") as folder, profile_progress(model) as progress:
            return await asyncio.gather(
                *(_measure(member, bounds, Path(folder) / f"{member.member_id}.jsonl", progress) for member in members)
            )


async def _measure(
    member: Member, bounds: ProfileBounds, samples_path: Path, on_progress: OnProgress
) -> tuple[ProfiledInstance, list[Measured]]:
    """A machine that is too busy to answer its own pings cuts connections: go on where that happened."""
    for left in reversed(range(MOST_CUTS + 1)):
        try:
            return await measure_instance(member, bounds, samples_path, on_progress, in_use=left < MOST_CUTS)
        except PeerUnavailable as error:
            if not left:
                raise
            print_notices([f"WARNING: {error}; going on with what is missing"])
            await asyncio.sleep(AFTER_CUT_S)
    raise AssertionError("the last attempt returns or raises")


async def _single_requests(plan: ReplayPlan, served: ServedModel, seed: int) -> list[RequestOutcome]:
    """Requests that come one by one; the first, which opens the connection, is not counted."""
    tokens = TokenRange(FIRST_TOKEN_ID, served.vocab_size) if served.vocab_size else _VOCABULARY
    form = CompletionForm(plan.endpoint, served.name, tokens, seed, plan.api_key)
    pool = ConnectionPool(plan.endpoint)
    clock = LoopClock(0.0)
    outcomes: list[RequestOutcome] = []
    try:
        for index in range(SINGLE_REQUESTS + 1):
            await asyncio.sleep(SINGLE_PAUSE_S)
            encoded = form.encode(index, TraceRequest(0.0, SINGLE_PROMPT_TOKENS, SINGLE_ANSWER_TOKENS))
            outcome, _ = await complete(pool, encoded, clock.now_s(), clock.now_s, _DEADLINE_S)
            if outcome.error:
                raise PenstockError(f"a single request to the idle mesh failed: {outcome.error}")
            outcomes.append(outcome)
    finally:
        pool.close()
    return outcomes[1:]


def _replay_plan(mesh: LiveMesh, plan: LivePlan, recipe: TraceRecipe) -> ReplayPlan:
    return ReplayPlan(
        recipe=recipe,
        endpoint=parse_endpoint(mesh.url),
        model=plan.model,
        api_key="",
        max_requests=None,
        concurrency_limit=1024,
        deadline_s=_DEADLINE_S,
        vocabulary=_VOCABULARY,
    )
