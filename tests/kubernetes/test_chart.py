"""The chart, as a real API server takes it."""

from pathlib import Path

import pytest
import yaml

from tests.deploy.test_helm_chart import CHART, OF_OTHERS, render
from tests.in_time import eventually
from tests.kubernetes.api_server import ApiServer, Manifest, Refused
from tests.kubernetes.cluster import VERSION

DEFINITION: Manifest = yaml.safe_load((CHART / "crds" / "penstockmodels.yaml").read_text())
SERVED_S = 30.0
"""Until a new kind is served."""
BY_OPERATOR = ("--set", "operator.replicas=2")


def _is_taken(api: ApiServer, manifest: Manifest) -> bool:
    try:
        api.apply(manifest, "default", dry_run=True)
    except Refused as refused:
        if refused.code == 404:
            return False
        raise
    return True


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("default", ()),
        ("plan and everything else", ()),
        ("default", BY_OPERATOR),
        ("plan and everything else", BY_OPERATOR),
    ],
)
def test_nothing_of_the_chart_is_refused(api: ApiServer, tmp_path: Path, what: str, options: tuple[str, ...]) -> None:
    api.apply(DEFINITION, "default")
    manifests = render(tmp_path, what, "--kube-version", VERSION, *options)
    own = [each for each in manifests if not each["apiVersion"].startswith(OF_OTHERS)]
    assert {"Deployment", "Service", "NetworkPolicy", "PodDisruptionBudget"} < {each["kind"] for each in own}
    for each in own:
        eventually(lambda each=each: _is_taken(api, each), SERVED_S, f"{each['apiVersion']} {each['kind']} is served")


@pytest.mark.parametrize(
    "spec", [{"replicas": -1}, {"template": {"spec": {"containers": []}}}, {"model": ""}, {"template": {}}]
)
def test_models_that_can_never_run_are_refused(api: ApiServer, tmp_path: Path, spec: Manifest) -> None:
    api.apply(DEFINITION, "default")
    (model,) = (
        each
        for each in render(tmp_path, "default", *BY_OPERATOR)
        if each["kind"] == DEFINITION["spec"]["names"]["kind"]
    )
    eventually(lambda: _is_taken(api, model), SERVED_S, "models are served")
    with pytest.raises(Refused, match=f"spec.{next(iter(spec))}"):
        api.apply({**model, "spec": {**model["spec"], **spec}}, "default", dry_run=True)
