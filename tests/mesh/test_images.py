"""Requests with images in a real mesh: prefilled here, decoded there, moved and recovered with their files."""

import json
import shutil
import threading
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tokenizers import AddedToken, Tokenizer

from tests.in_time import ends_within, eventually
from tests.mesh.running_mesh import RunningMesh

pytest.importorskip("ucxx", reason="KV transfers need UCX")

DEMO_MODEL = Path(__file__).parents[2] / "demo" / "models" / "demo-small"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<{{ part.type }}>{% endif %}{% endfor %}{% endfor %}"
    "<|assistant|>"
)
CAT, DOG = b"picture of a cat" * 4000, b"picture of a dog" * 4000
TOKENS = 200
DECODE = ("eyes-decode-0", "eyes-decode-1")
JOIN_S = 60.0


class Viewer:
    """One streamed question about images, read on a thread."""

    def __init__(self, mesh: RunningMesh, *images: bytes, tokens: int = TOKENS) -> None:
        texts = [{"type": "text", "text": "Say at length what is to be seen on " * 10}]
        urls = [f"data:image/png;base64,{b64encode(image).decode()}" for image in images]
        content: Any = [*texts, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
        client = OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=JOIN_S)
        self._raw = client.chat.completions.with_raw_response.create(
            model="eyes",
            messages=[{"role": "user", "content": content}],
            max_tokens=tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        self.instance = self._raw.headers["x-penstock-instance"]
        self.request_id = self._raw.headers["x-request-id"]
        self.text, self.usage = "", None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for chunk in self._raw.parse():
                for choice in chunk.choices:
                    self.text += choice.delta.content or ""
                self.usage = chunk.usage or self.usage
        except Exception as error:  # noqa: BLE001  whatever it is, the test shows it
            self._error = error

    def whole(self) -> tuple[str, int, int]:
        """Text, prompt tokens and generated tokens, once the stream has ended."""
        ends_within(self._thread, JOIN_S)
        if self._error is not None:
            raise self._error
        assert self.usage is not None
        return self.text, self.usage.prompt_tokens, self.usage.completion_tokens


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """One instance computes prompts, two decode, and all of them take images."""
    model = tmp_path_factory.mktemp("eyes")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(DEMO_MODEL / name, model)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<image>", normalized=False)])
    tokenizer.save(str(model / "tokenizer.json"))
    config = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    options = ("--engine", "simulated", "--model", f"eyes={model}", "--prefill", "1", "--decode", "2")
    running = RunningMesh(tmp_path_factory.mktemp("mesh"), *options)
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
    finally:
        running.cut()


@pytest.fixture(scope="module")
def undisturbed(seeing: RunningMesh) -> tuple[str, int, int]:
    return Viewer(seeing, CAT, DOG).whole()


def decoder(mesh: RunningMesh, viewer: Viewer) -> str:
    """The instance that has its request, once it is read."""
    eventually(lambda: viewer.text, 60, "the stream has begun")
    explained = mesh.cli("explain", viewer.request_id, "--json")
    assert explained.returncode == 0, explained.stderr
    found: str = json.loads(explained.stdout)["decode_instance_id"]
    assert found in DECODE

    def decodes() -> bool:
        loads = {each["instance_id"]: each["load"] for each in mesh.status()["instances"]}
        return int(loads[found]["decoding_requests"]) > 0

    eventually(decodes, 60, f"{found} decodes it")
    return found


def test_answers_depend_on_what_is_in_an_image(seeing: RunningMesh, undisturbed: tuple[str, int, int]) -> None:
    text, prompt_tokens, tokens = undisturbed
    assert tokens == TOKENS
    others, again = Viewer(seeing, DOG, CAT), Viewer(seeing, CAT, DOG)
    other_text, other_prompt_tokens, _ = others.whole()
    assert prompt_tokens == other_prompt_tokens
    assert text != other_text
    assert again.whole() == undisturbed


def test_moved_in_mid_stream(seeing: RunningMesh, undisturbed: tuple[str, int, int]) -> None:
    with seeing.held():
        viewer = Viewer(seeing, CAT, DOG)
        (target,) = set(DECODE) - {decoder(seeing, viewer)}
        answer = seeing.cli("migrate", viewer.request_id, "--to", target, "--json")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert [move["moved"] for move in json.loads(answer.stdout)] == [True]
    assert viewer.whole() == undisturbed


def test_recovered_with_its_images(seeing: RunningMesh, undisturbed: tuple[str, int, int]) -> None:
    with seeing.held():
        viewer = Viewer(seeing, CAT, DOG)
        seeing.kill(decoder(seeing, viewer))
    assert viewer.whole() == undisturbed
    eventually(lambda: set(seeing.instances().values()) == {"ready"}, 60, "the killed instance is back")


def test_an_image_that_was_seen_is_in_the_prefix_cache(seeing: RunningMesh) -> None:
    first = Viewer(seeing, CAT, CAT, tokens=20).whole()

    def known_tokens() -> int:
        """Of the prompt's, as the scheduler knows when it comes once more: it hears of blocks a moment later."""
        again = Viewer(seeing, CAT, CAT, tokens=20)
        assert again.whole() == first
        explained = json.loads(seeing.cli("explain", again.request_id, "--json").stdout)
        return int(max(each["indicators"]["cached_tokens"] for each in explained["scores"]))

    eventually(lambda: known_tokens() == (first[1] - 1) // 16 * 16, 60, "all whole blocks are known")
