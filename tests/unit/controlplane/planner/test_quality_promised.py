"""Promised against achieved quality, as live samples with labels come in."""

from typing import Any

import msgspec
import numpy as np
import pytest

from controlplane.model.cascade_record import CascadeRecord
from controlplane.planner.cascade.report import WorkloadReport
from controlplane.planner.cascade.wire import quality_from, status_message
from controlplane.planning.cascade.promise import QualityPromise
from controlplane.planning.cascade.quality_watch import PromiseState, QualityWatch, accepted_label
from controlplane.planning.cascade.workload import WorkloadRequest, WorkloadWindow, read_window, write_window
from mesh.errors import ConfigurationError
from services.cli.planning.promises import is_broken, promise_line
from tests.unit.controlplane.planner.cascade_windows import GOAL, MODELS, RECORD, plan_with
from tests.unit.controlplane.planner.manager_at_work import ManagerAtWork, desk_with

LABELLED = msgspec.structs.replace(RECORD, judges=("confidence",), label="exact")
PROMISE = QualityPromise(80.0, 95.0, 81.0, 85.0, 300, "exact")


def requests(count: int, right: float, seed: int = 0) -> tuple[WorkloadRequest, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        WorkloadRequest(
            int(rng.integers(90, 110)),
            (20, 20),
            (float(rng.uniform(40, 60)), 90.0),
            (100.0 * bool(rng.uniform() < right), 100.0),
        )
        for _ in range(count)
    )


async def report(at: ManagerAtWork, sampled: tuple[WorkloadRequest, ...], **fields: Any) -> str:
    window = WorkloadWindow(MODELS, 2.0, sampled, "confidence", "exact")
    return await at.manager.report(WorkloadReport("both", tuple(write_window(window)), **fields))


def test_the_label_that_counts_is_that_of_the_answer_which_is_accepted() -> None:
    request = WorkloadRequest(10, (3, 4), (50.0, 90.0), (0.0, 100.0))
    assert [accepted_label(request, (threshold,)) for threshold in (40.0, 50.0, 60.0)] == [0.0, 0.0, 100.0]
    assert accepted_label(msgspec.structs.replace(request, quality=None), (60.0,)) is None
    gone = msgspec.structs.replace(request, scores=(50.0, None), output_tokens=(3, None), quality=(0.0, None))
    assert accepted_label(gone, (60.0,)) is None, "nobody knows what would have been accepted"


@pytest.mark.parametrize(
    ("count", "right", "state"),
    [
        (10, 0.0, PromiseState.UNKNOWN),
        (100, 0.95, PromiseState.KEPT),
        (100, 0.78, PromiseState.BELOW),
        (100, 0.3, PromiseState.BROKEN),
    ],
)
def test_a_promise_is_broken_only_where_chance_hardly_explains_it(count: int, right: float, state: str) -> None:
    watch = QualityWatch((45.0,), 85.0, 95.0)
    watch.observe(WorkloadRequest(10, (3, 4), (50.0, 90.0), (100.0 * (n < right * count), 100.0)) for n in range(count))
    assert (watch.achieved().state, watch.achieved().labelled) == (state, count)


def test_what_is_long_ago_counts_no_more() -> None:
    watch = QualityWatch((0.0,), 85.0, 95.0)
    for quality in (100.0, 0.0):
        watch.observe(WorkloadRequest(10, (3, 4), (50.0, 90.0), (quality, 100.0)) for _ in range(1000))
    assert watch.achieved().achieved == 0.0


@pytest.mark.live
async def test_a_broken_promise_is_a_metric_a_status_and_a_reason_to_plan_anew() -> None:
    async with desk_with(record=LABELLED) as at:
        await at.manager.apply(plan_with(45.0, judge="confidence", promise=PROMISE, quality_target=80.0))
        await report(at, requests(200, right=0.95))
        (status,) = await at.manager.statuses()
        assert status.quality is not None
        assert status.quality.state is PromiseState.KEPT
        assert at.metric("quality_promised", cascade="both") == 80.0
        assert at.metric("quality_broken", cascade="both") == 0.0
        verdict = await report(at, requests(600, right=0.4, seed=1))
        assert verdict.startswith("the quality is promised at least 80 with 95 %, achieved ")
        assert verdict.endswith("broken: planning")
        assert at.metric("quality_broken", cascade="both") == 1.0
        achieved = at.metric("quality_achieved", cascade="both")
        assert achieved is not None
        assert achieved < 75
        (status,) = await at.manager.statuses()
        message = status_message(status)
        assert quality_from(message.quality) == status.quality
        line = {"cascade": "both", "state": message.quality.state, "says": quality_from(message.quality).says()}
        assert is_broken(line)
        assert "quality of both: promised at least 80" in promise_line(line)
        await at.planned()
        window = read_window(at.maker.asked[-1][1])
        assert (window.judge, window.label) == ("confidence", "exact")
        assert all(request.quality is not None for request in window.requests)


@pytest.mark.live
async def test_labelled_windows_are_kept_until_there_are_enough_for_a_promise() -> None:
    async with desk_with(record=LABELLED) as at:
        at.maker.raises = ConfigurationError("too few labels")
        for seed in range(3):
            await report(at, requests(40, right=0.9, seed=seed))
            await at.until(lambda seed=seed: len(at.maker.asked) == seed + 1)  # type: ignore[misc]
            await at.verdict(lambda verdict: "too few labels" in verdict)
        assert len(read_window(at.maker.asked[-1][1]).requests) == 120


@pytest.mark.parametrize("label", ["", "exact"])
async def test_a_goal_is_refused_where_there_is_only_confidence(label: str) -> None:
    record = CascadeRecord("both", MODELS, (50.0,), judges=("confidence",), label=label)
    async with desk_with(None, record) as at:
        if label:
            assert await at.manager.set_goal(GOAL)
        else:
            with pytest.raises(ConfigurationError, match=r"how sure a model is .* cascade set --label"):
                await at.manager.set_goal(GOAL)


def test_confidence_labels_nothing() -> None:
    with pytest.raises(ConfigurationError, match="labels nothing"):
        msgspec.structs.replace(LABELLED, label="confidence").checked()
