"""A client that reads one stream to its end."""

import threading
from typing import Any, Protocol

from openai import OpenAI

from tests.in_time import ends_within

TOKENS = 200
JOIN_S = 60


class Served(Protocol):
    """A mesh."""

    url: str
    key: str
    """What its readers present, where it asks for API keys."""


class Reader:
    """One streamed greedy completion, read on a thread."""

    def __init__(
        self, mesh: Served, prompt: str, tokens: int = TOKENS, model: str = "demo-large", key: str = ""
    ) -> None:
        """`key`: by default that of the mesh."""
        self._tokens = tokens
        self._raw = OpenAI(
            base_url=f"{mesh.url}/v1", api_key=key or mesh.key, max_retries=0, timeout=JOIN_S
        ).completions.with_raw_response.create(
            model=model,
            prompt=prompt,
            max_tokens=tokens,
            stream=True,
            temperature=0,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        self.instance = self._raw.headers["x-penstock-instance"]
        self.request_id = self._raw.headers["x-request-id"]
        self.text = ""
        self.usage: Any = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for chunk in self._raw.parse():
                self.text += chunk.choices[0].text if chunk.choices else ""
                self.usage = chunk.usage or self.usage
        except Exception as error:  # noqa: BLE001  whatever it is, the test shows it
            self.error = error

    @property
    def reads(self) -> bool:
        """Whether the stream goes on."""
        return self._thread.is_alive()

    def whole_text(self) -> str:
        """Everything, once the stream has ended. Raises what the client has raised."""
        ends_within(self._thread, JOIN_S)
        if self.error is not None:
            raise self.error
        assert self.usage.completion_tokens == self._tokens
        return self.text
