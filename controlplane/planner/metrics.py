"""What the planner shows Prometheus."""

from contextlib import suppress
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from controlplane.planning.autoscale.status import AutoscaleStatus
from controlplane.planning.cascade.quality_watch import AchievedQuality, PromiseState

_PLANNING_BUCKETS_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0, 600.0)
UNKNOWN_CASCADE = "unknown"
"""Stands for names that no cascade has: what callers make up must not become labels."""


class PlanOutcome(StrEnum):
    """What became of a plan."""

    APPLIED = "applied"
    """It is in force."""
    REFUSED = "refused"
    """It contradicts itself or the cascade."""
    FAILED = "failed"
    """There is none that meets the goal, or it could not be made or stored."""
    OUTDATED = "outdated"
    """The goal, the plan in force or the cascade was changed while it was being made."""


class PlannerMetrics:
    """Written by the planning managers; `outcome` is a `PlanOutcome`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.plans = Counter(
            "penstock_planner_plans", "Cascade plans, by what became of them", ["cascade", "outcome"], registry=registry
        )
        self.applied = Gauge(
            "penstock_planner_plan_applied_timestamp_seconds",
            "Unix time of the last plan that this planner put into force",
            ["cascade"],
            registry=registry,
        )
        self.planning_seconds = Histogram(
            "penstock_planner_planning_seconds",
            "Time to make a cascade plan, or to find that there is none",
            buckets=_PLANNING_BUCKETS_S,
            registry=registry,
        )
        self.workloads = Counter(
            "penstock_planner_workloads", "Sampled workloads that were reported", ["cascade"], registry=registry
        )
        self.promised = Gauge(
            "penstock_planner_quality_promised",
            "Quality that the plan in force promises, 0 to 100",
            ["cascade"],
            registry=registry,
        )
        self.achieved = Gauge(
            "penstock_planner_quality_achieved",
            "Mean quality of accepted answers by their labels, since the plan in force; none while none is labelled",
            ["cascade"],
            registry=registry,
        )
        self.labelled = Gauge(
            "penstock_planner_quality_labelled",
            "Accepted answers with a label since the plan in force, the last ones",
            ["cascade"],
            registry=registry,
        )
        self.broken = Gauge(
            "penstock_planner_quality_broken",
            "1 while the quality is below the promised one by more than chance explains",
            ["cascade"],
            registry=registry,
        )
        self.stage_plans = Counter(
            "penstock_planner_stage_plans",
            "Stage plans, by what became of them: applied or failed",
            ["model", "outcome"],
            registry=registry,
        )

        def of_model(name: str, text: str) -> Gauge:
            return Gauge(f"penstock_planner_autoscale_{name}", text, ["model"], registry=registry)

        self._scaled = {
            "wanted": of_model("wanted", "Replicas that the model is to have"),
            "serving": of_model("serving", "Replicas that serve"),
            "rate_per_s": of_model("rate", "Requests per second in the last interval"),
            "expected_per_s": of_model("expected", "Forecast of the highest rate until a new replica would serve"),
            "upper_per_s": of_model("upper", "The same at the quantile that capacity is kept for"),
            "forecast_error": of_model("forecast_error", "Mean relative error of the last forecasts"),
            "capacity_per_s": of_model("capacity", "Requests per second that one replica sustains; 0: not known"),
            "waiting": of_model("waiting", "Requests that no replica works on yet"),
            "history_s": of_model("history_seconds", "How long the rates go back that forecasts rest on"),
        }
        self._kept_share = of_model("kept_share", "Share of the last interval's requests within the SLO")
        self._refused = of_model("refused", "1 while the actuator does not give what is wanted")
        self.histories_lost = Counter(
            "penstock_planner_autoscale_histories_lost",
            "Histories of scaled models that could not be used: not_read (damaged, another version) or not_written",
            ["model", "reason"],
            registry=registry,
        )

    def show_scale(self, status: AutoscaleStatus) -> None:
        """Set the gauges of a model that is scaled."""
        for name, gauge in self._scaled.items():
            gauge.labels(status.model).set(getattr(status, name))
        self._refused.labels(status.model).set(bool(status.refused))
        if status.kept_share is not None:
            self._kept_share.labels(status.model).set(status.kept_share)

    def hide_scale(self, model: str) -> None:
        """Drop the gauges of a model that is scaled no more."""
        for gauge in (*self._scaled.values(), self._kept_share, self._refused):
            with suppress(KeyError):
                gauge.remove(model)

    def show_quality(self, cascade: str, quality: AchievedQuality | None) -> None:
        """Set the gauges of a cascade, or drop them where nothing is promised."""
        if quality is None:
            for gauge in (self.promised, self.achieved, self.labelled, self.broken):
                with suppress(KeyError):
                    gauge.remove(cascade)
            return
        self.promised.labels(cascade).set(quality.promised)
        self.labelled.labels(cascade).set(quality.labelled)
        self.broken.labels(cascade).set(quality.state is PromiseState.BROKEN)
        if quality.achieved is not None:
            self.achieved.labels(cascade).set(quality.achieved)
