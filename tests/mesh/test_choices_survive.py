"""Several choices, stop strings, penalties, seeds, logprobs, usage: across a migration, and a worker's death."""

import json
import threading
from typing import Any

import pytest
from openai import OpenAI

from tests.in_time import ends_within, eventually, still
from tests.mesh.running_mesh import RunningMesh

pytest.importorskip("ucxx", reason="KV transfers need UCX")

CHOICES = 3
TOKENS = 200
JOIN_S = 60.0


class Choices:
    """One streamed request with several choices, read on a thread."""

    def __init__(self, mesh: RunningMesh, stop: str | None = None) -> None:
        options: dict[str, Any] = {"stop": stop} if stop else {}
        self._raw = OpenAI(
            base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=JOIN_S
        ).completions.with_raw_response.create(
            model="demo-large",
            prompt="three ways to tell it " * 10,
            n=CHOICES,
            max_tokens=TOKENS,
            temperature=0.8,
            seed=7,
            presence_penalty=0.5,
            logprobs=1,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
            **options,
        )
        self.instance = self._raw.headers["x-penstock-instance"]
        self.request_id = self._raw.headers["x-request-id"]
        self.texts = [""] * CHOICES
        self.tokens = [0] * CHOICES
        self.finishes = [""] * CHOICES
        self.usage: Any = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for chunk in self._raw.parse():
                for choice in chunk.choices:
                    self.texts[choice.index] += choice.text
                    self.tokens[choice.index] += len(choice.logprobs.tokens) if choice.logprobs else 0
                    self.finishes[choice.index] = choice.finish_reason or self.finishes[choice.index]
                self.usage = chunk.usage or self.usage
        except Exception as error:  # noqa: BLE001  whatever it is, the test shows it
            self._error = error

    @property
    def reads(self) -> bool:
        """Whether the stream goes on."""
        return self._thread.is_alive()

    def whole(self) -> tuple[list[str], list[int], list[str]]:
        """Texts, tokens with logprobs and finish reasons, once the stream has ended."""
        ends_within(self._thread, JOIN_S)
        if self._error is not None:
            raise self._error
        return self.texts, self.tokens, self.finishes


@pytest.fixture(scope="module")
def stop(mesh: RunningMesh) -> str:
    """A piece of the second choice that ends it early."""
    texts, tokens, finishes = Choices(mesh).whole()
    assert finishes == ["length"] * CHOICES
    assert tokens == [TOKENS] * CHOICES
    middle = len(texts[1]) * 2 // 3
    return texts[1][middle : middle + 16]


@pytest.fixture(scope="module")
def undisturbed(mesh: RunningMesh, stop: str) -> Choices:
    """The same with the stop string, left alone."""
    choices = Choices(mesh, stop)
    choices.whole()
    assert choices.finishes[1] == "stop"
    assert stop not in choices.texts[1]
    return choices


def begun(choices: Choices) -> bool:
    return all(choices.texts)


def test_across_a_migration(mesh: RunningMesh, stop: str, undisturbed: Choices) -> None:
    with mesh.held():
        choices = Choices(mesh, stop)
        eventually(lambda: begun(choices), 60, "all choices have begun")
        target = next(name for name in sorted(mesh.instances()) if name != choices.instance)
        answer = mesh.cli("migrate", choices.request_id, "--to", target, "--json")
    still(answer.returncode == 0 or choices.reads, "the request runs until it has been moved")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert [move["moved"] for move in json.loads(answer.stdout)] == [True] * CHOICES
    assert choices.whole() == undisturbed.whole()
    assert choices.usage.prompt_tokens == undisturbed.usage.prompt_tokens
    # A stop string is seen by the frontend, so the engine may be a step or two further when it hears of it.
    assert abs(choices.usage.completion_tokens - undisturbed.usage.completion_tokens) <= CHOICES


def test_across_a_recovery(mesh: RunningMesh, stop: str, undisturbed: Choices) -> None:
    with mesh.held():
        choices = Choices(mesh, stop)
        eventually(lambda: begun(choices), 60, "all choices have begun")
        mesh.kill(choices.instance)
    assert choices.whole() == undisturbed.whole()
    assert choices.usage.prompt_tokens == undisturbed.usage.prompt_tokens
    assert abs(choices.usage.completion_tokens - undisturbed.usage.completion_tokens) <= CHOICES
    eventually(lambda: list(mesh.instances().values()) == ["ready"] * 3, 60, "the killed instance is back")
