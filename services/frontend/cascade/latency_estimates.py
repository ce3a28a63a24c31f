"""How long tiers of cascades take to answer and judges to judge, from this frontend's own requests."""

from collections import defaultdict

from controlplane.model.cascade_record import CascadeRecord
from controlplane.protocols.cascade.expected_time import ExpectedTime
from controlplane.protocols.cascade.terms import CascadeTerms


class TierLatencyEstimates:
    """Expected latencies, by which it is decided whether an escalation still fits a request's deadline. Seconds."""

    def __init__(self) -> None:
        self._answers: defaultdict[str, ExpectedTime] = defaultdict(ExpectedTime)
        self._judgements: defaultdict[str, ExpectedTime] = defaultdict(ExpectedTime)

    def answer_latency(self, model: str) -> ExpectedTime:
        """The estimate for one complete answer of a model, whichever cascade asked for it; 0 s before any."""
        return self._answers[model]

    def judge_latency(self, cascade: str) -> ExpectedTime:
        """The estimate for one judgement by a cascade's judges; 0 s before any."""
        return self._judgements[cascade]

    def expected_s(self, record: CascadeRecord, terms: CascadeTerms, now_s: float) -> tuple[float, ...]:
        """For each tier, judging included where its answer is judged: as configured, else as measured; 0 where nothing
        is known."""
        judgement_s = self.judge_latency(record.name).expected_s(now_s)
        return record.expected_s or tuple(
            self.answer_latency(model).expected_s(now_s)
            + (judgement_s if tier < terms.last_tier and not terms.accepts_all(tier) else 0.0)
            for tier, model in enumerate(record.tiers)
        )
