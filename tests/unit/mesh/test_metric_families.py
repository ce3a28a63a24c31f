"""Metrics of several processes on one page, which Prometheus can read."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from mesh.metric_families import metric_families, one_page
from mesh.vllm_metrics import VllmNames


def worker(running: int) -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("vllm:running", "Requests that run", ["model_name"], registry=registry).labels("m").set(running)
    tokens = Histogram("penstock_step_tokens", "Tokens of a step", buckets=(1, 10), registry=registry)
    tokens.observe(4)
    VllmNames(registry, {"model_name": "m"}).add(tokens, "iteration_tokens_total")
    return registry


def test_each_family_stands_once_with_the_samples_of_all_in_a_row() -> None:
    page = one_page([metric_families(worker(running), "vllm:", f"w{running}") for running in (1, 2)]).decode()
    assert page.count("# TYPE") == 2
    running, tokens = text_string_to_metric_families(page)
    assert (running.name, running.type, tokens.type) == ("vllm:running", "gauge", "histogram")
    assert [(sample.labels, sample.value) for sample in running.samples] == [
        ({"model_name": "m", "member_id": "w1"}, 1.0),
        ({"model_name": "m", "member_id": "w2"}, 2.0),
    ]
    sums = [sample for sample in tokens.samples if sample.name == "vllm:iteration_tokens_total_sum"]
    assert [sample.labels["member_id"] for sample in sums] == ["w1", "w2"]
    assert {sample.value for sample in sums} == {4.0}


def test_what_is_left_out_is_not_there() -> None:
    own = metric_families(worker(1), "", "", leave_out="vllm:")
    assert [family.name for family in own] == ["penstock_step_tokens"]
    assert b"member_id" not in own[0].text


def test_text_that_looks_like_a_comment_is_kept() -> None:
    registry = CollectorRegistry()
    Counter("odd", "first line\n# second line", ["label"], registry=registry).labels("# \n").inc()
    once = metric_families(registry, "", "a")
    (family,) = text_string_to_metric_families(one_page([once, metric_families(registry, "", "b")]).decode())
    totals = [sample for sample in family.samples if sample.name == "odd_total"]
    assert [sample.labels for sample in totals] == [{"label": "# \n", "member_id": each} for each in "ab"]
