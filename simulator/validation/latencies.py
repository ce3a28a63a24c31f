"""Mean latencies of a run, as cases."""

from collections.abc import Iterable
from dataclasses import dataclass

from simulator.report.outcome import RequestOutcome
from simulator.validation.case import Case

METRICS = ("mean_ttft_ms", "mean_tpot_ms", "mean_e2e_ms")


@dataclass(frozen=True, slots=True)
class MeanLatencies:
    """Mean latencies of one run, in milliseconds."""

    ttft_ms: float
    tpot_ms: float
    e2e_ms: float

    @staticmethod
    def of(outcomes: Iterable[RequestOutcome]) -> "MeanLatencies":
        """Over the requests that did not fail; each mean over those that have the number."""
        done = [outcome for outcome in outcomes if not outcome.error]
        return MeanLatencies(
            _mean(outcome.ttft_ms for outcome in done),
            _mean(outcome.tpot_ms for outcome in done),
            _mean(outcome.e2e_ms for outcome in done),
        )

    def cases(self, name: str, simulated: "MeanLatencies") -> list[Case]:
        """Validation cases with this run as the measured and `simulated` as the simulated one."""
        pairs = zip(
            METRICS,
            (self.ttft_ms, self.tpot_ms, self.e2e_ms),
            (simulated.ttft_ms, simulated.tpot_ms, simulated.e2e_ms),
            strict=True,
        )
        return [Case.of(name, metric, measured, value) for metric, measured, value in pairs]


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")
