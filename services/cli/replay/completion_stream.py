"""A streamed completion as it arrives: the times of its tokens, its usage, its end; its text for who asks for it."""

from collections.abc import Callable, Mapping

import msgspec

from simulator.report.outcome import RequestOutcome

MAX_EVENT_BYTES = 4 << 20
MAX_ERROR_BODY_BYTES = 64 << 10
INSTANCE_HEADER = "x-penstock-instance"
POLICY_HEADER = "x-penstock-policy"
REQUEST_ID_HEADER = "x-request-id"


class _PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptTokensDetails | None = None


class Choice(msgspec.Struct, frozen=True):
    """Text and finish reason that one chunk adds to an answer."""

    text: str = ""
    finish_reason: str | None = None


class _Error(msgspec.Struct, frozen=True):
    message: str = ""


class _Event(msgspec.Struct, frozen=True):
    """What is read of a chunk; decoding these few fields costs about a microsecond."""

    choices: list[Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_EVENTS = msgspec.json.Decoder(_Event)


class CompletionStream:
    """The response sink of one completion request. `now_s` is the clock of the experiment."""

    def __init__(
        self, now_s: Callable[[], float], on_choice: Callable[[Choice, float], None] = lambda choice, now_s: None
    ) -> None:
        """`on_choice` is called with every piece of an answer and the time it came at."""
        self._now_s = now_s
        self._on_choice = on_choice
        self._status = 0
        self._partial = b""
        self._done = False
        self._usage: _Usage | None = None
        self._error = ""
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.instance_id = ""
        self.policy = ""
        self.request_id = ""
        self.last_event_id = ""
        """Of the last event that was read: the answer can be resumed behind it. Empty where events have no ids."""
        self._event_id = ""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers; of an answer that is resumed, once more."""
        self._status = status
        self._partial, self._event_id = b"", ""
        self.instance_id = self.instance_id or headers.get(INSTANCE_HEADER, "")
        self.policy = self.policy or headers.get(POLICY_HEADER, "")
        self.request_id = headers.get(REQUEST_ID_HEADER, "")

    def on_body(self, chunk: bytes) -> None:
        """A piece of the body: whole events, parts of one, or several."""
        if self._status != 200:
            self._partial = (self._partial + chunk)[:MAX_ERROR_BODY_BYTES]
            return
        now_s = self._now_s()
        lines = (self._partial + chunk).split(b"\n")
        self._partial = lines.pop()
        if len(self._partial) > MAX_EVENT_BYTES:
            self._error = self._error or f"an event of more than {MAX_EVENT_BYTES} bytes"
            self._partial = b""
        for line in lines:
            if line.startswith(b"data:"):
                self._on_data(line[5:].strip(), now_s)
                self.last_event_id = self._event_id or self.last_event_id
            elif line.startswith(b"id:"):
                self._event_id = line[3:].strip().decode("latin-1")
            elif not line:
                self._event_id = ""

    def outcome(self, arrival_s: float, failure: str = "") -> RequestOutcome:
        """What became of the request; `failure` says why the exchange itself broke off, if it did."""
        usage = self._usage
        cached = usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else None
        return RequestOutcome(
            arrival_s=arrival_s,
            finished_s=self._now_s(),
            first_token_s=self.first_token_s,
            last_token_s=self.last_token_s,
            input_tokens=usage.prompt_tokens if usage else 0,
            output_tokens=self.output_tokens,
            cached_tokens=cached or 0,
            instance_id=self.instance_id,
            error=self.failure(failure),
        )

    @property
    def is_resumable(self) -> bool:
        """Whether the rest of the answer can be asked for: it has begun, its events have ids, and it has not ended."""
        return self._status == 200 and not self._done and not self._error and bool(self.last_event_id)

    @property
    def answered(self) -> bool:
        """Whether the head of a response has come."""
        return self._status != 0

    @property
    def output_tokens(self) -> int:
        """Generated, as the endpoint counts them; 0 until it has told."""
        return self._usage.completion_tokens if self._usage else 0

    def failure(self, failure: str = "") -> str:
        """Why this is no whole answer, empty if it is one; `failure` as of `outcome`."""
        if self._status not in (0, 200):
            return f"HTTP {self._status}: {_error_message(self._partial)}"
        if self._error or failure:
            return self._error or failure
        if not self._done:
            return "the stream ended without [DONE]"
        if self.first_token_s is None:
            return "the stream ended without a token"
        if self._usage is None:
            return "the stream told no usage, so its tokens cannot be counted"
        return ""

    def _on_data(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = _EVENTS.decode(data)
        except msgspec.DecodeError as error:
            self._error = self._error or f"an event that is no completion chunk ({error})"
            return
        if event.error is not None:
            self._error = self._error or event.error.message or "an error without a message"
        if event.usage is not None:
            self._usage = event.usage
        if event.choices:
            self.last_token_s = now_s
            if self.first_token_s is None:
                self.first_token_s = now_s
            for choice in event.choices:
                self._on_choice(choice, now_s)


def _error_message(body: bytes) -> str:
    """The message of an OpenAI-style error object, otherwise the body's beginning."""
    try:
        event = _EVENTS.decode(body)
    except msgspec.DecodeError:
        event = _Event()
    if event.error is not None and event.error.message:
        return event.error.message
    return " ".join(body[:200].decode("utf-8", "replace").split()) or "no body"
