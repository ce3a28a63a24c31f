"""Write `dashboards/penstock.json`: `python deploy/grafana/build_dashboard.py`."""

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "dashboards" / "penstock.json"
WIDTH, HEIGHT, COLUMNS = 8, 8, 3

FRONTEND, SCHEDULER, INSTANCE = "penstock_frontend", "penstock_scheduler", "penstock_monitor_instance"
WORKER, RESCHEDULER = "penstock_worker", "penstock_rescheduler"


def quantile(q: float, histogram: str, by: str) -> str:
    """The q-quantile of a histogram, over a minute."""
    return f"histogram_quantile({q}, sum by (le, {by}) (rate({histogram}_bucket[1m])))"


def rate(counter: str, by: str) -> str:
    """Increase a second, over half a minute."""
    return f"sum by ({by}) (rate({counter}_total[30s]))"


# Title, unit, and (legend, query) pairs.
PANELS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "Time to first token",
        "s",
        [
            (f"p{int(q * 100)} {{{{model}}}}", quantile(q, f"{FRONTEND}_ttft_seconds", "model"))
            for q in (0.5, 0.95, 0.99)
        ],
    ),
    (
        "Between tokens",
        "s",
        [
            (f"p{int(q * 100)} {{{{model}}}}", quantile(q, f"{FRONTEND}_inter_token_seconds", "model"))
            for q in (0.5, 0.95, 0.99)
        ],
    ),
    ("Requests by status", "reqps", [("{{status}}", rate(f"{FRONTEND}_requests", "status"))]),
    ("Generated tokens", "none", [("{{model}}", rate(f"{FRONTEND}_generated_tokens", "model"))]),
    (
        "Prefix cache hit ratio",
        "percentunit",
        [
            (
                "{{model}}",
                f"{rate(f'{FRONTEND}_cached_tokens', 'model')} / {rate(f'{FRONTEND}_prompt_tokens', 'model')}",
            )
        ],
    ),
    (
        "Requests in the frontend",
        "none",
        [("running", f"sum({FRONTEND}_running_requests)"), ("queued", f"sum({FRONTEND}_queued_requests)")],
    ),
    ("Running requests by instance", "none", [("{{instance}}", f"{INSTANCE}_running_requests")]),
    ("Queued prefill tokens by instance", "none", [("{{instance}}", f"{INSTANCE}_queued_prefill_tokens")]),
    ("KV blocks in use by instance", "none", [("{{instance}}", f"{INSTANCE}_kv_blocks_used")]),
    ("Decoding requests by instance", "none", [("{{instance}}", f"{INSTANCE}_decoding_requests")]),
    ("Between tokens by instance", "ms", [("{{instance}}", f"{INSTANCE}_token_interval_ms")]),
    (
        "From prefill to decode instance",
        "none",
        [
            ("{{outcome}} a second", rate(f"{WORKER}_hand_overs", "outcome")),
            ("p95 seconds from the first token", f"{quantile(0.95, f'{WORKER}_hand_over_seconds', 'job')}"),
        ],
    ),
    (
        "Placements by instance",
        "reqps",
        [("{{instance}} {{policy}}", rate(f"{SCHEDULER}_placements", "instance, policy"))],
    ),
    (
        "Migrations by the rescheduler",
        "none",
        [
            ("{{outcome}} a second", rate(f"{RESCHEDULER}_migrations", "outcome")),
            ("under way", f"sum({RESCHEDULER}_in_flight)"),
        ],
    ),
    (
        "Spread of decoding load over instances",
        "none",
        [
            ("standard deviation {{model}}", f"sqrt(max by (model) ({RESCHEDULER}_variance))"),
            ("mean {{model}}", f"max by (model) ({RESCHEDULER}_mean_tokens)"),
        ],
    ),
    (
        "Placement decision",
        "s",
        [(f"p{int(q * 100)}", quantile(q, f"{SCHEDULER}_decision_seconds", "job")) for q in (0.5, 0.99)],
    ),
    (
        "Bad news",
        "none",
        [
            ("frontend places without the scheduler", f"sum({FRONTEND}_fallback_in_force)"),
            ("stale {{instance}}", f"{INSTANCE}_stale"),
            ("preemptions {{instance}}", f"rate({INSTANCE}_preemptions_total[30s])"),
            ("lost with their worker", f"sum(rate({FRONTEND}_worker_losses_total[30s]))"),
            ("decoded where it was prefilled", f'sum(rate({WORKER}_hand_overs_total{{outcome="failed"}}[30s]))'),
            ("rescheduling by a fallback {{model}}", f"{RESCHEDULER}_fallback"),
            ("could not be placed", f"sum(rate({SCHEDULER}_refusals_total[30s]))"),
        ],
    ),
]


def panel(index: int, title: str, unit: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    """One time series in its place on the grid."""
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "gridPos": {"x": index % COLUMNS * WIDTH, "y": index // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": query, "legendFormat": legend}
            for number, (legend, query) in enumerate(queries)
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
        "panels": [panel(index, *entry) for index, entry in enumerate(PANELS)],
    }


def rendered() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    TARGET.write_text(rendered())
