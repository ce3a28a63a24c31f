"""An OpenAI-like endpoint that streams what a test scripts, over real sockets, in a thread of its own."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """How one request is answered."""

    status: int = 200
    tokens: int | None = None
    """None: as many as max_tokens says."""
    first_token_after_s: float = 0.0
    token_after_s: float = 0.0
    cached_tokens: int = 0
    instance: str = ""
    cut_after_tokens: int | None = None
    """Close the connection there, without an end."""
    error_event: str = ""
    usage: bool = True
    close_when_done: bool = False
    """End the connection after the answer although it was to be kept."""


@dataclass
class FakeEndpoint:
    """`answer` decides from the request's body and its place in the order of arrival."""

    answer: Callable[[dict[str, Any], int], Answer] = lambda body, index: Answer()
    models: dict[str, Any] = field(
        default_factory=lambda: {"data": [{"id": "demo", "penstock": {"max_model_len": 4096, "vocab_size": 600}}]}
    )
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    connections: int = 0
    disconnects: int = 0
    """Connections that the client ended in the middle of an answer."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except ConnectionError:
            self.disconnects += 1
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:
            return False
        request_line, *header_lines = head.strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in header_lines)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if "authorization" in headers:
            self.keys.add(header_lines[-1].split("Bearer ")[1])
        if request_line.startswith("GET /v1/models "):
            document = json.dumps(self.models).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(document), document))
            return True
        assert request_line.startswith("POST /v1/completions "), request_line
        decoded = json.loads(body)
        self.bodies.append(decoded)
        answer = self.answer(decoded, len(self.bodies) - 1)
        if answer.status != 200:
            document = json.dumps({"error": {"message": "no room", "type": "overloaded"}}).encode()
            writer.write(b"HTTP/1.1 %d No\r\ncontent-length: %d\r\n\r\n%b" % (answer.status, len(document), document))
            return True
        return await self._stream(decoded, answer, writer)

    async def _stream(self, body: dict[str, Any], answer: Answer, writer: asyncio.StreamWriter) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            b"X-Penstock-Instance: %b\r\nX-Penstock-Policy: lmetric\r\n\r\n" % answer.instance.encode()
        )
        tokens = body["max_tokens"] if answer.tokens is None else answer.tokens
        for index in range(tokens):
            await asyncio.sleep(answer.token_after_s if index else answer.first_token_after_s)
            if index == answer.cut_after_tokens:
                return False
            send_event(writer, {"choices": [{"index": 0, "text": "x"}]})
            await writer.drain()
        if answer.error_event:
            send_event(writer, {"error": {"message": answer.error_event}})
        if answer.usage:
            usage = {
                "prompt_tokens": len(body["prompt"]),
                "completion_tokens": tokens,
                "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
            }
            send_event(writer, {"choices": [], "usage": usage})
        send_chunk(writer, b"data: [DONE]\n\n")
        send_chunk(writer, b"")
        return not answer.close_when_done


def send_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    send_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def send_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


@contextmanager
def serving(endpoint: FakeEndpoint) -> Iterator[FakeEndpoint]:
    """Serve on a free port of loopback while the block runs."""
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        server = await asyncio.start_server(endpoint.handle, "127.0.0.1", 0, limit=1 << 24)
        endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await stop.wait()
        server.close()
        current = asyncio.current_task()
        handlers = [task for task in asyncio.all_tasks() if task is not current]
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(10), "the fake endpoint did not start"
    try:
        yield endpoint
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
