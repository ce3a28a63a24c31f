"""The dashboard asks for nothing that the roles do not export, and Prometheus keeps the labels that it asks for."""

import asyncio
import json
import re
import runpy
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from controlplane.planner.role import PlannerRole
from controlplane.planner.settings import PlannerSettings
from engine_worker.role import WorkerRole
from engine_worker.settings import WorkerSettings
from mesh.role import Role, register_member_metrics
from services.cascade.role import CascadeRole
from services.cascade.settings import CascadeSettings
from services.cli.serve import ROLES
from services.frontend.gateway.role import GatewayRole
from services.frontend.gateway.settings import GatewaySettings
from services.frontend.role import FrontendRole
from services.frontend.settings import FrontendSettings
from services.predictor.role import PredictorRole
from services.predictor.settings import PredictorSettings
from tests.deploy.compose_file import DEPLOY
from tests.unit.controlplane.local_mesh import Running, local_mesh

pytestmark = pytest.mark.live

MODEL_PATH = DEPLOY.parent / "demo" / "models" / "demo-large"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "penstock.json"
FROM_PROMETHEUS = {"job", "instance"}
"""Labels that every target has."""
ENDINGS = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}

Exported = dict[str, set[str]]
"""The labels of each metric by its name in PromQL."""


def queries() -> list[tuple[str, str, str]]:
    """(panel, legend, PromQL) of every line of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        (panel["title"], target["legendFormat"], target["expr"])
        for panel in panels
        for target in panel.get("targets", ())
    ]


def alerts() -> list[tuple[str, str, str]]:
    """(alert, severity, PromQL) of every rule."""
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return [(rule["alert"], rule["labels"]["severity"], rule["expr"]) for group in groups for rule in group["rules"]]


def families(registry: CollectorRegistry) -> Exported:
    """What a role's metrics port shows now or once something has happened."""
    labels: dict[str, set[str]] = {}
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            own = set(getattr(collector, "_labelnames", ())) | set(getattr(family, "_labelnames", ()))
            own |= {"le"} if family.type == "histogram" else set()
            for ending in ENDINGS.get(family.type, ()):
                labels[family.name + ending] = own
    return labels


@pytest.fixture(scope="module")
def exported() -> Exported:
    """By all roles, which really run."""
    return asyncio.run(_exported())


async def _exported() -> Exported:
    roles: list[Role] = [
        FrontendRole(FrontendSettings(http_port=0)),
        GatewayRole(GatewaySettings()),
        PlannerRole(PlannerSettings()),
        PredictorRole(PredictorSettings()),
        CascadeRole(CascadeSettings()),
        WorkerRole(WorkerSettings(model="demo-large", model_path=str(MODEL_PATH), engine="simulated")),
    ]
    async with local_mesh() as mesh:
        running: list[Running] = [await mesh.monitor(), await mesh.scheduler()]
        running += [await mesh.start(role, f"{role.name}-0") for role in roles]
        assert {each.role.name for each in running} == set(ROLES) - {"operator"}, "which needs a cluster"
        labels: Exported = {}
        for each in running:
            register_member_metrics(each.context)
            labels |= families(each.context.registry)
        return labels


def test_the_committed_dashboard_is_the_generated_one() -> None:
    rendered = runpy.run_path(str(DEPLOY / "grafana" / "build_dashboard.py"))["rendered"]()
    assert rendered == DASHBOARD.read_text()


@pytest.mark.slow
def test_every_queried_metric_is_exported(exported: Exported) -> None:
    for panel, _, query in queries() + alerts():
        names = set(re.findall(r"penstock_\w+", query))
        assert names, panel
        assert names <= set(exported), panel


def test_every_label_of_a_panel_is_one_of_its_metrics(exported: Exported) -> None:
    for panel, legend, query in queries():
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
        used = grouped | set(re.findall(r"{{(\w+)}}", legend)) | set(re.findall(r"{(\w+)!?=", query))
        for name in re.findall(r"penstock_\w+", query):
            assert used <= exported[name] | FROM_PROMETHEUS, panel


def test_no_two_panels_share_an_id_or_a_place() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


def test_instances_keep_their_names_in_prometheus() -> None:
    """Otherwise `instance` would be the scraped process, and a monitor's instances one line."""
    config: Any = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert all(job.get("honor_labels") for job in config["scrape_configs"])


def test_prometheus_reads_the_rules_and_compose_gives_them_to_it() -> None:
    config: Any = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    volumes = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["prometheus"]["volumes"]
    assert "./prometheus/alerts.yml:/etc/prometheus/alerts.yml:ro" in volumes
    assert {severity for _, severity, _ in alerts()} <= {"page", "ticket"}
