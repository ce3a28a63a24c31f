"""The chart as helm renders it, held to Kubernetes' schemas, the Compose file and what `penstock` understands."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource

from services.cli.cascade import set_cascade
from services.cli.planning.export import helm_values
from services.cli.serve import ROLES, _role_command
from tests.deploy.compose_file import DEPLOY, load_compose, option, penstock_services
from tests.deploy.planned_cascade import PLAN

pytestmark = pytest.mark.process  # helm itself

CHART = DEPLOY / "helm" / "penstock"
KUBERNETES = "v1.33.0-local-strict"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
COMPOSED = penstock_services(load_compose())

EVERYTHING = {
    "modelsClaim": "models",
    "predictorsClaim": "predictors",
    "frontend": {"replicas": 2, "apiKeysSecret": "keys", "serviceType": "LoadBalancer", "args": ["--max-choices=4"]},
    "cascade": {"judges": ["exact", "confidence"], "env": [{"name": "A", "value": "b"}]},
    "worker": {
        "resources": {"limits": {"memory": "8Gi"}},
        "args": ["--hang-s=9"],
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    },
    "imagePullSecrets": [{"name": "registry"}],
}

Manifest = dict[str, Any]


def helm() -> str:
    """The program; `make test-services` brings it."""
    found = shutil.which("helm") or shutil.which("helm", path=str(Path(sys.prefix) / "bin"))
    if found is None:
        pytest.skip("helm is not there; `make test-services` fetches it")
    return found


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm(), *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(params=["default", "plan", "plan and everything else"])
def manifests(request: pytest.FixtureRequest, tmp_path: Path) -> list[Manifest]:
    """What a cluster would be given."""
    return render(tmp_path, request.param)


def render(folder: Path, what: str) -> list[Manifest]:
    files = {"own.yaml": yaml.safe_dump(EVERYTHING)} if "everything" in what else {}
    files |= {"plan.yaml": helm_values(PLAN)} if "plan" in what else {}
    arguments = []
    for name, content in files.items():
        (folder / name).write_text(content)
        arguments += ["-f", str(folder / name)]
    rendered = run_helm("template", "mesh", str(CHART), *arguments)
    assert rendered.returncode == 0, rendered.stderr
    return [manifest for manifest in yaml.safe_load_all(rendered.stdout) if manifest]


def of_kind(manifests: list[Manifest], *kinds: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] in kinds}


def container(manifest: Manifest) -> Manifest:
    (only,) = manifest["spec"]["template"]["spec"]["containers"]
    return dict(only)


def processes(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Those that serve a role."""
    return of_kind(manifests, "Deployment", "StatefulSet")


def flag(arguments: list[str], name: str) -> str:
    (value,) = (argument.removeprefix(f"{name}=") for argument in arguments if argument.startswith(f"{name}="))
    return value


# -- without helm


def test_values_follow_their_schema_and_exported_plans_do() -> None:
    validator = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
    validator.validate(VALUES)
    validator.validate({**VALUES, **yaml.safe_load(helm_values(PLAN))})
    assert not validator.is_valid({**VALUES, "wokers": []})
    assert not validator.is_valid({**VALUES, "cascade": {"threshold": [1.0]}})


def test_an_exported_plan_sets_only_what_the_chart_has() -> None:
    exported = yaml.safe_load(helm_values(PLAN))
    assert set(exported) <= set(VALUES)
    assert set(exported["cascade"]) <= set(VALUES["cascade"])


def test_every_value_that_a_template_reads_is_there() -> None:
    for template in (CHART / "templates").iterdir():
        for path in re.findall(r"\.Values\.([\w.]+)", template.read_text()):
            value: Any = VALUES
            for name in path.split("."):
                assert name in value, f"{template.name}: .Values.{path}"
                value = value[name]


# -- with helm


def test_helm_finds_nothing_wrong() -> None:
    linted = run_helm("lint", "--strict", str(CHART))
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_what_is_rendered_follows_kubernetes_schemas(manifests: list[Manifest]) -> None:
    wheels = sorted((Path(sys.prefix) / "share" / "kubernetes-schemas").glob("kubernetes_validate-*.whl"))
    if not wheels:
        pytest.skip("the Kubernetes schemas are not there; `make test-services` fetches them")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        folder = f"kubernetes_validate/kubernetes-json-schema/{KUBERNETES}"
        definitions: Resource[Any] = Resource.from_contents(json.loads(wheel.read(f"{folder}/_definitions.json")))
        registry: Registry[Any] = definitions @ Registry()
        for manifest in manifests:
            group = manifest["apiVersion"].replace("/", "-")
            schema = json.loads(wheel.read(f"{folder}/{manifest['kind'].lower()}-{group}.json"))
            jsonschema.Draft202012Validator(schema, registry=registry).validate(manifest)


def test_every_role_runs_on_the_ports_of_the_compose_file(manifests: list[Manifest]) -> None:
    ports = {
        service["command"][1]: (option(service, "--port"), option(service, "--metrics-port"))
        for name, service in COMPOSED.items()
        if name == "worker-0" or (service["command"][1] != "worker" and "profiles" not in service)
    }
    assert set(ports) == set(ROLES)
    rendered: dict[str, tuple[str, str]] = {}
    for manifest in processes(manifests).values():
        each = container(manifest)
        role, arguments = each["args"][1], each["args"]
        rendered[role] = (flag(arguments, "--port"), flag(arguments, "--metrics-port"))
        listed = {port["name"]: str(port["containerPort"]) for port in each["ports"]}
        assert (listed["grpc"], listed["metrics"]) == rendered[role]
        assert {str(each[probe]["grpc"]["port"]) for probe in ("startupProbe", "readinessProbe")} == {listed["grpc"]}
        annotations = manifest["spec"]["template"]["metadata"]["annotations"]
        assert annotations["prometheus.io/port"] == listed["metrics"]
    assert rendered == ports


def test_every_command_is_one_that_penstock_understands(manifests: list[Manifest]) -> None:
    """Options, their values and all."""
    for manifest in processes(manifests).values():
        serve, role, *options = container(manifest)["args"]
        assert serve == "serve"
        _role_command(role).make_context(role, options).close()
    for manifest in of_kind(manifests, "Job").values():
        cascade, verb, *options = container(manifest)["args"]
        assert (cascade, verb) == ("cascade", "set")
        assert set_cascade.make_context("set", options).params["thresholds"] == PLAN.thresholds


def test_selectors_find_their_own_pods_and_no_others(manifests: list[Manifest]) -> None:
    pods = {name: each["spec"]["template"]["metadata"]["labels"] for name, each in processes(manifests).items()}

    def found(selector: dict[str, str]) -> set[str]:
        return {name for name, labels in pods.items() if selector.items() <= labels.items()}

    for name, manifest in processes(manifests).items():
        assert found(manifest["spec"]["selector"]["matchLabels"]) == {name}
    services = of_kind(manifests, "Service")
    assert found(services["mesh-frontend"]["spec"]["selector"]) == {"mesh-frontend"}
    assert found(services["mesh-workers"]["spec"]["selector"]) == set(of_kind(manifests, "StatefulSet"))


def test_an_exported_plan_runs_its_replicas_on_their_gpus_and_sets_its_thresholds(tmp_path: Path) -> None:
    manifests = render(tmp_path, "plan and everything else")
    workers = of_kind(manifests, "StatefulSet")
    assert {
        name: (each["spec"]["replicas"], container(each)["resources"]["limits"]) for name, each in workers.items()
    } == {
        "mesh-worker-tier0-tp1-pp1-small": (2, {"nvidia.com/gpu": 1, "memory": "8Gi"}),
        "mesh-worker-tier0-tp2-pp1-small": (1, {"nvidia.com/gpu": 2, "memory": "8Gi"}),
        "mesh-worker-tier1-tp4-pp3-org-large-3": (1, {"nvidia.com/gpu": 12, "memory": "8Gi"}),
    }
    pods = {each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in processes(manifests).values()}
    assert {name for name, pod in pods.items() if "nodeSelector" in pod and "tolerations" in pod} == set(workers)
    assert all(pod["imagePullSecrets"] == [{"name": "registry"}] for pod in pods.values())
    large = container(workers["mesh-worker-tier1-tp4-pp3-org-large-3"])
    assert large["image"] == VALUES["images"]["workerGpu"]
    assert flag(large["args"], "--model") == "Org/Large.3"
    options = [argument for argument in large["args"] if argument.startswith("--engine-arg")]
    assert options == ["--engine-arg=tensor_parallel_size=4", "--engine-arg=pipeline_parallel_size=3"]
    (job,) = of_kind(manifests, "Job").values()
    assert container(job)["args"] == [
        *("cascade", "set", "--without-judge=escalate", "--tier=Small", "--tier=Org/Large.3", "--threshold=70.25"),
        *("--judge=exact", "--judge=confidence", "--", "both"),
    ]


def test_without_gpus_and_a_cascade_there_are_cpu_workers_and_no_job(tmp_path: Path) -> None:
    manifests = render(tmp_path, "default")
    (worker,) = of_kind(manifests, "StatefulSet").values()
    assert container(worker)["image"] == VALUES["images"]["workerCpu"]
    assert "resources" not in container(worker)
    assert not of_kind(manifests, "Job")


def test_what_the_chart_does_not_know_is_refused(tmp_path: Path) -> None:
    mistyped = run_helm("template", "mesh", str(CHART), "--set", "wrokers=3")
    assert mistyped.returncode != 0
    assert "wrokers" in mistyped.stderr
    too_long = run_helm("template", "a-release-with-a-name-that-is-rather-too-long", str(CHART))
    assert too_long.returncode != 0
    assert "shorten the release's name" in too_long.stderr
