import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from engine_worker.settings import PhaseName
from mesh.identity.identity import ROLES as IDENTITIES
from services.cli.main import penstock
from services.cli.planning.export import compose_override
from tests.deploy.compose_file import DEPLOY, load_compose, option, penstock_services
from tests.deploy.planned_cascade import PLAN
from tests.in_time import eventually
from tests.mesh.running_mesh import PENSTOCK
from tests.reflection import ReflectionClient

ROOT = DEPLOY.parent
COMPOSE = load_compose()
SERVICES = penstock_services(COMPOSE)
# The engine of these tests needs no vLLM; the commands themselves are the compose file's to the letter.
LOCAL = {
    "PENSTOCK_ENGINE": "simulated",
    "PENSTOCK_MODEL_PATH": str(ROOT / "demo" / "models" / "demo-large"),
    "PENSTOCK_PREDICTOR": str(ROOT / "demo" / "predictors" / "demo-large"),
}


def compose_specification() -> dict[str, Any]:
    """The schema that Docker's own tool ships; `make test-services` fetches its wheel."""
    wheels = sorted((Path(sys.prefix) / "share" / "compose-specification").glob("docker_compose-*.whl"))
    if not wheels:
        pytest.skip("the Compose specification is not there; `make test-services` fetches it")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        schema: dict[str, Any] = json.loads(wheel.read("compose/config/compose_spec.json"))
        return schema


def test_the_file_follows_the_compose_specification() -> None:
    jsonschema.Draft7Validator(compose_specification()).validate(COMPOSE)


def test_an_exported_plan_follows_it_too() -> None:
    exported = yaml.safe_load(compose_override(PLAN, ("confidence",)))
    jsonschema.Draft7Validator(compose_specification()).validate(exported)


def test_every_build_names_a_dockerfile_that_is_there() -> None:
    for name, service in COMPOSE["services"].items():
        if "build" in service:
            context = (DEPLOY / service["build"]["context"]).resolve()
            assert (context / service["build"]["dockerfile"]).is_file(), name


def test_every_mounted_folder_is_there_and_every_default_lies_in_one() -> None:
    for name, service in SERVICES.items():
        volumes = [volume.split(":") for volume in service.get("volumes", ())]
        mounted = [volume for volume in volumes if volume[0] not in COMPOSE["volumes"]]
        for source, *_ in mounted:
            assert (DEPLOY / source).is_dir(), name
        inside = {target: DEPLOY / source for source, target, *_ in mounted}
        targets = {target for _, target, *_ in volumes}
        paths = [Path(value) for value in service["environment"].values() if value.startswith("/")]
        paths = [path for path in paths if str(path) not in targets]
        assert all((inside[str(path.parent)] / path.name).is_dir() for path in paths), name
    assert SERVICES["predictor"]["environment"]["PENSTOCK_SERVE_PREDICTOR_ARTEFACT"] == "/predictors/demo-large"


def test_every_copy_in_a_dockerfile_has_a_source() -> None:
    for dockerfile in DEPLOY.glob("Dockerfile.*"):
        for source in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile.read_text(), re.MULTILINE):
            for path in source.split():
                assert (ROOT / path).exists(), f"{dockerfile.name}: {path}"


def test_each_service_sees_its_own_identity_alone() -> None:
    mounts = {name: service.get("volumes", ()) for name, service in COMPOSE["services"].items()}
    made = {f"identity-{name}:/identity/{name}" for name in (*IDENTITIES, "authority")}
    assert set(mounts.pop("identities")) == made
    roles = {name: service["command"][1] for name, service in SERVICES.items()} | {"etcd": "store", "cli": "operator"}
    for name, volumes in mounts.items():
        seen = [volume for volume in volumes if volume.startswith("identity-")]
        assert seen == ([f"identity-{roles[name]}:/identity:ro"] if name in roles else []), name


def test_every_service_of_ours_is_confined_watched_and_rotates_its_logs() -> None:
    for name, service in COMPOSE["services"].items():
        assert service["logging"]["options"]["max-size"], name
        if not service["image"].startswith("penstock/"):
            continue
        assert (service["read_only"], service["cap_drop"], service["init"]) == (True, ["ALL"], True), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert name in ("identities", "cli") or "healthcheck" in service, name


def test_every_role_is_deployed() -> None:
    roles = {service["command"][1] for service in SERVICES.values()}
    assert roles == {"frontend", "gateway", "scheduler", "monitor", "planner", "predictor", "cascade", "worker"}


def test_no_two_services_share_a_port() -> None:
    ports = [option(service, name) for service in SERVICES.values() for name in ("--port", "--metrics-port")]
    assert len(set(ports)) == len(ports)


def test_prometheus_scrapes_every_role() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    targets = {
        target
        for job in config["scrape_configs"]
        for group in job.get("static_configs", ())
        for target in group["targets"]
    }
    assert targets == {f"{name}:{option(service, '--metrics-port')}" for name, service in SERVICES.items()}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_command_is_one_that_penstock_knows(name: str) -> None:
    role, *_ = SERVICES[name]["command"][1:]
    result = CliRunner().invoke(penstock, ["serve", role, "--help"])
    assert result.exit_code == 0, result.output
    for argument in SERVICES[name]["command"][2:]:
        if argument.startswith("--"):
            assert argument in result.output


def test_the_disaggregated_variant_sets_a_phase_that_workers_know() -> None:
    variant = yaml.safe_load((DEPLOY / "compose.disaggregated.yaml").read_text())["services"]
    phases = [service["environment"]["PENSTOCK_SERVE_WORKER_PHASE"] for service in variant.values()]
    assert sorted(phases) == ["decode", "decode", "prefill"]
    assert all(SERVICES[name]["command"][1] == "worker" for name in variant)
    assert set(phases) <= set(get_args(PhaseName))
    told = {"PENSTOCK_SERVE_WORKER_PHASE": "neither"}
    command = ["serve", "worker", "--member-id", "w", "--store", "embedded:", "--model", "m", "--model-path", "/none"]
    result = CliRunner().invoke(penstock, command, env=told)
    assert result.exit_code == 2
    assert "neither" in result.output, "the variable is one that workers read"


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the service `identities` makes, by its own command."""
    folder = tmp_path_factory.mktemp("identities")
    command = [str(folder) if part == "/identity" else part for part in COMPOSE["services"]["identities"]["command"]]
    subprocess.run((*PENSTOCK, *command), check=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def store_url(identities: Path) -> Iterator[str]:
    from tests.deploy.state_store import served_state_store

    with served_state_store(identities) as url:
        yield url


@pytest.fixture(scope="module")
def processes(
    store_url: str, identities: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Every service but the GPU worker's, started by its own command over one state store."""
    compose = load_compose({**LOCAL, "PENSTOCK_STORE": store_url, "PENSTOCK_IDENTITY": str(identities)})
    running: dict[str, subprocess.Popen[bytes]] = {}
    logs = tmp_path_factory.mktemp("compose")
    try:
        for name, service in penstock_services(compose).items():
            if "profiles" not in service:
                with (logs / f"{name}.log").open("wb") as log:
                    environment = {**os.environ, **service["environment"]}
                    command = (*PENSTOCK, *service["command"])
                    running[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        yield running
    finally:
        for process in running.values():
            process.terminate()
        statuses = {name: process.wait(30) for name, process in running.items()}
    assert set(statuses.values()) == {0}, {name: (logs / f"{name}.log").read_text()[-800:] for name in statuses}


def is_healthy(service: dict[str, Any]) -> bool:
    """As its container's health check says, to the letter."""
    command = [sys.executable if part == "python" else part for part in service["healthcheck"]["test"][1:]]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


@pytest.mark.process
@pytest.mark.parametrize("name", sorted(name for name, service in SERVICES.items() if "profiles" not in service))
def test_every_command_serves(name: str, processes: dict[str, subprocess.Popen[bytes]], identities: Path) -> None:
    eventually(lambda: is_healthy(SERVICES[name]), 60.0, f"{name} serves")
    client = ReflectionClient(f"127.0.0.1:{option(SERVICES[name], '--port')}", identities / "operator")
    assert client.call("grpc.health.v1.Health", "Check") == {"status": "SERVING"}
    assert any(service.startswith("penstock.v1.") for service in client.services())
    client.close()


@pytest.mark.process
def test_the_predictor_serves_what_comes_with_the_demo_model(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    import httpx

    port = option(SERVICES["predictor"], "--metrics-port")

    def in_force() -> bool:
        try:
            shown = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
        except httpx.TransportError:
            return False
        return re.search(r'^penstock_predictor_artefact{model="demo-large",.*} 1.0$', shown, re.MULTILINE) is not None

    eventually(in_force, 60.0, "the artefact is in force")


@pytest.mark.process
def test_the_service_of_an_exported_plan_sets_the_cascade_up(
    store_url: str, identities: Path, processes: dict[str, subprocess.Popen[bytes]]
) -> None:
    service = yaml.safe_load(compose_override(PLAN, ("exact", "confidence")))["services"]["cascade-set"]
    environment = {**os.environ, "PENSTOCK_STORE": store_url, "PENSTOCK_IDENTITY": str(identities)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run((*PENSTOCK, *arguments), env=environment, capture_output=True, text=True, timeout=60)

    eventually(lambda: run(*service["command"]).returncode == 0, 60.0, "the cascade is set up")

    def shown() -> list[dict[str, Any]]:
        cascades: list[dict[str, Any]] = json.loads(run("cascade", "--json").stdout)
        return cascades

    eventually(lambda: bool(shown()), 10.0, "the cascade router knows it")
    (cascade,) = shown()
    assert cascade["name"] == PLAN.name
    assert cascade["tiers"] == [tier.model for tier in PLAN.tiers]
    assert cascade["thresholds"] == list(PLAN.thresholds)
    assert cascade["judges"] == ["exact", "confidence"]
