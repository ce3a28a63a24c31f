"""What the tiers of cascades are expected to take, of which deadlines are kept by."""

from collections import defaultdict

from controlplane.model.cascade_record import CascadeRecord
from controlplane.protocols.cascade.expected_time import ExpectedTime
from controlplane.protocols.cascade.terms import CascadeTerms


class TierTimes:
    """As measured by this frontend."""

    def __init__(self) -> None:
        self._answers: defaultdict[str, ExpectedTime] = defaultdict(ExpectedTime)
        self._judgements: defaultdict[str, ExpectedTime] = defaultdict(ExpectedTime)

    def answer(self, model: str) -> ExpectedTime:
        """Of a model's answer to a request."""
        return self._answers[model]

    def judgement(self, cascade: str) -> ExpectedTime:
        """Of the judgement of an answer."""
        return self._judgements[cascade]

    def expected_s(self, record: CascadeRecord, terms: CascadeTerms, now_s: float) -> tuple[float, ...]:
        """For each tier, judging included where its answer is judged: as configured, else as measured; 0 where nothing
        is known."""
        judgement_s = self.judgement(record.name).expected_s(now_s)
        return record.expected_s or tuple(
            self.answer(model).expected_s(now_s)
            + (judgement_s if tier < terms.last_tier and not terms.accepts_all(tier) else 0.0)
            for tier, model in enumerate(record.tiers)
        )
