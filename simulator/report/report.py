"""The report and its JSON form, which `bench`, `simulate`, `compare` and `chaos` share."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from mesh.errors import PenstockError
from simulator.report.outcome import RequestOutcome


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that a request meets or misses as a whole; None sets no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def is_met_by(self, outcome: RequestOutcome) -> bool:
        """A failed request meets nothing; one without a TPOT (a single token) has only its TTFT to meet."""
        if outcome.error:
            return False
        return _within(outcome.ttft_ms, self.ttft_ms) and _within(outcome.tpot_ms, self.tpot_ms)


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds; percentiles interpolate linearly between the two nearest values. None: nothing to measure."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


class SloAttainment(msgspec.Struct, frozen=True, kw_only=True):
    """The SLO, and the share of all requests, failed ones included, that met it."""

    ttft_ms: float | None
    tpot_ms: float | None
    attainment: float | None


class InstanceShare(msgspec.Struct, frozen=True, kw_only=True):
    """One instance's share of the requests that ended well."""

    requests: int
    share: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Its fields are the JSON form, name by name.

    Latencies, throughput, hit rate and shares are those of the requests that ended well. Rates are per second
    from the first arrival to the last end; `throughput_tok_s` counts generated tokens.
    """

    requests: int
    errors: int
    ttft_ms: Latencies
    tpot_ms: Latencies
    e2e_ms: Latencies
    throughput_tok_s: float
    throughput_req_s: float
    goodput_req_s: float
    slo: SloAttainment
    prefix_hit_rate: float | None
    """Share of the prompt tokens that came from prefix caches."""
    per_instance: dict[str, InstanceShare]
    policy: str | None
    seed: int


def summarise(outcomes: Sequence[RequestOutcome], slo: Slo, *, policy: str | None, seed: int) -> Report:
    """The report of one experiment; of no outcomes at all it is a report of zeros and None."""
    good = [outcome for outcome in outcomes if not outcome.error]
    attained = sum(slo.is_met_by(outcome) for outcome in good)
    seconds = _duration_s(outcomes)
    prompt_tokens = sum(outcome.input_tokens for outcome in good)
    return Report(
        requests=len(outcomes),
        errors=len(outcomes) - len(good),
        ttft_ms=latencies(outcome.ttft_ms for outcome in good),
        tpot_ms=latencies(outcome.tpot_ms for outcome in good),
        e2e_ms=latencies(outcome.e2e_ms for outcome in good),
        throughput_tok_s=_rate(sum(outcome.output_tokens for outcome in good), seconds),
        throughput_req_s=_rate(len(good), seconds),
        goodput_req_s=_rate(attained, seconds),
        slo=SloAttainment(
            ttft_ms=slo.ttft_ms,
            tpot_ms=slo.tpot_ms,
            attainment=attained / len(outcomes) if outcomes else None,
        ),
        prefix_hit_rate=sum(outcome.cached_tokens for outcome in good) / prompt_tokens if prompt_tokens else None,
        per_instance=_shares(good),
        policy=policy,
        seed=seed,
    )


def latencies(values_ms: Iterable[float | None]) -> Latencies:
    """Mean and percentiles of the values that are not None."""
    present = [value for value in values_ms if value is not None]
    if not present:
        return Latencies(mean=None, p50=None, p90=None, p95=None, p99=None)
    p50, p90, p95, p99 = np.percentile(present, (50, 90, 95, 99)).tolist()
    return Latencies(mean=float(np.mean(present)), p50=p50, p90=p90, p95=p95, p99=p99)


def encode_report(report: Report) -> bytes:
    """The JSON form, indented, with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def decode_report(document: bytes) -> Report:
    """The report in `document`; raises PenstockError where it is not of the JSON form."""
    try:
        return msgspec.json.decode(document, type=Report)
    except msgspec.DecodeError as error:
        raise PenstockError(f"not a report as `penstock bench --json` writes it: {error}") from error


def _within(value_ms: float | None, limit_ms: float | None) -> bool:
    return value_ms is None or limit_ms is None or value_ms <= limit_ms


def _duration_s(outcomes: Sequence[RequestOutcome]) -> float:
    if not outcomes:
        return 0.0
    return max(outcome.finished_s for outcome in outcomes) - min(outcome.arrival_s for outcome in outcomes)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _shares(good: Sequence[RequestOutcome]) -> dict[str, InstanceShare]:
    served = Counter(outcome.instance_id for outcome in good if outcome.instance_id)
    # Shorter names first, so that worker-2 stands before worker-10.
    return {
        instance_id: InstanceShare(requests=count, share=count / served.total())
        for instance_id, count in sorted(served.items(), key=lambda item: (len(item[0]), item[0]))
    }
