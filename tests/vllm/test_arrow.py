"""Arrow over two vLLM engines in a real mesh: prefill on one, decode on the other, the output as of one."""

import json
from collections.abc import Iterator

import pytest

from tests.mesh.reader import Reader
from tests.mesh.running_mesh import RunningMesh, eventually

pytestmark = pytest.mark.vllm
pytest.importorskip("ucxx", reason="KV transfers need UCX")

TOKENS = 120
START_S = 300.0


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    options = ("--engine-arg", "dtype=float32", "--ready-timeout-s", str(START_S))
    running = RunningMesh(tmp_path_factory.mktemp("arrow"), "--workers", "2", "--policy", "arrow", *options)
    try:
        running.wait_until_serving(START_S)
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


def test_the_pools_split_requests_and_the_output_does_not_tell(mesh: RunningMesh) -> None:
    def pools() -> list[str]:
        return sorted(each["pool"] for each in mesh.status()["instances"])

    eventually(lambda: pools() == ["decode", "prefill"], 30, "one instance for each kind")
    prompts = [f"item {number} " + "of the list " * (40 * number) for number in range(4)]
    readers = [Reader(mesh, prompt, TOKENS) for prompt in prompts]
    texts = [reader.whole_text() for reader in readers]
    answers = [json.loads(mesh.cli("explain", reader.request_id, "--json").stdout) for reader in readers]
    assert all(each["policy"] == "arrow" for each in answers)
    assert any(each["decode_instance_id"] != each["chosen_instance_id"] for each in answers)
    switched = mesh.cli("policy", "round_robin")
    assert switched.returncode == 0, switched.stderr
    assert [Reader(mesh, prompt, TOKENS).whole_text() for prompt in prompts] == texts
