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

from controlplane.deployment.replicas import id_part
from mesh.identity.identity import ROLES as IDENTITIES
from mesh.identity.identity import the_identity
from mesh.telemetry import READY
from services.cli.cascade import set_cascade
from services.cli.planning.export import helm_values
from services.cli.serve import ROLES, _role_command, parse_settings
from services.frontend.gateway.role import READINESS
from services.operator.model_resource import GROUP, PLURAL, VERSION, ModelResource
from tests.deploy.compose_file import DEPLOY, load_compose, option, penstock_services
from tests.deploy.planned_cascade import PLAN

pytestmark = pytest.mark.process  # helm itself

CHART = DEPLOY / "helm" / "penstock"
KUBERNETES = "v1.33.0-local-strict"
OF_OTHERS = ("cert-manager.io", "monitoring.coreos.com", "gateway.networking.k8s.io", "inference.networking.k8s.io")
"""Whose resources are none of Kubernetes' own."""
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
COMPOSED = penstock_services(load_compose())

EVERYTHING = {
    "store": "etcds://etcd:2379",
    "identity": {"source": "certManager", "trustDomain": "prod"},
    "modelsClaim": "models",
    "predictorsClaim": "predictors",
    "frontend": {
        "replicas": 2,
        "apiKeysSecret": "keys",
        "serviceType": "LoadBalancer",
        "args": ["--max-choices=4"],
        "route": {"gateway": "public", "namespace": "edge", "hostnames": ["llm.example.com"]},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
    },
    "scheduler": {
        "priorityClassName": "high",
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    },
    "monitoring": {"podMonitor": True, "prometheusRule": True, "dashboard": True, "labels": {"release": "prometheus"}},
    "cascade": {"judges": ["exact", "confidence"], "env": [{"name": "A", "value": "b"}]},
    "worker": {
        "resources": {"limits": {"memory": "8Gi"}},
        "args": ["--hang-s=9"],
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    },
    "imagePullSecrets": [{"name": "registry"}],
    "gateway": {
        "replicas": 2,
        "args": ["--max-streams=64"],
        "pool": {"matchLabels": {"app": "vllm"}, "port": 8000, "route": {"gateway": "public"}},
    },
    "attached": [
        {"name": "gpu-1", "url": "http://10.0.0.5:8000"},
        {
            "name": "gpu-2",
            "url": "http://10.0.0.6:8000",
            "model": "chat",
            "modelPath": "/models/chat",
            "engineArgs": ["kv_events=tcp://10.0.0.6:5557"],
            "env": [{"name": "PENSTOCK_ATTACH_API_KEY", "value": "k"}],
        },
    ],
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


def render(folder: Path, what: str, *options: str) -> list[Manifest]:
    """`options`: of `helm template`."""
    files = {"own.yaml": yaml.safe_dump(EVERYTHING)} if "everything" in what else {}
    files |= {"plan.yaml": helm_values(PLAN)} if "plan" in what else {}
    arguments = []
    for name, content in files.items():
        (folder / name).write_text(content)
        arguments += ["-f", str(folder / name)]
    rendered = run_helm("template", "mesh", str(CHART), *arguments, *options)
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
            if manifest["apiVersion"].partition("/")[0] in OF_OTHERS:
                continue
            group = manifest["apiVersion"].replace(".k8s.io", "").replace("/", "-")
            schema = json.loads(wheel.read(f"{folder}/{manifest['kind'].lower()}-{group}.json"))
            jsonschema.Draft202012Validator(schema, registry=registry).validate(manifest)


def test_every_role_runs_on_the_ports_of_the_compose_file(manifests: list[Manifest]) -> None:
    ports = {
        service["command"][1]: (option(service, "--port"), option(service, "--metrics-port"))
        for name, service in COMPOSED.items()
        if name in ("worker-0", "gateway") or (service["command"][1] != "worker" and "profiles" not in service)
    }
    assert set(ports) == set(ROLES) - {"operator"}
    if "mesh-gateway" not in processes(manifests):  # which is for those who have an Envoy
        del ports["gateway"]
    rendered: dict[str, tuple[str, str]] = {}
    for manifest in processes(manifests).values():
        each = container(manifest)
        role, arguments = each["args"][1], each["args"]
        rendered[role] = (flag(arguments, "--port"), flag(arguments, "--metrics-port"))
        listed = {port["name"]: str(port["containerPort"]) for port in each["ports"]}
        assert (listed["grpc"], listed["metrics"]) == rendered[role]
        looks = [each[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe")]
        assert all(look["path"].startswith(READY) and look["port"] == "metrics" for look in looks)
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
    workers = {
        name: each for name, each in of_kind(manifests, "StatefulSet").items() if name.startswith("mesh-worker-")
    }
    assert {
        name: (each["spec"]["replicas"], container(each)["resources"]["limits"]) for name, each in workers.items()
    } == {
        "mesh-worker-tier0-tp1-pp1-small": (2, {"nvidia.com/gpu": "1", "memory": "8Gi"}),
        "mesh-worker-tier0-tp2-pp1-small": (1, {"nvidia.com/gpu": "2", "memory": "8Gi"}),
        "mesh-worker-tier1-tp4-pp3-org-large-3": (1, {"nvidia.com/gpu": "12", "memory": "8Gi"}),
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


def test_an_envoy_finds_a_picker_that_has_endpoints_and_servers_have_their_workers(tmp_path: Path) -> None:
    manifests = render(tmp_path, "everything else")
    gateway = of_kind(manifests, "Deployment")["mesh-gateway"]
    assert gateway["spec"]["replicas"] == 2
    assert container(gateway)["readinessProbe"]["httpGet"]["path"] == f"{READY}/{READINESS}"
    assert "--max-streams=64" in container(gateway)["args"]
    service = of_kind(manifests, "Service")["mesh-gateway"]["spec"]
    (port,) = service["ports"]
    assert (port["port"], port["targetPort"]) == (9002, "grpc")
    assert service["selector"] == gateway["spec"]["selector"]["matchLabels"]
    first, second = (
        parse_settings(
            "worker", ("--store=etcd://e:1", *container(of_kind(manifests, "StatefulSet")[name])["args"][2:])
        )[1]
        for name in ("mesh-attached-gpu-1", "mesh-attached-gpu-2")
    )
    assert (first.engine, first.model, first.engine_arg) == ("attached", "", ("url=http://10.0.0.5:8000",))
    assert (second.model, second.model_path) == ("chat", "/models/chat")
    assert second.engine_arg == ("url=http://10.0.0.6:8000", "kv_events=tcp://10.0.0.6:5557")
    second_env = container(of_kind(manifests, "StatefulSet")["mesh-attached-gpu-2"])["env"]
    assert {"name": "PENSTOCK_ATTACH_API_KEY", "value": "k"} in second_env


def test_with_identities_each_pod_has_its_roles_own(tmp_path: Path) -> None:
    manifests = render(tmp_path, "plan and everything else")
    issued = {}
    for certificate in of_kind(manifests, "Certificate").values():
        spec = certificate["spec"]
        if spec.get("isCA"):
            continue
        identity = the_identity(spec["uris"])
        assert identity is not None
        assert identity.trust_domain == "prod"
        assert {*identity.dns_names} == {*spec["dnsNames"]}
        assert spec["commonName"] == identity.role
        assert {"server auth", "client auth"} < {*spec["usages"]}
        assert spec["issuerRef"]["name"] in of_kind(manifests, "Issuer")
        issued[identity.role] = spec["secretName"]
    assert {*issued} == {*IDENTITIES} - {"store"}
    for manifest in (*processes(manifests).values(), *of_kind(manifests, "Job").values()):
        pod, each = manifest["spec"]["template"]["spec"], container(manifest)
        role = each["args"][1] if each["args"][0] == "serve" else "operator"
        (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "identity")
        assert volume["secret"] == {"secretName": issued[role], "defaultMode": 0o440}
        assert pod["securityContext"]["fsGroup"] == 10001, "or else 0440 lets nobody read"
        assert {"name": "PENSTOCK_IDENTITY", "value": "/identity"} in each["env"]
        assert "--insecure" not in each["args"]
    of_others = yaml.safe_dump({**EVERYTHING, "identity": {"source": "secret"}})
    (tmp_path / "secret.yaml").write_text(of_others)
    rendered = run_helm("template", "mesh", str(CHART), "-f", str(tmp_path / "secret.yaml")).stdout
    assert "cert-manager.io" not in rendered
    assert rendered.count("mesh-identity-") >= len(processes(manifests)) - 2


def test_the_network_lets_members_speak_and_others_reach_what_is_meant_for_them(tmp_path: Path) -> None:
    manifests = render(tmp_path, "everything else")
    policies = of_kind(manifests, "NetworkPolicy")
    members = policies["mesh-members"]["spec"]
    for manifest in processes(manifests).values():
        labels = manifest["spec"]["template"]["metadata"]["labels"]
        assert members["podSelector"]["matchLabels"].items() <= labels.items()
        assert members["ingress"][0]["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()
    open_ports = {
        manifest["metadata"]["name"]: rule["ports"][0]["port"]
        for manifest in policies.values()
        for rule in manifest["spec"]["ingress"]
        if "from" not in rule
    }
    assert open_ports == {"mesh-members": "metrics", "mesh-clients": "http", "mesh-gateway": "grpc"}
    closed = run_helm("template", "mesh", str(CHART), "--set", "networkPolicy=false").stdout
    assert "NetworkPolicy" not in closed


def test_nodes_can_be_drained_one_pod_of_a_part_at_a_time(tmp_path: Path) -> None:
    manifests = render(tmp_path, "plan and everything else")
    budgets = of_kind(manifests, "PodDisruptionBudget")
    several = {name for name, each in processes(manifests).items() if each["spec"]["replicas"] > 1}
    assert {*budgets} == several, "a budget for one pod would keep its node from being drained"
    for name, budget in budgets.items():
        assert budget["spec"]["selector"] == processes(manifests)[name]["spec"]["selector"]
        assert budget["spec"]["maxUnavailable"] == 1
    without = run_helm("template", "mesh", str(CHART), "--set", "podDisruptionBudgets=false").stdout
    assert "PodDisruptionBudget" not in without
    former = of_kind(render(tmp_path, "plan and everything else", "--kube-version", "1.20"), "PodDisruptionBudget")
    assert {each["apiVersion"] for each in former.values()} == {"policy/v1beta1"}, "1.21 is the first with policy/v1"


def test_pods_go_where_they_are_told(tmp_path: Path) -> None:
    pods = {
        name: each["spec"]["template"]["spec"] for name, each in processes(render(tmp_path, "everything else")).items()
    }
    (spread,) = pods["mesh-frontend"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "frontend"
    assert spread["maxSkew"] == 1
    assert pods["mesh-scheduler"]["priorityClassName"] == "high"
    assert "nodeAffinity" in pods["mesh-scheduler"]["affinity"]
    assert "priorityClassName" not in pods["mesh-frontend"]


def test_prometheus_and_grafana_get_what_the_compose_file_gives_them(tmp_path: Path) -> None:
    manifests = render(tmp_path, "everything else")
    (monitor,) = of_kind(manifests, "PodMonitor").values()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["honorLabels"]) == ("metrics", True)
    for manifest in processes(manifests).values():
        labels = manifest["spec"]["template"]["metadata"]["labels"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (rule,) = of_kind(manifests, "PrometheusRule").values()
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (board,) = of_kind(manifests, "ConfigMap").values()
    assert json.loads(board["data"]["penstock.json"]) == json.loads(
        (DEPLOY / "grafana" / "dashboards" / "penstock.json").read_text()
    )
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_a_gateway_leads_to_the_frontends_and_to_a_pool_that_asks_the_picker(tmp_path: Path) -> None:
    manifests = render(tmp_path, "everything else")
    routes = {name: each["spec"] for name, each in of_kind(manifests, "HTTPRoute").items()}
    (to_frontends,) = routes["mesh-frontend"]["rules"]
    (backend,) = to_frontends["backendRefs"]
    (port,) = of_kind(manifests, "Service")[backend["name"]]["spec"]["ports"]
    assert backend["port"] == port["port"]
    assert routes["mesh-frontend"]["parentRefs"] == [{"name": "public", "namespace": "edge"}]
    (pool,) = of_kind(manifests, "InferencePool").values()
    picker = pool["spec"]["endpointPickerRef"]
    assert picker["port"]["number"] == of_kind(manifests, "Service")[picker["name"]]["spec"]["ports"][0]["port"]
    (to_pool,) = routes["mesh-pool"]["rules"]
    assert to_pool["backendRefs"][0]["name"] == pool["metadata"]["name"]
    without = run_helm("template", "mesh", str(CHART), "--set", "gateway.pool.matchLabels.app=vllm")
    assert "set gateway.replicas" in without.stderr


def test_an_operator_runs_workers_in_the_place_of_stateful_sets(tmp_path: Path) -> None:
    stateful = of_kind(render(tmp_path, "plan and everything else"), "StatefulSet")
    (tmp_path / "operator.yaml").write_text("operator: {replicas: 2, args: [--max-pods=9]}")
    files = [part for name in ("own", "plan", "operator") for part in ("-f", str(tmp_path / f"{name}.yaml"))]
    rendered = run_helm("template", "mesh", str(CHART), "--include-crds", *files)
    assert rendered.returncode == 0, rendered.stderr
    manifests = [manifest for manifest in yaml.safe_load_all(rendered.stdout) if manifest]
    models, (definition,) = of_kind(manifests, "PenstockModel"), of_kind(manifests, "CustomResourceDefinition").values()
    assert not [name for name in of_kind(manifests, "StatefulSet") if name.startswith("mesh-worker-")]
    (version,) = definition["spec"]["versions"]
    assert definition["metadata"]["name"] == f"{PLURAL}.{GROUP}"
    assert version["name"] == VERSION
    schema = version["schema"]["openAPIV3Schema"]
    for name, manifest in models.items():
        jsonschema.Draft7Validator(schema).validate(manifest)
        metadata = {**manifest["metadata"], "uid": "u", "resourceVersion": "1"}
        model = ModelResource.read({**manifest, "metadata": metadata})
        assert not model.problem
        assert model.replicas == stateful[name]["spec"]["replicas"]
        assert model.template == stateful[name]["spec"]["template"]
        instance = f"{id_part(model.model)}-0"
        pod = model.pod(instance, model.shape)
        _, role, *options = container({"spec": {"template": pod}})["args"]
        assert parse_settings(role, ("--store=etcd://e:1", *options))[0].member_id == instance
    operator = of_kind(manifests, "Deployment")["mesh-operator"]
    assert operator["spec"]["replicas"] == 2
    pod_spec = operator["spec"]["template"]["spec"]
    assert pod_spec["serviceAccountName"] == "mesh-operator"
    assert pod_spec["automountServiceAccountToken"]
    assert parse_settings("operator", ("--store=etcd://e:1", *container(operator)["args"][2:]))[1].max_pods == 9
    others = [each for name, each in of_kind(manifests, "Deployment").items() if name != "mesh-operator"]
    assert not any(each["spec"]["template"]["spec"]["automountServiceAccountToken"] for each in others)
    (role_rules,) = (each["rules"] for each in of_kind(manifests, "Role").values())
    assert {(name, verb) for rule in role_rules for name in rule["resources"] for verb in rule["verbs"]} == {
        *(("pods", verb) for verb in ("list", "watch", "create", "delete")),
        *((PLURAL, verb) for verb in ("list", "watch", "patch")),
        (f"{PLURAL}/status", "patch"),
        (f"{PLURAL}/finalizers", "update"),
    }


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
