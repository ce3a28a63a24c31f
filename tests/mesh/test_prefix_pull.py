"""A real mesh whose instances pull each other's cached prefixes."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.in_time import eventually, still
from tests.mesh.reader import Reader
from tests.mesh.running_mesh import RunningMesh

pytest.importorskip("ucxx", reason="KV transfers need UCX")

TOKENS = 40
SIBLINGS = 5


@pytest.fixture
def mesh_in_turn(tmp_path: Path) -> Iterator[RunningMesh]:
    """Three simulated instances that get requests in turn, whatever they have cached."""
    running = RunningMesh(tmp_path, "--engine", "simulated", "--workers", "3")
    try:
        running.wait_until_serving()
        assert running.cli("policy", "round_robin").returncode == 0
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


def prefix(story: int, chapters: int = 400) -> str:
    """Some eleven tokens of the simulated engine's for each chapter; no other story begins with them."""
    return f"Story {story}. " + " ".join(f"chapter {number} of {story}" for number in range(chapters))


def read(mesh: RunningMesh, prompt: str) -> Reader:
    return Reader(mesh, prompt, TOKENS)


def explain(mesh: RunningMesh, reader: Reader) -> dict[str, Any]:
    answer = mesh.cli("explain", reader.request_id, "--json")
    assert answer.returncode == 0, answer.stderr
    explanation: dict[str, Any] = json.loads(answer.stdout)
    return explanation


def cached_blocks(mesh: RunningMesh, instance: str) -> int:
    blocks = {each["instance_id"]: int(each.get("cached_blocks", 0)) for each in mesh.status()["instances"]}
    return blocks.get(instance, 0)


def prefilling(mesh: RunningMesh) -> int:
    """Prompt tokens yet to be computed, as the instances report it after each step."""
    return sum(int(each["load"]["queued_prefill_tokens"]) for each in mesh.status()["instances"])


def placed(mesh: RunningMesh) -> int:
    """Requests placed so far, as the scheduler counts them."""
    (scheduler,) = (role for role in mesh.status()["roles"] if role["role"] == "scheduler")
    page = httpx.get(f"http://{scheduler['metrics_address']}/metrics", timeout=20).text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    samples = families["penstock_scheduler_placements"].samples
    return sum(int(sample.value) for sample in samples if sample.name.endswith("_total"))


def test_requests_pull_the_prefix_that_another_instance_has(mesh_in_turn: RunningMesh) -> None:
    mesh, shared = mesh_in_turn, prefix(1)
    first = read(mesh, shared)
    first.whole_text()
    eventually(lambda: cached_blocks(mesh, first.instance) > 50, 60, "the scheduler knows of the prefix")
    prompts = [f"{shared} and so it ended, {number}" for number in range(2)]
    readers = [read(mesh, prompt) for prompt in prompts]
    texts = [reader.whole_text() for reader in readers]
    still(len({first.instance, *(reader.instance for reader in readers)}) == 3, "all take requests, in turn")
    for reader in readers:
        pull = explain(mesh, reader)["pull"]
        assert pull["instance_id"] in {first.instance, readers[0].instance} - {reader.instance}
        assert pull["tokens"] > 1000
        assert 0 < pull["pull_ms"] < pull["compute_ms"]
        cached = reader.usage.prompt_tokens_details.cached_tokens
        still(cached >= pull["tokens"], "the prefix comes before it is given up and computed")
        shown = mesh.cli("explain", reader.request_id).stdout
        assert f"pulls {pull['tokens']:,} tokens from {pull['instance_id']}" in shown

    def counted() -> bool:
        shown = mesh.cli("status").stdout
        return all(f"{reader.instance} pulled 1 prefixes" in shown for reader in readers)

    eventually(counted, 60, "each pull is counted once")
    assert [read(mesh, prompt).whole_text() for prompt in prompts] == texts


def test_siblings_await_and_pull_what_the_first_of_them_still_computes(mesh: RunningMesh) -> None:
    """Only `penstock` weighs that. A stream begins after its prefill, so they are begun on threads. Had they all come
    at once, an idle instance would have been as quick to compute the prompt itself: they come once two thirds of the
    first are left, which is held until they are placed."""
    shared = prefix(9, 600)
    prompts = [f"{shared} and so it ended, {number}" for number in range(1 + SIBLINGS)]
    placed_before = placed(mesh)
    with ThreadPoolExecutor(len(prompts)) as pool:
        with mesh.held():
            first = pool.submit(read, mesh, prompts[0])
            eventually(lambda: 0 < prefilling(mesh) < 5_500, 60, "a part of the first prompt is computed")
            siblings = [pool.submit(read, mesh, prompt) for prompt in prompts[1:]]
            eventually(lambda: placed(mesh) - placed_before > SIBLINGS, 60, "all are placed")
        readers = [begun.result() for begun in (first, *siblings)]
    texts = [reader.whole_text() for reader in readers]
    explained = {reader: explain(mesh, reader) for reader in readers}
    pulls = {reader: explanation.get("pull") or {} for reader, explanation in explained.items()}
    awaited = [reader for reader, pull in pulls.items() if pull.get("comes_ms", 0) > 0]
    seen = [(reader.instance, pull) for reader, pull in pulls.items()]
    still(bool(awaited), f"the first prompt is computed while its siblings come: {seen}")
    for reader in awaited:
        source = pulls[reader]["instance_id"]
        # Not `reader.instance`: an answer may be decoded elsewhere than its prompt was computed.
        assert source != explained[reader]["chosen_instance_id"]
        shown = mesh.cli("explain", reader.request_id).stdout
        assert f"tokens from {source} once it has computed them, in some" in shown
    came = [reader.usage.prompt_tokens_details.cached_tokens for reader in awaited]
    still(max(came) > 1000, f"a prefix comes before its sibling would have computed it: {came} tokens")
    assert [read(mesh, prompt).whole_text() for prompt in prompts] == texts


def test_a_source_that_is_killed_costs_no_request(mesh_in_turn: RunningMesh) -> None:
    mesh = mesh_in_turn
    stories = [prefix(number) for number in range(2, 5)]
    sources = [read(mesh, story) for story in stories]
    for source in sources:
        source.whole_text()
    eventually(lambda: all(cached_blocks(mesh, each.instance) > 50 for each in sources), 60, "prefixes are known")
    prompts = [f"{story} the end, {number}" for story in stories for number in range(4)]
    readers = [read(mesh, prompt) for prompt in prompts]
    mesh.kill(sources[0].instance)
    texts = [reader.whole_text() for reader in readers]
    eventually(lambda: list(mesh.instances().values()) == ["ready"] * 3, 60, "the killed instance is back")
    assert [read(mesh, prompt).whole_text() for prompt in prompts] == texts
