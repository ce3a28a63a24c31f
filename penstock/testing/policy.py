"""What every placement policy owes the mesh.

    class TestFewestTokens(PolicyConformance):
        policy = "fewest_tokens"

Policies are made by name, as operators make them, so the package must be installed. They are shown histories of a small
mesh whose instances come, go, fall ill and fill up: every history is made from a seed, so a failure repeats.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from controlplane.model.cluster import ClusterTable
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.instance import InstanceDescription, InstancePhase, InstanceState, KvBlocks, LoadReport
from controlplane.model.placement import Decision, DecodeChoice, PlacementProblem, PlacementRequest
from controlplane.policies.interface import LateDecider, Policy, decides_late, has_pools, ignores_progress, is_observer
from controlplane.policies.place import place, place_decode
from controlplane.policies.registry import NO_PARAMETERS, create_policy
from mesh.errors import NoInstance, UnknownModel

BLOCK_TOKENS: Final = 16
MODELS: Final = ("m", "n")
SEEDS: Final = (1, 2, 3)
EVENTS: Final = 120
"""Of one history."""
IO_EVENTS: Final = ("open", "os.", "shutil.", "socket.", "subprocess.", "time.sleep", "urllib.")
"""Beginnings of Python's audit events that tell of I/O."""

CreatePolicy = Callable[[], Policy]


class PolicyConformance:
    """Subclass and set `policy`; the tests are inherited."""

    policy: str
    """The name that operators use."""
    parameters: Mapping[str, float] = NO_PARAMETERS
    """Those that differ from their defaults."""
    decision_ms: float = 5.0
    """CPU time that one decision among 256 instances may take in the mean. Penstock's own need less than 1 ms."""

    @pytest.fixture
    def create(self) -> CreatePolicy:
        """Makes a fresh policy."""
        return partial(create_policy, self.policy, self.parameters)

    def test_it_is_made_anew_from_its_name_and_its_parameters(self, create: CreatePolicy) -> None:
        policy = create()
        assert policy.rule, "`rule` is shown by `penstock explain`"
        again = create_policy(policy.name, policy.parameters.values())
        assert again is not policy
        assert (again.name, again.parameters) == (policy.name, policy.parameters)

    @pytest.mark.parametrize("seed", SEEDS)
    def test_it_answers_with_candidates_and_changes_nothing(self, create: CreatePolicy, seed: int) -> None:
        history = History(checked(create()), seed)
        for _ in range(EVENTS):
            history.happen()
        assert history.chosen, "the history places requests"

    @pytest.mark.parametrize("seed", SEEDS)
    def test_the_same_history_gives_the_same_decisions(self, create: CreatePolicy, seed: int) -> None:
        def choices(global_seed: int) -> list[str]:
            with global_randomness(global_seed):
                history = History(create(), seed)
                for _ in range(EVENTS):
                    history.happen()
            return history.chosen

        assert choices(1) == choices(2), "a policy that draws owns a generator made from a seed"

    def test_one_that_ignores_progress_decides_the_same_whatever_it_is(self, create: CreatePolicy) -> None:
        if not ignores_progress(create()):
            return  # it may read what it likes

        def choices(progress: int) -> list[str]:
            history = History(create(), seed=1, progress=progress)
            for _ in range(EVENTS):
                history.happen()
            return history.chosen

        assert choices(1) == choices(997), "`ignores_progress` says that it does not read how far decodes have come"

    def test_an_instance_that_has_gone_is_not_chosen(self, create: CreatePolicy) -> None:
        """Though all requests went there before, and it is the one that has their prefix."""
        table, policy = ClusterTable(), checked(create())
        _join(table, "gone", "1", "m")
        table.reported("gone", "1", LoadReport(), InstanceState.READY, ())
        table.cached("gone", "1", KvBlocks(stored=(1, 2, 3)))

        def placed(number: int) -> str:
            request = PlacementRequest(f"r{number}", "m", 100, float(number), block_hashes=(1, 2, 3))
            return place(table, policy, request).instance.instance_id

        assert {placed(number) for number in range(10)} == {"gone"}
        _join(table, "new", "1", "m")
        table.reported("new", "1", LoadReport(running_requests=50), InstanceState.READY, ())
        table.lost("gone", "1")
        assert {placed(number) for number in range(10, 20)} == {"new"}

    def test_it_decides_on_as_little_as_there_can_be(self, create: CreatePolicy) -> None:
        """One instance, that has said nothing but that it is ready; one token, nothing cached."""
        table = ClusterTable()
        _join(table, "only", "1", "m")
        table.reported("only", "1", LoadReport(), InstanceState.READY, ())
        for request_id in ("first", "second"):
            request = PlacementRequest(request_id, "m", 1, 0.0)
            assert place(table, checked(create()), request).instance.instance_id == "only"

    def test_it_decides_on_the_greatest_loads(self, create: CreatePolicy) -> None:
        table = ClusterTable()
        many = 2**31 - 1
        for instance_id in ("a", "b"):
            _join(table, instance_id, "1", "m")
            load = LoadReport(
                running_requests=many, queued_requests=many, queued_prefill_tokens=many, running_tokens=many
            )
            table.reported(instance_id, "1", load, InstanceState.READY, ())
        placement = place(table, checked(create()), PlacementRequest("r", "m", 2**20, 1e9, max_tokens=2**20))
        assert placement.instance.instance_id in {"a", "b"}

    def test_it_does_no_io(self, create: CreatePolicy) -> None:
        history = History(create(), seed=1)
        for _ in range(EVENTS // 2):  # what is imported late is imported by now
            history.happen()
        with watched_io() as events:
            for _ in range(EVENTS // 2):
                history.happen()
        assert not events

    def test_a_decision_takes_bounded_time(self, create: CreatePolicy) -> None:
        decisions = 100
        history = History(create(), seed=1, instances=128)
        history.place()
        began_s = time.process_time()
        for _ in range(decisions):
            history.place()
        took_ms = (time.process_time() - began_s) * 1000 / decisions
        assert took_ms <= self.decision_ms, f"{took_ms:.1f} ms for one decision among 256 instances"


class History:
    """What happens in a mesh of two models, from a seed, and what the policy decides."""

    def __init__(self, policy: Policy, seed: int, instances: int = 3, progress: int = 0) -> None:
        """`progress`: above 0, nobody is for one phase only, and the requests that decode have come so far."""
        self.chosen: list[str] = []
        """What was decided, in order: instances to prefill, instances to decode, refusals."""
        self.alive: dict[str, list[str]] = {model: [] for model in MODELS}
        """Instances by model."""
        self._policy = policy
        self._rng = random.Random(seed)
        self._progress = progress
        self._table = ClusterTable(ClusterLimits(max_indexed_blocks=10_000))
        self._now_s = 0.0
        self._observed_s = 0.0
        self._requests: list[str] = []
        self._made = 0
        for model in MODELS:
            for _ in range(instances):
                self.join(model)

    def happen(self) -> None:
        """One thing, as likely as not a request."""
        happenings = (self.place, self.report, self.end, self.cache, self.fall_ill, self.lose_any, self.join_any)
        (happening,) = self._rng.choices(happenings, weights=(10, 5, 3, 3, 1, 1, 1))
        happening()
        self._now_s += self._rng.expovariate(5.0)
        self._observe()

    def place(self) -> None:
        """A request, for whichever model, of whichever kind."""
        rng, request_id = self._rng, self._name("request")
        model = rng.choice(MODELS) if all(self.alive.values()) else MODELS[0]
        excluded = rng.sample(self.alive[model], k=min(len(self.alive[model]), rng.choice((0, 0, 0, 1))))
        request = PlacementRequest(
            request_id,
            model,
            prompt_tokens=rng.choice((1, 15, 100, 2000)),
            now_s=self._now_s,
            block_hashes=tuple(range(rng.randrange(6))),
            max_tokens=rng.choice((0, 1, 200)),
            excluded_instance_ids=frozenset(excluded),
            is_decoding=rng.random() < 0.1,
        )
        is_late = rng.random() < 0.5
        try:
            placement = place(self._table, self._policy, request, asks_later=is_late)
        except (NoInstance, UnknownModel):
            self.chosen.append("none")
            return
        self.chosen.append(placement.instance.instance_id)
        assert placement.instance.instance_id in self.alive[model]
        if placement.is_decode_open:
            decode = place_decode(self._table, self._policy, request, placement.instance.instance_id)
            self.chosen.append(decode.instance_id if decode is not None else "stays")
        elif placement.is_split:
            self.chosen.append(placement.decode_instance.instance_id)
        self._requests.append(request_id)

    def report(self) -> None:
        """An instance tells its load."""
        instance_id = self._any_instance()
        if instance_id is not None:
            rng = self._rng
            load = LoadReport(
                running_requests=rng.randrange(64),
                queued_requests=rng.randrange(8),
                queued_prefill_tokens=rng.randrange(4000),
                running_tokens=self._progress or rng.randrange(15_000),
                kv_blocks_used=self._progress,
                generated_tokens_total=self._progress,
                token_interval_ms=float(self._progress),
            )
            admitted = tuple(rng.sample(self._requests, k=min(len(self._requests), 2)))
            self._table.reported(instance_id, "1", load, InstanceState.READY, admitted)
            self._table.staled(instance_id, "1", False)

    def end(self) -> None:
        """A request has its answer."""
        if self._requests:
            self._table.ended(self._requests.pop(self._rng.randrange(len(self._requests))))

    def cache(self) -> None:
        """An instance keeps a prefix."""
        instance_id = self._any_instance()
        if instance_id is not None:
            self._table.cached(instance_id, "1", KvBlocks(stored=tuple(range(self._rng.randrange(1, 6)))))

    def fall_ill(self) -> None:
        """An instance drains, or is not heard of any more."""
        instance_id = self._any_instance()
        if instance_id is not None and self._rng.random() < 0.5:
            self._table.reported(instance_id, "1", LoadReport(), InstanceState.DRAINING, ())
        elif instance_id is not None:
            self._table.staled(instance_id, "1", True)

    def lose_any(self) -> None:
        """An instance dies."""
        instance_id = self._any_instance()
        if instance_id is not None:
            self.lose(instance_id)

    def lose(self, instance_id: str) -> None:
        """This one dies."""
        self._table.lost(instance_id, "1")
        for instances in self.alive.values():
            if instance_id in instances:
                instances.remove(instance_id)

    def join_any(self) -> None:
        """An instance of either model comes."""
        self.join(self._rng.choice(MODELS))

    def join(self, model: str) -> None:
        """A ready instance, in one of four for one phase only."""
        instance_id = self._name("instance")
        phase = self._rng.choice((*[InstancePhase.ANY] * 6, InstancePhase.PREFILL, InstancePhase.DECODE))
        if self._progress:
            phase = InstancePhase.ANY
        _join(self._table, instance_id, "1", model, phase)
        self._table.reported(instance_id, "1", LoadReport(), InstanceState.READY, ())
        self.alive[model].append(instance_id)

    def _observe(self) -> None:
        policy, pooled = self._policy, self._policy if has_pools(self._policy) else None
        if not is_observer(policy) or self._now_s < self._observed_s + policy.interval_s:
            return
        self._observed_s = self._now_s
        for model in MODELS:
            snapshot = self._table.snapshot(model)
            if snapshot is None:
                continue
            policy.observe(snapshot, self._now_s)
            if pooled is not None:
                pools = pooled.pools(model)
                assert pools.keys() <= {instance.instance_id for instance in snapshot.instances}
                self.chosen.append(repr(sorted(pools.items())))

    def _any_instance(self) -> str | None:
        alive = [instance_id for model in MODELS for instance_id in self.alive[model]]
        return self._rng.choice(alive) if alive else None

    def _name(self, kind: str) -> str:
        self._made += 1
        return f"{kind}-{self._made}"


def checked(policy: Policy) -> Policy:
    """The policy, with every answer checked and every problem compared before and after."""
    return cast(Policy, _CheckedLate(policy) if decides_late(policy) else _Checked(policy))


class _Checked:
    """Passes everything on."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def decide(self, problem: PlacementProblem) -> Decision:
        """See `Policy`."""
        with _unchanged(problem):
            decision = self._policy.decide(problem)
        assert 0 <= decision.row < len(problem.snapshot)
        assert problem.candidates[decision.row], "only a candidate may be chosen"
        _check_scores(decision.scores, decision.row, problem.candidates)
        for indicator in decision.indicators.values():
            assert indicator.shape == (len(problem.snapshot),)
        if decision.decode_row not in (-1, decision.row):
            assert problem.decode_candidates is not None, "the request must stay where it is prefilled"
            assert problem.decode_candidates[decision.decode_row], "only a decode candidate may be chosen"
        return decision


class _CheckedLate(_Checked):
    def __init__(self, policy: LateDecider) -> None:
        super().__init__(policy)
        self._late = policy

    def decide_decode(self, problem: PlacementProblem, prefill_row: int) -> DecodeChoice:
        """See `LateDecider`."""
        with _unchanged(problem):
            choice = self._late.decide_decode(problem, prefill_row)
        assert choice.rule, "the rule is shown by `penstock explain`"
        assert problem.decode_candidates is not None
        assert choice.row == prefill_row or problem.decode_candidates[choice.row], (
            "only a decode candidate, or it stays"
        )
        return choice


def _check_scores(scores: NDArray[np.float64], row: int, candidates: NDArray[np.bool_]) -> None:
    assert scores.shape == candidates.shape, "one score for each instance"
    assert not np.isnan(scores).any()
    assert np.isfinite(scores[row]), "the score of what was chosen is finite"
    assert np.isposinf(scores[~candidates]).all(), "an instance that is out of the question has an infinite score"


@contextmanager
def _unchanged(problem: PlacementProblem) -> Iterator[None]:
    """A policy looks at a problem and leaves it as it is: others see the same arrays."""

    def arrays() -> list[NDArray[Any]]:
        decode = () if problem.decode_candidates is None else (problem.decode_candidates,)
        found = (problem.snapshot.table, problem.snapshot.placeable, problem.cached_tokens, problem.candidates, *decode)
        return [array.copy() for array in found]

    before = arrays()
    yield
    assert all(np.array_equal(was, now) for was, now in zip(before, arrays(), strict=True)), "it changed its problem"


@contextmanager
def global_randomness(seed: int) -> Iterator[None]:
    """The process's own generators, at another place than they would be."""
    state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


_watchers: list[list[str]] = []


@contextmanager
def watched_io() -> Iterator[list[str]]:
    """Python's audit events of I/O, meanwhile."""
    if not _watchers:
        sys.addaudithook(_note)  # for the rest of the process: there is no way to take one away
        _watchers.append([])
    events: list[str] = []
    _watchers.append(events)
    try:
        yield events
    finally:
        _watchers.remove(events)


def _note(event: str, _: object) -> None:
    if len(_watchers) > 1 and event.startswith(IO_EVENTS):
        _watchers[-1].append(event)


def _join(
    table: ClusterTable, instance_id: str, incarnation_id: str, model: str, phase: InstancePhase = InstancePhase.ANY
) -> None:
    table.joined(
        InstanceDescription(
            instance_id,
            incarnation_id,
            address=f"127.0.0.1:{instance_id}",
            model=model,
            model_path="/models/m",
            engine="simulated",
            block_tokens=BLOCK_TOKENS,
            kv_blocks=1000,
            max_model_len_tokens=4096,
            max_batch_requests=64,
            max_step_tokens=2048,
            phase=phase,
        )
    )
