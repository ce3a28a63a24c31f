"""A real mesh with a cascade over two models, and a plan that changes how many instances each has."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier, encode_plan
from tests.in_time import eventually, still
from tests.mesh.reader import TOKENS, Reader
from tests.mesh.running_mesh import RunningMesh

SMALL, LARGE = "demo-small", "demo-large"


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """One instance of each model."""
    running = RunningMesh(
        tmp_path_factory.mktemp("tiers"), "--engine", "simulated", "--model", f"{SMALL}:1", "--model", f"{LARGE}:1"
    )
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


def set_up(mesh: RunningMesh, threshold: float, *options: str) -> None:
    said = mesh.cli("cascade", "set", "both", "--tier", SMALL, "--tier", LARGE, "--threshold", str(threshold), *options)
    assert said.returncode == 0, said.stderr
    eventually(lambda: thresholds(mesh) == [threshold], 60, "the router follows the cascade")
    eventually(lambda: "both" in [m["id"] for m in get(mesh, "/v1/models")["data"]], 60, "the frontend follows")


def thresholds(mesh: RunningMesh) -> list[float]:
    listed = json.loads(mesh.cli("cascade", "--json").stdout)
    return [threshold for cascade in listed for threshold in cascade["thresholds"]]


def get(mesh: RunningMesh, path: str) -> Any:
    return httpx.get(mesh.url + path, timeout=20).json()


def ask(mesh: RunningMesh, **options: Any) -> Any:
    body = {"model": "both", "messages": [{"role": "user", "content": "Count from 7 up to 12."}], **options}
    return httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=60)


def ready(mesh: RunningMesh) -> list[str]:
    """Instances that take requests now."""
    return sorted(name for name, state in mesh.instances().items() if state == "ready")


def is_as_planned(mesh: RunningMesh) -> bool:
    (shown,) = json.loads(mesh.cli("plan", "show", "--json").stdout)
    (deployment,) = shown["deployments"]
    return bool(deployment["is_reached"])


def apply(mesh: RunningMesh, folder: Path, small: int, large: int, threshold: float = 50.0) -> None:
    plan = CascadePlan(
        name="both",
        tiers=tuple(
            PlannedTier(model, count, (PlannedReplicas(count),), 1.0, 1.0)
            for model, count in ((SMALL, small), (LARGE, large))
        ),
        thresholds=(threshold,),
        quality=80.0,
        latency_p95_s=1.0,
        rate_per_s=1.0,
        gpus=8,
    )
    path = folder / "plan.json"
    path.write_bytes(encode_plan(plan))
    said = mesh.cli("plan", "apply", str(path))
    assert said.returncode == 0, said.stderr


def test_a_cascade_answers_by_the_tier_that_its_judge_accepts(tiers: RunningMesh) -> None:
    set_up(tiers, 50.0, "--judge", "exact", "--judge", "confidence")  # simulated answers are never right
    escalated = ask(tiers)
    assert escalated.headers["x-penstock-tier"] == LARGE
    told = escalated.json()["penstock"]
    assert [tier["model"] for tier in told["tiers"]] == [SMALL, LARGE]
    assert told["tiers"][0]["judge"] == "exact"
    set_up(tiers, 101.0, "--judge", "exact")
    assert [tier["model"] for tier in ask(tiers).json()["penstock"]["tiers"]] == [LARGE], "no answer would do"
    set_up(tiers, 0.0, "--judge", "exact")
    unjudged = ask(tiers)
    assert unjudged.headers["x-penstock-tier"] == SMALL
    assert unjudged.headers["x-penstock-accepted-because"] == "accepts_all"
    assert ask(tiers, penstock={"quality": 100}).headers["x-penstock-tier"] == LARGE


def test_the_next_tier_is_begun_ahead_of_an_answer_that_will_be_escalated(tiers: RunningMesh) -> None:
    set_up(tiers, 50.0, "--judge", "exact", "--speculate", "0.9")
    with ThreadPoolExecutor(8) as clients:  # all of them escalated: so many answers are wanted before odds are believed
        learnt = list(clients.map(lambda _: ask(tiers, max_tokens=4), range(24)))
    assert {answer.headers["x-penstock-tier"] for answer in learnt} == {LARGE}
    told = ask(tiers, max_tokens=4).json()
    small, large = told["penstock"]["tiers"]
    assert (small["model"], large["model"], large.get("begun_ahead")) == (SMALL, LARGE, True)
    assert told["choices"] == learnt[0].json()["choices"], "no decision differs by it"
    assert 'cascade="both"' in (began := speculations(tiers)), began


def speculations(mesh: RunningMesh) -> str:
    """Lines of the frontend's metric with outcome `used`, and a count above 0."""
    lines = httpx.get(f"{mesh.url}/metrics", timeout=20).text.splitlines()
    name = "penstock_frontend_cascade_speculations_total"
    return "\n".join(line for line in lines if line.startswith(name) and '"used"' in line and float(line.split()[-1]))


def test_with_the_router_gone_the_cascade_still_answers_and_says_so(tiers: RunningMesh) -> None:
    set_up(tiers, 50.0, "--judge", "exact")
    tiers.kill("cascade")
    told = ask(tiers).json()["penstock"]
    assert told["tier"] == LARGE
    assert told["tiers"][0]["judge"].startswith(("none: ", "exact")), (
        "exact: the supervisor already had the router back"
    )
    eventually(lambda: ask(tiers).json()["penstock"]["tiers"][0]["judge"] == "exact", 60, "the router is back")


def test_a_plan_starts_and_drains_instances_without_cutting_a_stream(tiers: RunningMesh, tmp_path: Path) -> None:
    set_up(tiers, 0.0, "--judge", "exact")
    apply(tiers, tmp_path, small=1, large=3, threshold=40.0)
    eventually(lambda: thresholds(tiers) == [40.0], 60, "the plan's threshold is in force")
    wanted = [f"{LARGE}-0", f"{LARGE}-1", f"{LARGE}-2", f"{SMALL}-0"]
    eventually(lambda: ready(tiers) == wanted, 60, "the planned instances run")
    readers = [Reader(tiers, f"stream {number} " * 20) for number in range(12)]
    assert len({reader.instance for reader in readers}) > 1
    apply(tiers, tmp_path, small=2, large=1)
    texts = [reader.whole_text() for reader in readers]
    assert all(texts)
    eventually(lambda: ready(tiers) == [f"{LARGE}-0", f"{SMALL}-0", f"{SMALL}-1"], 60, "the others were drained")
    eventually(lambda: is_as_planned(tiers), 60, "the supervisor says so")
    assert "instances of penstock up default: as planned" in tiers.cli("plan", "show").stdout
    assert "instances of penstock up default: as planned" in tiers.cli("status").stdout
    alone = [reader.whole_text() for reader in [Reader(tiers, f"stream {number} " * 20) for number in range(12)]]
    assert texts == alone, "the text is that of undisturbed streams"


def test_an_instance_that_dies_while_a_cascades_answer_streams_costs_no_token(
    tiers: RunningMesh, tmp_path: Path
) -> None:
    set_up(tiers, 0.0, "--judge", "exact")
    apply(tiers, tmp_path, small=2, large=1, threshold=0.0)
    eventually(lambda: ready(tiers) == [f"{LARGE}-0", f"{SMALL}-0", f"{SMALL}-1"], 60, "the planned instances run")
    pids = {instance: tiers.pid(instance) for instance in (f"{SMALL}-0", f"{SMALL}-1")}
    prompt = "a long story " * 20
    reader = Reader(tiers, prompt, model="both")
    eventually(lambda: reader.text, 60, "the answer streams")
    os.kill(pids[reader.instance], signal.SIGKILL)
    still(reader.reads, "the answer streams when its instance is killed")
    text = reader.whole_text()
    body = {"model": "both", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    whole = httpx.post(f"{tiers.url}/v1/completions", json=body, timeout=60).json()
    assert whole["penstock"]["because"] == "accepts_all"
    assert text == whole["choices"][0]["text"], "of an answer that was neither streamed nor disturbed"


def test_a_plan_for_other_tiers_is_refused_and_the_old_one_stays(tiers: RunningMesh, tmp_path: Path) -> None:
    plan = CascadePlan("both", (PlannedTier("other", 1, (PlannedReplicas(1),), 1.0, 1.0),), (), 1.0, 1.0, 1.0, 1)
    path = tmp_path / "plan.json"
    path.write_bytes(encode_plan(plan))
    eventually(lambda: is_as_planned(tiers), 60, "whatever was killed before is back")
    before = tiers.cli("plan", "show", "--json").stdout
    refused = tiers.cli("plan", "apply", str(path))
    assert refused.returncode == 1
    assert "the cascade has demo-small, demo-large" in refused.stderr
    assert tiers.cli("plan", "show", "--json").stdout == before
