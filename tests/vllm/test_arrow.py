"""Arrow over two vLLM engines in a real mesh: prefill on one, decode on the other, the output as of one."""

import json
import random
from collections.abc import Iterator

import pytest

from services.frontend.requests.api_keys import SECRET_BYTES, new_key_line
from tests.in_time import eventually, still
from tests.mesh.reader import Reader
from tests.mesh.running_mesh import RunningMesh

pytestmark = pytest.mark.vllm
pytest.importorskip("ucxx", reason="KV transfers need UCX")

TOKENS = 120
START_S = 300.0
KEYS = [new_key_line(name, random.Random(name).randbytes(SECRET_BYTES)) for name in ("alice", "bob")]
"""Of two tenants, whose caches are apart; the first is that of all readers who name none."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    folder = tmp_path_factory.mktemp("arrow")
    (folder / "keys.txt").write_text("".join(f"{line}\n" for _, line in KEYS))
    environment = {
        "PENSTOCK_SERVE_FRONTEND_API_KEYS_FILE": str(folder / "keys.txt"),
        "PENSTOCK_SERVE_FRONTEND_SEPARATE_TENANT_CACHES": "true",
    }
    options = ("--engine-arg", "dtype=float32", "--ready-timeout-s", str(START_S))
    running = RunningMesh(folder, "--workers", "2", "--policy", "arrow", *options, environment=environment)
    running.key, _ = KEYS[0]
    try:
        running.wait_until_serving(START_S)
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


def test_the_pools_split_requests_and_the_output_does_not_tell(mesh: RunningMesh) -> None:
    def pools() -> list[str]:
        return sorted(each["pool"] for each in mesh.status()["instances"])

    eventually(lambda: pools() == ["decode", "prefill"], 60, "one instance for each kind")
    prompts = [f"item {number} " + "of the list " * (40 * number) for number in range(4)]
    readers = [Reader(mesh, prompt, TOKENS) for prompt in prompts]
    texts = [reader.whole_text() for reader in readers]
    answers = [json.loads(mesh.cli("explain", reader.request_id, "--json").stdout) for reader in readers]
    assert all(each["policy"] == "arrow" for each in answers)
    assert any(each["decode_instance_id"] != each["chosen_instance_id"] for each in answers)
    switched = mesh.cli("policy", "round_robin")
    assert switched.returncode == 0, switched.stderr
    assert [Reader(mesh, prompt, TOKENS).whole_text() for prompt in prompts] == texts


def test_a_tenant_finds_and_pulls_its_own_blocks_only(mesh: RunningMesh) -> None:
    """In turn: what one instance has computed is pulled to the other one."""
    assert mesh.cli("policy", "round_robin").returncode == 0
    prompt = "Story of two tenants. " + " ".join(f"chapter {number} of it" for number in range(120))
    texts = set()
    for key, _ in KEYS:
        known = cached_blocks(mesh)
        first = read_in_turn(mesh, prompt, key)
        eventually(lambda: cached_blocks(mesh) > known + 10, 60, "the scheduler knows of its blocks")  # noqa: B023
        again = read_in_turn(mesh, prompt, key)
        texts |= {first.text, again.text}
        still(first.instance != again.instance, "both instances take requests, in turn")
        assert first.usage.prompt_tokens_details.cached_tokens == 0, "though another tenant has asked the same"
        still(again.usage.prompt_tokens_details.cached_tokens > 300, "its blocks come sooner than it is computed")
    assert len(texts) == 1


def read_in_turn(mesh: RunningMesh, prompt: str, key: str) -> Reader:
    reader = Reader(mesh, prompt, 8, key=key)
    reader.whole_text()
    return reader


def cached_blocks(mesh: RunningMesh) -> int:
    """Of all instances, as far as the scheduler knows."""
    return sum(int(each.get("cached_blocks", 0)) for each in mesh.status()["instances"])
