"""Arrow as a placement policy: request scheduling, instance scheduling and the instance monitor (Arrow, section 5)."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from controlplane.model.placement import Decision, DecodeChoice, PlacementProblem
from controlplane.model.snapshot import Snapshot
from controlplane.policies.arrow.instances import ElasticInstances
from controlplane.policies.arrow.parameters import ArrowParameters
from controlplane.policies.arrow.pools import Pool
from controlplane.policies.arrow.prefill_queues import relative_prefill_times
from controlplane.policies.arrow.scheduling import PrefillAsked, schedule_decode, schedule_prefill
from controlplane.policies.indicators import uncached_tokens
from controlplane.policies.selection import RoundRobinCounter, among_candidates
from controlplane.prediction.ttft import TtftCurve


class InstanceMonitor:
    """Moves instances between pools by time, not by requests (Arrow, section 5.5: prefill to decode, cases 2 and 3)."""

    def __init__(self, parameters: ArrowParameters) -> None:
        self._parameters = parameters
        self._above_since_s: float | None = None
        """From when on the token interval has been above the TPOT threshold."""
        self._idle_since_s: float | None = None
        """From when on a prefill instance has been idle while decoding is busy."""

    def watch(self, instances: ElasticInstances, now_s: float) -> int | None:
        """Move at most one instance to decoding; its row. `instances` have just been looked at."""
        moved = self._follow_token_interval(instances, now_s)
        return self._lend_idle(instances, now_s) if moved is None else moved

    def _follow_token_interval(self, instances: ElasticInstances, now_s: float) -> int | None:
        is_above = mean_token_interval_ms(instances) > self._parameters.tpot_ms
        self._above_since_s, is_due = self._persisted(is_above, self._above_since_s, now_s)
        return instances.try_move_prefill_to_decode() if is_due else None

    def _lend_idle(self, instances: ElasticInstances, now_s: float) -> int | None:
        """What no prefill's end has lent, because decoding became busy only later."""
        is_idle = bool((instances.rows_in(Pool.PREFILL) & ~instances.loads.is_prefilling).any())
        is_wanted = is_idle and not instances.decode_load_is_low()
        self._idle_since_s, is_due = self._persisted(is_wanted, self._idle_since_s, now_s)
        return instances.try_move_prefill_to_decode(idle_only=True) if is_due else None

    def _persisted(self, holds: bool, since_s: float | None, now_s: float) -> tuple[float | None, bool]:
        """Since when it has held, and whether that is long enough to act on; from then on it counts anew."""
        if not holds:
            return None, False
        if since_s is None:
            since_s = now_s
        is_due = now_s - since_s >= self._parameters.trigger_s
        return (now_s, True) if is_due else (since_s, False)


def mean_token_interval_ms(instances: ElasticInstances) -> float:
    """Over the instances that are for decoding, do decode and still tell of it; 0 if none does."""
    rows = instances.decoding_rows() & instances.loads.is_decoding & (instances.snapshot.stale == 0)
    intervals = instances.loads.token_interval_ms[rows]
    known = intervals[intervals > 0]
    return float(known.mean()) if len(known) else 0.0


def lend_idle(instances: ElasticInstances) -> int | None:
    """At the end of a prefill (Arrow, section 5.5, case 3, and 7.2): an instance that has nothing left to prefill goes
    to decoding while that is busy; its row, None where there is none. `instances` have just been looked at."""
    return None if instances.decode_load_is_low() else instances.try_move_prefill_to_decode(idle_only=True)


DECODE_RULE = "fewest running tokens within Max Running Tokens and the TPOT; the prefill's own instance if it decodes"


class Arrow:
    """SLO-aware scheduling of requests and instances (Arrow, section 5).

    The pools are this object's own: two schedulers that ran Arrow over the same instances would have two opinions of
    them, so one of them leads.
    """

    name: ClassVar[str] = "arrow"
    rule: ClassVar[str] = (
        "least predicted prefill delay in the pool that keeps the TTFT, else an instance of low decode load is moved; "
        "decode: fewest running tokens in the pool that keeps the TPOT, else a prefill instance is moved"
    )
    interval_s: ClassVar[float] = 0.25

    def __init__(self, parameters: ArrowParameters) -> None:
        self.parameters = parameters
        self._models: dict[str, tuple[ElasticInstances, InstanceMonitor]] = {}
        """State by model; as many models as are served."""
        self._turns = RoundRobinCounter()

    def decide(self, problem: PlacementProblem) -> Decision:
        """The instance for the prefill, and for the decode unless the problem says that `decide_decode` will be
        asked."""
        instances = self._look(problem.snapshot)
        turn = self._turns.next(problem.request.model)
        if problem.request.is_decoding:
            return self._go_on(instances, problem)
        own_ms = own_prefill_ms(problem, self.parameters.curve)
        asked = PrefillAsked(own_ms, problem.cached_tokens, problem.candidates, turn)
        row = schedule_prefill(instances, asked, self.parameters)
        scores = among_candidates(instances.loads.prefill_delay_ms + own_ms, problem.candidates)
        indicators = self._indicators(instances)
        decode_row, decode_scores = -1, None
        if problem.decode_candidates is not None and not problem.is_decode_chosen_later:
            choice = self._decode(instances, problem, row)
            decode_row, decode_scores = choice.row, choice.scores
        instances.placed(problem, row)
        return Decision(row, scores, indicators, decode_row, decode_scores)

    def decide_decode(self, problem: PlacementProblem, prefill_row: int) -> DecodeChoice:
        """See `LateDecider`: Algorithm 2, at the end of the request's prefill."""
        instances = self._look(problem.snapshot)
        lend_idle(instances)
        return self._decode(instances, problem, prefill_row)

    def _decode(self, instances: ElasticInstances, problem: PlacementProblem, prefill_row: int) -> DecodeChoice:
        candidates = problem.candidates if problem.decode_candidates is None else problem.decode_candidates
        turn = self._turns.last(problem.request.model)
        row = schedule_decode(instances, prefill_row, candidates, turn, self.parameters)
        if row is None:
            return DecodeChoice(prefill_row, DECODE_RULE)
        return DecodeChoice(row, DECODE_RULE, among_candidates(instances.loads.running_tokens, candidates))

    def observe(self, snapshot: Snapshot, now_s: float) -> None:
        """Run the instance monitor."""
        instances = self._look(snapshot)
        self._models[snapshot.model][1].watch(instances, now_s)

    def pools(self, model: str) -> dict[str, str]:
        known = self._models.get(model)
        return {} if known is None else {each: known[0].pools[each].value for each in known[0].pools}

    def resume(self, model: str, pools: Mapping[str, str]) -> None:
        known = {each: Pool(pool) for each, pool in pools.items() if pool in set(Pool)}
        self._models[model] = ElasticInstances(self.parameters, known), InstanceMonitor(self.parameters)

    def _go_on(self, instances: ElasticInstances, problem: PlacementProblem) -> Decision:
        """A request that decodes already goes where requests are decoded; its tokens so far are computed there."""
        turn = self._turns.last(problem.request.model)
        row = schedule_decode(instances, None, problem.candidates, turn, self.parameters)
        assert row is not None, "there is a candidate"
        instances.placed(problem, row)
        scores = among_candidates(instances.loads.running_tokens, problem.candidates)
        return Decision(row, scores, self._indicators(instances))

    def _look(self, snapshot: Snapshot) -> ElasticInstances:
        known = self._models.get(snapshot.model)
        if known is None:
            known = ElasticInstances(self.parameters), InstanceMonitor(self.parameters)
            self._models[snapshot.model] = known
        known[0].look(snapshot)
        return known[0]

    def _indicators(self, instances: ElasticInstances) -> dict[str, NDArray[np.int64]]:
        return {
            "pool": instances.pool_codes(),
            "prefill_delay_ms": np.rint(instances.loads.prefill_delay_ms).astype(np.int64),
            "running_tokens": instances.loads.running_tokens,
            "token_interval_us": instances.snapshot.token_interval_us,
        }


def own_prefill_ms(problem: PlacementProblem, curve: TtftCurve) -> NDArray[np.float64]:
    """Predicted time to compute the request's own prompt on each instance."""
    new_tokens = np.maximum(uncached_tokens(problem), 1)
    cached = problem.cached_tokens
    squares = (cached + new_tokens).astype(np.float64) ** 2 - cached.astype(np.float64) ** 2
    own_ms: NDArray[np.float64] = curve.fixed_ms + curve.token_ms * new_tokens + curve.token_squared_ms * squares
    relative = relative_prefill_times(problem.snapshot)
    return own_ms if relative is None else own_ms * relative
