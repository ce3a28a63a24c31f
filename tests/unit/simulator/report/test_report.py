import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mesh.errors import PenstockError
from simulator.report.outcome import RequestOutcome
from simulator.report.report import Slo, decode_report, encode_report, latencies, summarise
from simulator.report.table import report_table

# Ten seconds from the first arrival to the last end. TTFT 100, 200, 300 ms; TPOT 10, 20 ms and none (one token).
OUTCOMES = [
    RequestOutcome(1.0, 1.2, 1.1, 1.2, input_tokens=100, output_tokens=11, cached_tokens=50, instance_id="a"),
    RequestOutcome(2.0, 4.2, 2.2, 4.2, input_tokens=200, output_tokens=101, cached_tokens=0, instance_id="b"),
    RequestOutcome(3.0, 3.5, 3.3, 3.3, input_tokens=100, output_tokens=1, cached_tokens=100, instance_id="a"),
    RequestOutcome(4.0, 11.0, 4.1, 4.2, input_tokens=999, output_tokens=5, instance_id="b", error="HTTP 503"),
]


def test_report_of_hand_computed_values() -> None:
    report = summarise(OUTCOMES, Slo(ttft_ms=250, tpot_ms=15), policy="lmetric", seed=7)
    assert (report.requests, report.errors) == (4, 1)
    assert report.ttft_ms.mean == pytest.approx(200)
    assert report.ttft_ms.p50 == pytest.approx(200)
    assert report.ttft_ms.p90 == pytest.approx(280)
    assert report.tpot_ms.mean == pytest.approx(15)
    assert report.tpot_ms.p99 == pytest.approx(19.9)
    assert report.e2e_ms.mean == pytest.approx((200 + 2200 + 500) / 3)
    assert report.throughput_tok_s == pytest.approx(113 / 10)
    assert report.throughput_req_s == pytest.approx(0.3)
    # The second misses its TPOT, the third its TTFT, the fourth failed.
    assert report.goodput_req_s == pytest.approx(0.1)
    assert report.slo.attainment == pytest.approx(0.25)
    assert report.prefix_hit_rate == pytest.approx(150 / 400)
    assert report.per_instance["a"].requests == 2
    assert report.per_instance["a"].share == pytest.approx(2 / 3)


def test_one_token_has_no_tpot_to_miss() -> None:
    single = OUTCOMES[2]
    assert single.tpot_ms is None
    assert Slo(ttft_ms=400, tpot_ms=0.001).is_met_by(single)


def test_a_failed_request_meets_no_slo() -> None:
    assert not Slo().is_met_by(OUTCOMES[3])


def test_the_json_form_has_exactly_these_keys() -> None:
    document = json.loads(encode_report(summarise(OUTCOMES, Slo(ttft_ms=250), policy=None, seed=0)))
    assert list(document) == [
        "requests",
        "errors",
        "ttft_ms",
        "tpot_ms",
        "e2e_ms",
        "throughput_tok_s",
        "throughput_req_s",
        "goodput_req_s",
        "slo",
        "prefix_hit_rate",
        "per_instance",
        "policy",
        "seed",
    ]
    assert list(document["ttft_ms"]) == ["mean", "p50", "p90", "p95", "p99"]
    assert list(document["slo"]) == ["ttft_ms", "tpot_ms", "attainment"]
    assert document["slo"]["tpot_ms"] is None


def test_an_experiment_without_outcomes_is_still_a_report() -> None:
    report = summarise([], Slo(), policy=None, seed=0)
    assert report.throughput_req_s == 0.0
    assert report.ttft_ms.mean is None
    assert decode_report(encode_report(report)) == report


def test_reports_survive_their_json_form_and_others_are_refused() -> None:
    report = summarise(OUTCOMES, Slo(ttft_ms=250, tpot_ms=15), policy="lmetric", seed=7)
    assert decode_report(encode_report(report)) == report
    with pytest.raises(PenstockError, match="not a report"):
        decode_report(b'{"requests": 1}')


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=50))
def test_percentiles_are_ordered_and_within_the_values(values_ms: list[float]) -> None:
    figures = latencies(values_ms)
    assert figures.mean is not None
    ordered = [figures.p50, figures.p90, figures.p95, figures.p99]
    assert all(figure is not None for figure in ordered)
    assert ordered == sorted(ordered, key=lambda figure: figure or 0.0)
    assert min(values_ms) <= (figures.p50 or 0.0)
    assert (figures.p99 or 0.0) <= max(values_ms)


def test_the_table_sets_runs_side_by_side() -> None:
    one = summarise(OUTCOMES, Slo(ttft_ms=250), policy="lmetric", seed=7)
    other = summarise(OUTCOMES[:1], Slo(ttft_ms=250), policy="round_robin", seed=7)
    console = Console(width=120, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(report_table({"first": one, "second": other}))
    lines = {line.strip("│┃ ").split("│")[0].strip(): line for line in capture.get().splitlines()}
    assert "lmetric" in lines["policy"]
    assert "round_robin" in lines["policy"]
    assert "66.7%" in lines["share of a"]
    assert lines["share of b"].rstrip("│ ").endswith("-")


def test_many_instances_become_one_row() -> None:
    many = [RequestOutcome(0.0, 1.0, 0.5, 1.0, instance_id=str(instance)) for instance in range(100)]
    table = report_table({"": summarise(many, Slo(), policy=None, seed=0)})
    assert table.row_count < 40
