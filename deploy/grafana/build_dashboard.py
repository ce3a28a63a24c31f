"""Write `dashboards/penstock.json`: `python deploy/grafana/build_dashboard.py`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "dashboards" / "penstock.json"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3

FRONTEND, SCHEDULER, INSTANCE = "penstock_frontend", "penstock_scheduler", "penstock_monitor_instance"
WORKER, RESCHEDULER, PREDICTOR = "penstock_worker", "penstock_rescheduler", "penstock_predictor"
CASCADE, PLANNER = "penstock_cascade", "penstock_planner"
QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class Panel:
    """One diagram, a query a line: (legend, PromQL)."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


def quantile(q: float, histogram: str, by: str, over: str = "1m") -> str:
    """The q-quantile of a histogram, over a minute."""
    return f"histogram_quantile({q}, sum by (le, {by}) (rate({histogram}_bucket[{over}])))"


def quantiles(histogram: str, by: str, over: str = "1m") -> tuple[tuple[str, str], ...]:
    """The usual ones."""
    return tuple((f"p{100 * q:.0f} {{{{{by}}}}}", quantile(q, histogram, by, over)) for q in QUANTILES)


def rate(counter: str, by: str) -> str:
    """Increase a second, over half a minute."""
    return f"sum by ({by}) (rate({counter}_total[30s]))"


def lately(counter: str, by: str) -> str:
    """Increase over the last hour, of what happens rarely."""
    return f"sum by ({by}) (increase({counter}_total[1h]))"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Requests",
        (
            Panel("Time to first token", "s", quantiles(f"{FRONTEND}_ttft_seconds", "model")),
            Panel("Between tokens", "s", quantiles(f"{FRONTEND}_inter_token_seconds", "model")),
            Panel("Until the answer's end", "s", quantiles(f"{FRONTEND}_e2e_seconds", "model")),
            Panel("Requests by status", "reqps", (("{{status}}", rate(f"{FRONTEND}_requests", "status")),)),
            Panel("Generated tokens", "none", (("{{model}}", rate(f"{FRONTEND}_generated_tokens", "model")),)),
            Panel(
                "Prefix cache hit ratio",
                "percentunit",
                (
                    (
                        "{{model}}",
                        f"{rate(f'{FRONTEND}_cached_tokens', 'model')} / {rate(f'{FRONTEND}_prompt_tokens', 'model')}",
                    ),
                ),
            ),
            Panel(
                "Requests in the frontend",
                "none",
                (("running", f"sum({FRONTEND}_running_requests)"), ("queued", f"sum({FRONTEND}_queued_requests)")),
            ),
            Panel(
                "Placements by instance",
                "reqps",
                (("{{instance}} {{policy}}", rate(f"{SCHEDULER}_placements", "instance, policy")),),
            ),
            Panel("Placement decision", "s", quantiles(f"{SCHEDULER}_decision_seconds", "job")),
        ),
    ),
    (
        "Instances",
        (
            Panel("Running requests by instance", "none", (("{{instance}}", f"{INSTANCE}_running_requests"),)),
            Panel(
                "Queued prefill tokens by instance", "none", (("{{instance}}", f"{INSTANCE}_queued_prefill_tokens"),)
            ),
            Panel("KV blocks in use by instance", "none", (("{{instance}}", f"{INSTANCE}_kv_blocks_used"),)),
            Panel("Decoding requests by instance", "none", (("{{instance}}", f"{INSTANCE}_decoding_requests"),)),
            Panel("Between tokens by instance", "ms", (("{{instance}}", f"{INSTANCE}_token_interval_ms"),)),
            Panel(
                "From prefill to decode instance",
                "none",
                (
                    ("{{outcome}} a second", rate(f"{WORKER}_transfers", "outcome")),
                    ("p95 seconds from the first token", quantile(0.95, f"{WORKER}_transfer_seconds", "job")),
                ),
            ),
        ),
    ),
    (
        "Predicted lengths",
        (
            Panel(
                "Instances by where their lengths come from",
                "none",
                (("{{source}}", f"sum by (source) ({WORKER}_length_source)"),),
            ),
            Panel(
                "Remaining lengths predicted",
                "none",
                (
                    ("predicted {{job}}", rate(f"{WORKER}_predictions", "job")),
                    ("by the fallback {{job}}", rate(f"{WORKER}_fallback_predictions", "job")),
                    ("calls without an answer {{job}}", rate(f"{WORKER}_prediction_failures", "job")),
                    ("steps overtaken {{job}}", rate(f"{WORKER}_prediction_batches_skipped", "job")),
                ),
            ),
            Panel("Time in the predictor's network", "s", quantiles(f"{PREDICTOR}_batch_seconds", "job")),
            Panel("Requests in a call of the predictor", "none", quantiles(f"{PREDICTOR}_batch_requests", "job")),
            Panel(
                "Predictor's artefacts",
                "none",
                (
                    ("in force {{model}} {{version}}", f"{PREDICTOR}_artefact"),
                    ("not in force {{folder}}", f"{PREDICTOR}_folder_refused"),
                ),
            ),
            Panel(
                "Predictor's error when it was trained",
                "none",
                (("mean tokens {{model}}", f"{PREDICTOR}_artefact_mae_tokens"),),
            ),
        ),
    ),
    (
        "Rescheduling and migration",
        (
            Panel(
                "Migrations by the rescheduler",
                "none",
                (
                    ("{{outcome}} a second", rate(f"{RESCHEDULER}_migrations", "outcome")),
                    ("under way", f"sum({RESCHEDULER}_in_flight)"),
                ),
            ),
            Panel(
                "Spread of decoding load over instances",
                "none",
                (
                    ("standard deviation {{model}}", f"sqrt(max by (model) ({RESCHEDULER}_variance))"),
                    ("mean {{model}}", f"max by (model) ({RESCHEDULER}_mean_tokens)"),
                ),
            ),
            Panel("Rescheduling decision", "s", quantiles(f"{RESCHEDULER}_decision_seconds", "job")),
            Panel("Migration from order to end", "s", quantiles(f"{RESCHEDULER}_migration_seconds", "job")),
            Panel("Pause of a request that moves", "s", quantiles(f"{WORKER}_migration_paused_seconds", "job")),
            Panel(
                "Migrations by end",
                "none",
                (
                    (
                        "{{direction}} {{outcome}} a second",
                        rate(f"{WORKER}_migrations", "direction, outcome"),
                    ),
                ),
            ),
        ),
    ),
    (
        "Stages",
        (
            Panel("Stage of each instance", "none", (("{{instance}}", f"{WORKER}_stage"),)),
            Panel("Longest sequence of each instance", "none", (("{{instance}}", f"{WORKER}_stage_boundary_tokens"),)),
            Panel(
                "Requests offered to other instances",
                "none",
                (("{{outcome}} a second", rate(f"{WORKER}_stage_deals", "outcome")),),
            ),
            Panel(
                "Stage plans in the last hour",
                "none",
                (("{{model}} {{outcome}}", lately(f"{PLANNER}_stage_plans", "model, outcome")),),
            ),
        ),
    ),
    (
        "Cascades",
        (
            Panel(
                "Answers by tier",
                "reqps",
                (("{{cascade}} {{tier}}", rate(f"{FRONTEND}_cascade_answers", "cascade, tier")),),
            ),
            Panel(
                "Answers by why they were accepted",
                "reqps",
                (
                    ("{{cascade}} {{because}}", rate(f"{FRONTEND}_cascade_answers", "cascade, because")),
                    ("{{cascade}} broke off on {{tier}}", rate(f"{FRONTEND}_cascade_broken_off", "cascade, tier")),
                ),
            ),
            Panel(
                "Escalations by tier gone on to, and why",
                "reqps",
                (
                    (
                        "{{cascade}} {{tier}} {{because}}",
                        rate(f"{FRONTEND}_cascade_escalations", "cascade, tier, because"),
                    ),
                ),
            ),
            Panel(
                "Time in each tier",
                "s",
                tuple(
                    (
                        f"p{100 * q:.0f} {{{{cascade}}}} {{{{tier}}}}",
                        quantile(q, f"{FRONTEND}_cascade_tier_seconds", "cascade, tier"),
                    )
                    for q in (0.5, 0.95)
                ),
            ),
            Panel(
                "First token of each tier",
                "s",
                tuple(
                    (
                        f"p{100 * q:.0f} {{{{cascade}}}} {{{{tier}}}}",
                        quantile(q, f"{FRONTEND}_cascade_tier_ttft_seconds", "cascade, tier"),
                    )
                    for q in (0.5, 0.95)
                ),
            ),
            Panel("Time to judge an answer", "s", quantiles(f"{CASCADE}_judge_seconds", "cascade")),
            Panel(
                "Judges that gave no score",
                "reqps",
                (
                    ("first judge passed over {{cascade}}", rate(f"{CASCADE}_judge_passed_over", "cascade")),
                    ("no judge at all {{cascade}}", rate(f"{CASCADE}_unjudged", "cascade")),
                    ("frontend got no score {{cascade}}", rate(f"{FRONTEND}_cascade_unjudged", "cascade")),
                    ("missing from the samples {{cascade}}", rate(f"{FRONTEND}_cascade_untold", "cascade")),
                ),
            ),
            Panel("Answers being judged", "none", (("{{instance}}", f"{CASCADE}_judging"),)),
            Panel(
                "Scores in the last five minutes",
                "none",
                (("{{le}}", f"sum by (le) (increase({CASCADE}_score_bucket[5m]))"),),
                kind="heatmap",
            ),
            Panel(
                "Scores by tier and judge",
                "none",
                tuple(
                    (
                        f"p{100 * q:.0f} {{{{cascade}}}} {{{{tier}}}} {{{{judge}}}}",
                        quantile(q, f"{CASCADE}_score", "cascade, tier, judge", "5m"),
                    )
                    for q in (0.1, 0.5, 0.9)
                ),
            ),
            Panel(
                "Thresholds in force",
                "none",
                (("{{cascade}} {{tier}}", f"max by (cascade, tier) ({CASCADE}_threshold)"),),
            ),
            Panel(
                "Quality, promised and achieved",
                "none",
                (
                    ("promised {{cascade}}", f"max by (cascade) ({PLANNER}_quality_promised)"),
                    ("achieved {{cascade}}", f"max by (cascade) ({PLANNER}_quality_achieved)"),
                ),
            ),
            Panel(
                "Sampled answers labelled in the last hour",
                "none",
                (("{{outcome}} {{cascade}} {{label}}", lately(f"{CASCADE}_labels", "cascade, label, outcome")),),
            ),
            Panel(
                "Plans in the last hour",
                "none",
                (("{{cascade}} {{outcome}}", lately(f"{PLANNER}_plans", "cascade, outcome")),),
            ),
            Panel(
                "Last plan put into force",
                "dateTimeFromNow",
                (("{{cascade}}", f"1000 * max by (cascade) ({PLANNER}_plan_applied_timestamp_seconds)"),),
                kind="stat",
            ),
            Panel("Time to make a plan", "s", quantiles(f"{PLANNER}_planning_seconds", "job", "1h")),
            Panel(
                "Samples and workloads in the last hour",
                "none",
                (
                    ("samples {{outcome}} {{cascade}}", lately(f"{CASCADE}_samples", "cascade, outcome")),
                    ("workloads {{outcome}} {{cascade}}", lately(f"{CASCADE}_workloads", "cascade, outcome")),
                    ("workloads at the planner {{cascade}}", lately(f"{PLANNER}_workloads", "cascade")),
                ),
            ),
        ),
    ),
    (
        "Availability",
        (
            Panel(
                "Requests that wait for an instance",
                "none",
                (
                    ("wait", f"sum({FRONTEND}_waiting_requests)"),
                    ("refused, too many wait", f"sum(rate({FRONTEND}_refused_waits_total[30s]))"),
                ),
            ),
            Panel(
                "Requests placed again",
                "reqps",
                (
                    ("{{reason}}", rate(f"{FRONTEND}_recoveries", "reason")),
                    ("in vain: {{reason}}", rate(f"{FRONTEND}_failed_recoveries", "reason")),
                    ("hedged placements", f"sum(rate({FRONTEND}_hedged_placements_total[30s]))"),
                ),
            ),
            Panel(
                "Workers found dead or hanging in the last hour",
                "none",
                (
                    ("dead", f"sum(increase({FRONTEND}_dead_workers_total[1h]))"),
                    ("hanging: {{hang}}", lately(f"{FRONTEND}_hung_workers", "hang")),
                ),
            ),
            Panel(
                "Streams whose frontend went",
                "none",
                (
                    ("kept for their clients, a second", f"sum(rate({WORKER}_orphaned_requests_total[30s]))"),
                    ("resumed a second", f"sum(rate({FRONTEND}_resumed_streams_total[30s]))"),
                    ("nobody came for, a second", f"sum(rate({WORKER}_expired_orphans_total[30s]))"),
                ),
            ),
            Panel(
                "Who leads",
                "none",
                (("{{duty}} {{instance}}", "penstock_leadership_leading"),),
            ),
            Panel(
                "Members and their records",
                "none",
                (
                    ("that {{job}} misses", "sum by (job) (penstock_missing_members)"),
                    ("announced again: {{reason}}", lately("penstock_member_announcements", "reason")),
                ),
            ),
            Panel(
                "What schedulers tell each other",
                "none",
                (
                    ("events a second", f"sum(rate({SCHEDULER}_shared_events_total[30s]))"),
                    ("events lost a second", f"sum(rate({SCHEDULER}_unshared_events_total[30s]))"),
                    ("placements by a fallback a second", f"sum(rate({SCHEDULER}_fallbacks_total[30s]))"),
                ),
            ),
            Panel(
                "Watchers of the monitors",
                "none",
                (
                    ("{{instance}}", "penstock_monitor_watchers"),
                    ("cut off, a second", "sum(rate(penstock_monitor_watchers_cut_off_total[30s]))"),
                ),
            ),
        ),
    ),
    (
        "Bad news",
        (
            Panel(
                "Requests at risk",
                "none",
                (
                    ("frontend places without the scheduler", f"sum({FRONTEND}_fallback_in_force)"),
                    (
                        "{{scheduler}} misses placements: {{reason}}",
                        rate(f"{FRONTEND}_scheduler_misses", "scheduler, reason"),
                    ),
                    ("lost with their worker", f"sum(rate({FRONTEND}_worker_losses_total[30s]))"),
                    ("could not be placed", f"sum(rate({SCHEDULER}_refusals_total[30s]))"),
                    ("broke off {{cascade}}", rate(f"{FRONTEND}_cascade_broken_off", "cascade")),
                    ("no judge could be had {{cascade}}", rate(f"{FRONTEND}_cascade_unjudged", "cascade")),
                ),
            ),
            Panel(
                "Instances in trouble",
                "none",
                (
                    ("stale {{instance}}", f"{INSTANCE}_stale"),
                    ("preemptions {{instance}}", f"rate({INSTANCE}_preemptions_total[30s])"),
                    ("hung {{instance}}", f"{WORKER}_hung"),
                    (
                        "decoded where it was prefilled",
                        f'sum(rate({WORKER}_transfers_total{{outcome="failed"}}[30s]))',
                    ),
                    ("lost streams to other workers", f"sum(rate({WORKER}_stage_lost_peers_total[30s]))"),
                ),
            ),
            Panel(
                "Something stands in",
                "none",
                (
                    ("rescheduling by a fallback {{model}}", f"{RESCHEDULER}_fallback"),
                    ("placing by the fallback policy", f"sum({SCHEDULER}_fallback)"),
                    ("leaders changed {{duty}}", lately("penstock_leadership_changes", "duty")),
                    ("orders of former leaders {{duty}}", lately(f"{WORKER}_refused_orders", "duty")),
                    ("predictor answers nobody", f"sum(rate({PREDICTOR}_refused_calls_total[30s]))"),
                    (
                        "cascade plans refused or failed",
                        f'sum(increase({PLANNER}_plans_total{{outcome!="applied"}}[1h]))',
                    ),
                ),
            ),
        ),
    ),
)


def panels() -> list[dict[str, Any]]:
    """All rows, each with its panels under it."""
    drawn: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        place = {"x": 0, "y": top, "w": WIDTH * COLUMNS, "h": 1}
        drawn.append({"id": len(drawn) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place})
        top += 1
        for index, each in enumerate(row):
            drawn.append(drawn_panel(len(drawn) + 1, each, index % COLUMNS * WIDTH, top + index // COLUMNS * HEIGHT))
        top += -(-len(row) // COLUMNS) * HEIGHT
    return drawn


def drawn_panel(number: int, panel: Panel, left: int, top: int) -> dict[str, Any]:
    """One panel in its place on the grid."""
    is_heatmap = panel.kind == "heatmap"
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "gridPos": {"x": left, "y": top, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        # The buckets are counted already.
        **({"options": {"calculate": False}} if is_heatmap else {}),
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "expr": query,
                "legendFormat": legend,
                **({"format": "heatmap"} if is_heatmap else {}),
            }
            for index, (legend, query) in enumerate(panel.queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    return {
        "uid": "penstock",
        "title": "Penstock",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "panels": panels(),
    }


def rendered() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    TARGET.write_text(rendered())
