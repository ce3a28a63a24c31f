"""Plans as Compose files and Helm values."""

import re
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console

from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier, SteadyRuns, encode_plan
from controlplane.planning.cascade.promise import QualityPromise
from services.cli.cascade import set_cascade
from services.cli.planning.command import command
from services.cli.planning.export import MAX_NAME, compose_override, helm_values
from services.cli.planning.plan_table import plan_table
from tests.deploy.compose_file import DEPLOY
from tests.deploy.planned_cascade import PLAN

OF_EACH_WORKER = {"command", "healthcheck", "ports", "profiles", "networks", "deploy"}
MODEL_VARIABLES = {"PENSTOCK_SERVE_WORKER_MODEL", "PENSTOCK_SERVE_WORKER_MODEL_PATH"}


@pytest.fixture
def exported(tmp_path: Path) -> Any:
    path = tmp_path / "plan.json"
    path.write_bytes(encode_plan(PLAN))

    def run(form: str, *options: str) -> Any:
        result = CliRunner().invoke(command, ["export", str(path), "--format", form, *options])
        assert result.exit_code == 0, result.output
        return yaml.safe_load(result.output)

    return run


def test_compose_has_a_worker_for_each_replica_on_its_gpus(exported: Any) -> None:
    services = exported("compose")["services"]
    tiers = {name: service for name, service in services.items() if name.startswith("tier-")}
    assert list(tiers) == ["tier-small-0", "tier-small-1", "tier-small-2", "tier-org-large-3-3"]
    devices = [service["deploy"]["resources"]["reservations"]["devices"][0] for service in tiers.values()]
    assert [len(device["device_ids"]) for device in devices] == [1, 1, 2, 12]
    numbers = [number for device in devices for number in device["device_ids"]]
    assert numbers == [str(number) for number in range(PLAN.gpus)], "each has its own"
    assert not any("count" in device for device in devices), "which would give every worker the first GPUs"
    large = tiers["tier-org-large-3-3"]["command"]
    assert large[large.index("--model") + 1] == "Org/Large.3"
    assert "tensor_parallel_size=4" in large
    assert "pipeline_parallel_size=3" in large
    ports = [service["ports"][0].rpartition(":")[0] for service in tiers.values()]
    assert len(set(ports)) == len(ports)
    assert services["worker-0"] == {"profiles": ["unplanned"]}, "the workers of compose.yaml stay away"


def test_every_planned_worker_is_the_gpu_worker_of_the_compose_file_with_a_port_of_its_own(exported: Any) -> None:
    base = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    expected = {name: value for name, value in base["worker-gpu"].items() if name not in OF_EACH_WORKER}
    expected["environment"] = {
        name: value for name, value in expected["environment"].items() if name not in MODEL_VARIABLES
    }
    planned = exported("compose")["services"]
    tiers = [service for name, service in planned.items() if name.startswith("tier-")]
    for service in tiers:
        assert {name: value for name, value in service.items() if name not in OF_EACH_WORKER} == expected
    merged = {name: {**base.get(name, {}), **planned.get(name, {})} for name in {**base, **planned}}
    published = [
        port.rpartition(":")[0]
        for service in merged.values()
        if not service.get("profiles")
        for port in _ports_of(service, base)
    ]
    assert len(published) > len(tiers)
    assert len(set(published)) == len(published), "or else only one of them could start"


def _ports_of(service: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Compose appends a service's ports to those of the one that it extends."""
    extended = base[service["extends"]["service"]] if "extends" in service else {}
    return [*extended.get("ports", ()), *service.get("ports", ())]


def test_prometheus_finds_every_planned_worker_by_one_name(exported: Any) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (found,) = (way for job in config["scrape_configs"] for way in job.get("dns_sd_configs", ()))
    tiers = [service for name, service in exported("compose")["services"].items() if name.startswith("tier-")]
    assert {alias for service in tiers for alias in service["networks"]["default"]["aliases"]} == set(found["names"])
    for service in tiers:
        command = service["command"]
        assert command[command.index("--metrics-port") + 1] == str(found["port"])
        assert service["ports"][0].endswith(f":{command[command.index('--port') + 1]}")


def test_helm_values_have_an_entry_for_each_shape(exported: Any) -> None:
    values = exported("helm")
    assert values["cascade"] == {"name": "both", "tiers": ["Small", "Org/Large.3"], "thresholds": [70.25]}
    assert [(w["model"], w["replicas"], w["gpusPerReplica"]) for w in values["workers"]] == [
        ("Small", 2, 1),
        ("Small", 1, 2),
        ("Org/Large.3", 1, 12),
    ]
    assert values["workers"][2]["engineArgs"] == ["tensor_parallel_size=4", "pipeline_parallel_size=3"]
    assert [w["name"] for w in values["workers"]] == [
        "tier0-tp1-pp1-small",
        "tier0-tp2-pp1-small",
        "tier1-tp4-pp3-org-large-3",
    ]


def test_compose_sets_the_cascade_up_as_the_command_line_does(exported: Any) -> None:
    service = exported("compose", "--judge", "model:Org/Large.3", "--judge", "confidence")["services"]["cascade-set"]
    group, verb, *options = service["command"]
    assert (group, verb) == ("cascade", "set")
    assert set_cascade.make_context("set", options).params == {
        "name": "both",
        "tiers": ("Small", "Org/Large.3"),
        "thresholds": (70.25,),
        "judges": ("model:Org/Large.3", "confidence"),
        "label": "",
        "rubric": None,
        "without_judge": "escalate",
        "speculate": 0.0,
        "speculate_room": 4,
        "expected_s": (),
        "mesh": "default",
        "store": None,
        "as_json": False,
    }
    base = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert service["image"] == base["cascade"]["image"]
    assert service["environment"] == base["cascade"]["environment"]
    assert set(service["depends_on"]) <= set(base)
    assert service["restart"].startswith("on-failure"), "until the router is there, and not once it is done"


def test_what_compose_would_take_for_a_variable_is_escaped() -> None:
    service = yaml.safe_load(compose_override(PLAN, ("endpoint:m@http://host/$x/v1",)))["services"]["cascade-set"]
    assert "--judge=endpoint:m@http://host/$$x/v1" in service["command"]


def test_the_judge_is_that_whose_scores_the_thresholds_are_for(exported: Any, tmp_path: Path) -> None:
    assert "judges" not in exported("helm")["cascade"], "the chart's own stay"
    assert exported("helm", "--judge", "exact")["cascade"]["judges"] == ["exact"]
    for unsaid in (helm_values(PLAN), compose_override(PLAN)):
        assert "does not say whose scores" in unsaid
    path = tmp_path / "judged.json"
    path.write_bytes(encode_plan(msgspec.structs.replace(PLAN, judge="model:J")))

    def export(*options: str) -> Any:
        return CliRunner().invoke(command, ["export", str(path), "--format", "helm", *options])

    assert yaml.safe_load(export().output)["cascade"]["judges"] == ["model:J"]
    assert "does not say" not in export().output
    with_fallback = export("--judge", "model:J", "--judge", "confidence")
    assert yaml.safe_load(with_fallback.output)["cascade"]["judges"] == ["model:J", "confidence"]
    refused = export("--judge", "confidence")
    assert refused.exit_code == 2
    assert "model:J" in refused.output


def test_names_are_made_of_what_hosts_may_be_called() -> None:
    tiers = tuple(
        PlannedTier(model, 1, (PlannedReplicas(1),), 1.0, 1.0)
        for model in ("Org/Llama-3.3_70B-Instruct-with-a-very-long-name", "org-llama-3.3")
    )
    plan = msgspec.structs.replace(PLAN, tiers=tiers)
    values, compose = yaml.safe_load(helm_values(plan)), yaml.safe_load(compose_override(plan))
    names = [worker["name"] for worker in values["workers"]]
    names += [name for name in compose["services"] if name.startswith("tier-")]
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) for name in names), names
    assert all(len(worker["name"]) <= MAX_NAME for worker in values["workers"])
    assert len(set(names)) == 4


def test_the_header_says_which_latency_is_meant() -> None:
    assert "p95 of the slowest tier 9.00 s" in helm_values(PLAN).splitlines()[0]
    end_to_end = msgspec.structs.replace(PLAN, minimise="end_to_end", latency_mean_s=4.5)
    assert "mean from end to end 4.50 s" in compose_override(end_to_end).splitlines()[0]


def test_a_plan_is_shown_with_the_latencies_that_it_knows() -> None:
    def shown(plan: CascadePlan) -> str:
        console = Console(width=200, record=True, file=StringIO())
        console.print(plan_table(plan))
        return console.export_text()

    old, whole = shown(PLAN), shown(msgspec.structs.replace(PLAN, minimise="end_to_end", latency_mean_s=4.5))
    assert "quality 80 at the least p95 of the slowest tier" in old
    assert "mean from end to end" not in old
    assert "quality 80 at the least mean from end to end" in whole
    assert "p95 of the slowest tier 9.00 s, mean from end to end 4.50 s" in whole


@pytest.mark.parametrize(
    ("is_settled", "is_overloaded", "words"),
    [
        (True, False, "p95 from end to end 12.00 s, all within 4 % in 5 steady runs of 2000 requests;"),
        (False, False, "NOT SETTLED: within 4 % in 5 steady runs of 2000 requests: a tier is near what it sustains"),
        (
            False,
            True,
            "12.00 s and rising: NOT SETTLED within 4 % in 5 steady runs of 2000 requests: more requests come",
        ),
    ],
)
def test_a_plan_is_shown_with_how_sure_its_latencies_are(is_settled: bool, is_overloaded: bool, words: str) -> None:
    runs = SteadyRuns(5, 2000, 4.0, is_settled, is_overloaded, whole_p95_s=12.0)
    console = Console(width=400, record=True, file=StringIO())
    console.print(plan_table(msgspec.structs.replace(PLAN, steady=runs)))
    assert words in " ".join(console.export_text().split())


def test_every_option_of_an_exported_worker_exists(exported: Any) -> None:
    from services.cli.serve import ROLES, _role_command

    assert "worker" in ROLES
    for name, service in exported("compose")["services"].items():
        if name.startswith("tier-"):
            _role_command("worker").make_context("worker", service["command"][2:], resilient_parsing=False).close()


@pytest.mark.parametrize(("label", "set_up"), [("model:large", True), ("people.jsonl", False), ("confidence", False)])
def test_the_judge_that_labelled_the_samples_goes_on_with_it(label: str, set_up: bool) -> None:
    promise = QualityPromise(80.0, 95.0, 81.0, 84.0, 300, label)
    plan = msgspec.structs.replace(PLAN, judge="confidence", promise=promise)
    command = yaml.safe_load(compose_override(plan, ["confidence"]))["services"]["cascade-set"]["command"]
    assert (f"--label={label}" in command) == set_up
    assert ("label" in yaml.safe_load(helm_values(plan))["cascade"]) == set_up
