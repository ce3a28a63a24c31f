"""Clients of responses in the background: each asks for one, goes away, and looks after it at one frontend after the
other until it has ended.

What such a client is to find: the whole answer, at any frontend, for as long as one of the processes lives that have
the response; and of a stream every event once, in order, whichever frontend it comes from.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fault_simulation.client import ReceivedChoice
from fault_simulation.http import http_request
from fault_simulation.machines import Life
from fault_simulation.node import NodeState
from fault_simulation.nodes import HTTP_PORT, SimulatedMesh
from fault_simulation.workload import TRY_AGAIN_S, Asked, Attempt
from services.frontend.role import FrontendRole

RESPONSES_PATH: Final = "/v1/responses"
LOOKS_EVERY_S: Final = 0.5
_TAKEN_OVER: Final = ("model", "temperature", "seed", "ignore_eos", "stop", "cache_salt", "priority", "stream")
"""Parameters of a chat that a response has under the same names."""
KEPT: Final = (*_TAKEN_OVER, "messages", "max_tokens", "stream_options")
"""Those that a chat may have of which the response is asked for."""
_FINISHES: Final = {"completed": "stop", "incomplete": "length"}
_UNFINISHED: Final = frozenset(("queued", "in_progress"))


@dataclass(slots=True)
class Promise:
    """A response that a frontend has promised."""

    asked: Asked
    response_id: str
    having: frozenset[Life] = frozenset()
    """Who was last seen to have it."""
    is_lost: bool = False
    """Nobody has it any more."""


class Promises:
    """All of a simulation."""

    def __init__(self) -> None:
        self._promises: list[Promise] = []

    def add(self, promise: Promise) -> None:
        """One that a client knows of from now on."""
        self._promises.append(promise)

    def sample(self, lives: Iterable[Life]) -> Iterator[Promise]:
        """Those that were lost since the last look though a process that had them lives on."""
        frontends = [life for life in lives if isinstance(life.role, FrontendRole) and life.role.service is not None]
        for promise in self._promises:
            if promise.asked.is_over or promise.is_lost:
                continue
            having = frozenset(life for life in frontends if _has(life, promise.response_id))
            if not having and promise.having:
                promise.is_lost = True
                if any(life.node.state is not NodeState.DEAD and life in frontends for life in promise.having):
                    yield promise
            promise.having = having


def _has(life: Life, response_id: str) -> bool:
    assert isinstance(life.role, FrontendRole)
    service = life.role.service
    return service is not None and life.node.state is not NodeState.DEAD and service.background.has(response_id)


class BackgroundClient:
    """One of them. What it has of its answer is in the last attempt's."""

    def __init__(
        self, mesh: SimulatedMesh, asked: Asked, promises: Promises, violated: Callable[[str, str, str], None]
    ) -> None:
        """`violated`: takes a kind, who and what."""
        self._mesh = mesh
        self._asked = asked
        self._promises = promises
        self._violated = violated
        self._promise: Promise | None = None
        self._wants_events = bool(asked.request.body["stream"])
        self._next_number = 0
        self._text = ""
        """Of the events so far."""

    async def run(self, frontends: Sequence[str], on_end: Callable[[Asked, Attempt], None]) -> None:
        """Until the response has ended, was refused, or is lost. `on_end`: of an attempt that has promised nothing."""
        asked, loop = self._asked, self._mesh.loop
        turn = asked.request.frontend
        while not asked.is_over:
            name = frontends[turn % len(frontends)]
            attempt = Attempt(name, self._mesh.machines[name].life, loop.now_s)
            asked.attempts.append(attempt)
            turn += 1
            if self._promise is None:
                await self._ask(attempt)
                attempt.ended_s = loop.now_s
                if self._promise is None:
                    on_end(asked, attempt)
                    asked.is_over = not attempt.is_refused
                if attempt.is_refused and (turn - asked.request.frontend) % len(frontends) == 0:
                    await asyncio.sleep(TRY_AGAIN_S)
                continue
            await self._look(attempt, self._promise)
            attempt.ended_s = loop.now_s
            asked.is_over = asked.is_over or self._promise.is_lost
            await asyncio.sleep(LOOKS_EVERY_S)

    async def _ask(self, attempt: Attempt) -> None:
        """The client leaves a stream after its time, for good where nothing has come of it yet."""
        body = response_body(self._asked.request.body)
        reading = asyncio.ensure_future(self._exchange(attempt, "POST", RESPONSES_PATH, json.dumps(body).encode()))
        leaves_s = self._asked.request.after_s if self._wants_events else None
        await asyncio.wait((reading,), timeout=leaves_s)
        self._asked.has_left = not reading.done() and self._promise is None
        reading.cancel()
        await asyncio.wait((reading,))

    async def _look(self, attempt: Attempt, promise: Promise) -> None:
        path = f"{RESPONSES_PATH}/{promise.response_id}"
        if self._wants_events:
            behind = f"&starting_after={self._next_number - 1}" if self._next_number else ""
            await self._exchange(attempt, "GET", f"{path}?stream=true{behind}")
            if attempt.answer.status == 400:  # it was begun anew, and is to be had whole
                self._wants_events = False
        else:
            await self._exchange(attempt, "GET", path)

    async def _exchange(self, attempt: Attempt, method: str, path: str, body: bytes = b"") -> None:
        answer, address = attempt.answer, f"{attempt.frontend}:{HTTP_PORT}"
        headers = {"content-type": "application/json"}
        exchange = http_request(self._mesh.network, self._mesh.client, address, method, path, headers, body)
        try:
            answer.status = await exchange.started()
            answer.request_id = exchange.headers.get("x-request-id", "")
            if exchange.headers.get("content-type", "").startswith("text/event-stream"):
                buffered = b""
                while (chunk := await exchange.chunk()) is not None:
                    *events, buffered = (buffered + chunk).split(b"\n\n")
                    for event in events:
                        self._event(json.loads(event.partition(b"data: ")[2]))
                return
            content = json.loads(await exchange.body())
            if answer.status == 200:
                self._response(content)
            else:
                answer.error = str(content["error"])
        except ConnectionError as error:
            answer.is_broken, answer.error = True, str(error)
        finally:
            exchange.leave()

    def _event(self, event: dict[str, Any]) -> None:
        number = event["sequence_number"]
        if number != self._next_number:
            self._wrong(f"event {number} came, and event {self._next_number} was to come")
        self._next_number = number + 1
        if event["type"] == "response.output_text.delta":
            self._text += event["delta"]
        if "response" in event:
            self._response(event["response"])
            if self._asked.is_over and event["type"] != "response.failed" and self._text != _text_of(event["response"]):
                self._wrong("its events say something else than the whole response")

    def _response(self, response: dict[str, Any]) -> None:
        if self._promise is None:
            life = self._asked.attempts[-1].life
            self._promise = Promise(self._asked, response["id"], frozenset(() if life is None else (life,)))
            self._promises.add(self._promise)
        if response["id"] != self._promise.response_id:
            self._wrong(f"it is {response['id']}, not {self._promise.response_id}")
        status = response["status"]
        if status in _UNFINISHED:
            return
        self._asked.is_over = True
        received = self._asked.attempts[-1].answer
        if status == "failed":
            received.error = response["error"]["message"]
            return
        text, finish, tokens = _text_of(response), _FINISHES.get(status, status), response["usage"]["output_tokens"]
        received.choices[0] = ReceivedChoice(text, finish)
        (expected,) = self._asked.expected
        if (text, finish, tokens) != (expected.text, expected.finish, expected.tokens):
            self._wrong(f"it is {(text, finish, tokens)}, not {(expected.text, expected.finish, expected.tokens)}")

    def _wrong(self, what: str) -> None:
        self._violated("wrong answer", self._asked.name, what)


def response_body(chat: dict[str, Any]) -> dict[str, Any]:
    """The same as a response in the background."""
    body: dict[str, Any] = {name: chat[name] for name in _TAKEN_OVER if name in chat}
    asked = chat["messages"][-1]["content"]
    return {**body, "input": asked, "max_output_tokens": chat["max_tokens"], "background": True}


def _text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))
