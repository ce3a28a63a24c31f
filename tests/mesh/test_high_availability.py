"""Two of every control role on real processes: any one of them may die under load, and no request fails."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.in_time import eventually, within
from tests.mesh.running_mesh import RunningMesh

SECOND_FRONTEND_TRIES = 5


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    counts = ("--frontends", "2", "--schedulers", "2", "--monitors", "2")
    for attempt in range(SECOND_FRONTEND_TRIES):
        run_dir: Path = tmp_path_factory.mktemp("pair")
        running = RunningMesh(run_dir, "--engine", "simulated", "--model", "demo-small", "--workers", "3", *counts)
        try:
            running.wait_until_serving()
            break
        except AssertionError:  # the port after a free one may be taken
            running.cut()
            if attempt == SECOND_FRONTEND_TRIES - 1 or "cannot listen" not in running.story():
                raise
    yield running
    running.stop()
    running.cut()


def test_each_frontend_has_the_metrics_of_the_whole_mesh(pair: RunningMesh) -> None:
    """First in this file: later tests kill members."""
    urls = [f"http://127.0.0.1:{pair.port + index}" for index in range(2)]
    body = {"model": "demo-small", "prompt": "Count to ten.", "max_tokens": 5, "ignore_eos": True}
    for url in (*urls, *urls):
        answer = httpx.post(f"{url}/v1/completions", json=body, headers={"endpoint-load-metrics-format": "TEXT"})
        assert answer.headers["endpoint-load-metrics"].startswith("TEXT named_metrics.num_requests_waiting=")

    def generated(url: str) -> tuple[float, float, int]:
        """By the engines' counts, by the frontends', and by how many members."""
        tokens, finished, members = 0.0, 0.0, set()
        for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=20).text):
            for sample in family.samples:
                members |= {sample.labels["member_id"]} if family.name.startswith("vllm:") else set()
                tokens += sample.value if sample.name == "vllm:generation_tokens_total" else 0.0
                finished += sample.value if sample.name == "vllm:request_decode_time_seconds_count" else 0.0
        return tokens, finished, len(members)

    for url in urls:
        eventually(lambda url=url: generated(url) == (20.0, 4.0, 5), 60, "two frontends and three instances")


class Load:
    """Short requests, one after another on each of several threads, over both frontends."""

    def __init__(self, mesh: RunningMesh, threads: int = 4) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self.longest_s = 0.0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        urls = [f"http://127.0.0.1:{mesh.port + index % 2}/v1" for index in range(threads)]
        self._threads = [threading.Thread(target=self._run, args=(url,)) for url in urls]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def _run(self, url: str) -> None:
        client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20)
        while not self._stop.is_set():
            began_s = time.monotonic()
            try:
                client.completions.create(model="demo-small", prompt="one two three", max_tokens=8)
            except openai.OpenAIError as error:
                with self._lock:
                    self.failed.append(repr(error))
            with self._lock:
                self.answered += 1
                self.longest_s = max(self.longest_s, time.monotonic() - began_s)


def whole(mesh: RunningMesh) -> bool:
    status = mesh.status()
    schedulers = [
        each.get("synced", False) and each["instances"] == 3 and len(each["peers"]) == 1
        for each in status["schedulers"]
    ]
    asked = [
        scheduler["breaker"] == "closed" and scheduler["connected"]
        for frontend in status["frontends"]
        for scheduler in frontend.get("schedulers", [])
    ]
    return schedulers == [True] * 2 and asked == [True] * 4 and len(status["leaders"]) >= 2


def test_both_frontends_serve_and_share_both_schedulers(pair: RunningMesh) -> None:
    eventually(lambda: whole(pair), 60, "everything is connected")
    found = set()
    with Load(pair) as load:
        eventually(lambda: load.answered > 40, 60, "requests are answered")
    assert load.failed == []
    for index in range(4):
        url = f"http://127.0.0.1:{pair.port + index % 2}/v1"
        raw = OpenAI(base_url=url, api_key="none").completions.with_raw_response.create(
            model="demo-small", prompt="x", max_tokens=2
        )
        explained = pair.cli("explain", raw.headers["x-request-id"], "--json")
        assert explained.returncode == 0, explained.stderr
        found.add(json.loads(explained.stdout)["scheduler"])
    assert found == {"scheduler-0", "scheduler-1"}
    policy = pair.cli("policy", "--json")
    assert json.loads(policy.stdout)["policy"] == "penstock"


@pytest.mark.parametrize("victim", ["scheduler-0", "scheduler-1", "monitor-0", "monitor-1"])
def test_no_request_fails_when_a_control_process_is_killed(pair: RunningMesh, victim: str) -> None:
    eventually(lambda: whole(pair), 60, "everything is connected")
    with Load(pair) as load:
        eventually(lambda: load.answered > 20, 60, "requests are answered")
        pair.kill(victim)
        after = load.answered + 100
        eventually(lambda: load.answered > after, 60, "requests are answered after it")
        eventually(lambda: whole(pair), 60, lambda: f"{victim} is back\n{pair.story()}")
    assert load.failed == []
    within(load.longest_s, 3.0, "the slowest request")


@pytest.mark.parametrize("victim", ["scheduler-0", "scheduler-1", "monitor-0"])
def test_no_request_fails_when_a_control_process_hangs(pair: RunningMesh, victim: str) -> None:
    eventually(lambda: whole(pair), 60, "everything is connected")
    pid = pair.pid(victim)
    with Load(pair) as load:
        eventually(lambda: load.answered > 20, 60, "requests are answered")
        os.kill(pid, signal.SIGSTOP)
        try:
            after = load.answered + 100
            eventually(lambda: load.answered > after, 60, "requests are answered while it hangs")
        finally:
            os.kill(pid, signal.SIGCONT)
        eventually(lambda: whole(pair), 60, lambda: f"{victim} is back\n{pair.story()}")
    assert load.failed == []
    within(load.longest_s, 3.0, "the slowest request")


def test_the_leader_of_the_rescheduler_is_replaced_with_a_higher_epoch(pair: RunningMesh) -> None:
    eventually(lambda: whole(pair), 60, "everything is connected")
    before = pair.status()["leaders"]["rescheduler"]
    pair.kill(before["member_id"])

    def replaced() -> bool:
        leader = pair.status()["leaders"].get("rescheduler")
        return leader is not None and leader["epoch"] > before["epoch"]

    eventually(replaced, 60, "somebody leads again")


def test_pools_have_one_scheduler_and_its_death_fails_nothing(pair: RunningMesh) -> None:
    eventually(lambda: whole(pair), 60, "everything is connected")
    assert pair.cli("policy", "arrow").returncode == 0
    try:
        leader = str(pair.status()["leaders"]["pools"]["member_id"])
        eventually(lambda: placed_by(pair) == ("arrow", leader), 60, "the leader places")
        with Load(pair) as load:
            eventually(lambda: load.answered > 20, 60, "requests are answered")
            pair.kill(leader)
            eventually(lambda: placed_by(pair)[0] == "arrow", 60, "somebody leads the pools again")
            eventually(lambda: whole(pair), 60, lambda: f"{leader} is back\n{pair.story()}")
        assert load.failed == []
    finally:
        assert pair.cli("policy", "penstock").returncode == 0


def placed_by(mesh: RunningMesh) -> tuple[str, str]:
    """Policy and scheduler of a request of now."""
    client = OpenAI(base_url=f"{mesh.url}/v1", api_key="none")
    raw = client.completions.with_raw_response.create(model="demo-small", prompt="x", max_tokens=2)
    explained = mesh.cli("explain", raw.headers["x-request-id"], "--json")
    if explained.returncode:
        return "", ""  # it was placed by the one that was killed, or by nobody
    explanation = json.loads(explained.stdout)
    return explanation["policy"], explanation["scheduler"]
