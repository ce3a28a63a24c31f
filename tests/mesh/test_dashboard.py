"""The dashboard asks for nothing that the mesh does not export."""

import re
import runpy
import urllib.request

from openai import OpenAI

from tests.deploy.compose_file import DEPLOY
from tests.mesh.running_mesh import RunningMesh

BUILD = DEPLOY / "grafana" / "build_dashboard.py"


def exported_metrics(mesh: RunningMesh) -> set[str]:
    names: set[str] = set()
    for role in mesh.status()["roles"]:
        with urllib.request.urlopen(f"http://{role['metrics_address']}/metrics", timeout=10) as page:
            names |= set(re.findall(r"^(penstock_\w+)", page.read().decode(), re.MULTILINE))
    return names


def test_the_committed_dashboard_is_the_generated_one() -> None:
    rendered = runpy.run_path(str(BUILD))["rendered"]()
    assert rendered == (DEPLOY / "grafana" / "dashboards" / "penstock.json").read_text()


def test_every_queried_metric_is_exported(mesh: RunningMesh) -> None:
    client = OpenAI(base_url=f"{mesh.url}/v1", api_key="none")
    client.completions.create(model="demo-large", prompt="one two three", max_tokens=4)
    queried = set(re.findall(r"penstock_\w+", (DEPLOY / "grafana" / "dashboards" / "penstock.json").read_text()))
    missing = queried - exported_metrics(mesh)
    # A labelled counter shows up with its first increment, which in a healthy mesh never comes; the spread of decoding
    # load with the rescheduler, which is off.
    spread = {"penstock_rescheduler_variance", "penstock_rescheduler_mean_tokens"}
    assert missing <= {"penstock_scheduler_refusals_total", *spread}
