"""A server that answers as vLLM 0.32 does, with a simulated instance in place of a model.

Its formats were compared with `vllm/entrypoints/openai/completion/serving.py`: the chunks of a stream, the error in the
middle of one, the logprobs by token id, /v1/models, /metrics. It can be killed, hang, break off streams, refuse tokens,
and be started again at the same port with another model.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec
import numpy as np
import zmq.asyncio
from zmq.constants import SocketType

from controlplane.model.instance import KvBlocks
from controlplane.model.prefix_hash import block_hashes
from controlplane.model.request import EngineRequest, SamplingParams, TokenDelta
from engine_worker.engine_choice import LOCAL_HOST, make_engine
from engine_worker.engines.simulated import SimulatedEngine
from engine_worker.engines.vllm.connector.endpoint import of_core
from engine_worker.settings import WorkerSettings
from mesh.errors import RequestRefused
from mesh.runtime import SystemClock
from simulator.instance.script import Script

MODEL_PATH = "demo/models/demo-small"
OPTIONS = ("cost.fixed_ms=0.5", "cost.prefill_token_ms=0", "instance.max_model_len_tokens=1024")


@dataclass
class FakeServer:
    """One life of a server."""

    name: str = "demo"
    root: str = MODEL_PATH
    port: int = 0
    options: tuple[str, ...] = OPTIONS
    takes_tokens: bool = True
    tells_tokens: bool = True
    key: str = ""
    started_s: float = 1000.0
    owner: str = "vllm"
    publishes: str = ""
    """Endpoint of KV events, as vLLM's configuration has it; with several cores none of TCP, whose next port may be
    taken."""
    breaks_after: int = 0
    """Chunks after which a stream breaks off, once."""
    stops_after: int = 0
    """Chunks after which a stream stands still until its client goes, once."""
    foreign: int = 0
    """Requests of others, as the metrics tell, in the first engine core."""
    cores: int = 1
    """By data parallelism, as far as the metrics tell, the headers of requests, and the events."""
    metrics_told: int = 0
    asked_cores: list[str] = field(default_factory=list)
    """By the headers of requests to /v1/completions."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of requests to /v1/completions."""
    aborted: list[str] = field(default_factory=list)

    async def __aenter__(self) -> "FakeServer":
        settings = WorkerSettings("m", MODEL_PATH, engine="simulated", engine_arg=self.options)
        engine = make_engine(settings, 0, SystemClock())
        assert isinstance(engine, SimulatedEngine)
        self.engine = engine
        self.limits = await engine.start()
        self.awake = asyncio.Event()
        """Cleared: it hangs."""
        self.awake.set()
        self._streams: dict[str, asyncio.Queue[TokenDelta]] = {}
        self._tokens: dict[int, tuple[int | None, list[int]]] = {}
        """By hash of a block: that of the one before, and its tokens."""
        self._core_of: dict[str, int] = {}
        self._stored_in: dict[int, int] = {}
        """Core, by hash of a block."""
        self._connections: set[asyncio.StreamWriter] = set()
        self._sequences = [0] * self.cores
        self._publishers: list[Any] = []
        self._unheard = set(range(self.cores))
        """Cores whose events nobody has subscribed to yet."""
        for core in range(self.cores if self.publishes else 0):
            publisher = zmq.asyncio.Context.instance().socket(SocketType.XPUB)
            endpoint = of_core(self.publishes if core == 0 else self._publishers[0].last_endpoint.decode(), core)
            publisher.bind(endpoint)
            self._publishers.append(publisher)
        if self._publishers:
            self.published_at = self._publishers[0].last_endpoint.decode()
        self._tasks = [asyncio.create_task(self._read_outputs()), asyncio.create_task(self._read_kv_blocks())]
        self._server = await asyncio.start_server(self._connected, LOCAL_HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    @property
    def url(self) -> str:
        return f"http://{LOCAL_HOST}:{self.port}"

    async def kill(self) -> None:
        """As SIGKILL: every connection is cut."""
        self._server.close()
        for writer in tuple(self._connections):
            writer.transport.abort()
        await self.engine.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._publishers:
            self._publishers.pop().close(linger=0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                request, *lines = head.decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                if headers.get("transfer-encoding") == "chunked":
                    body = await _chunks(reader)
                else:
                    body = await reader.readexactly(int(headers.get("content-length", "0")))
                await self.awake.wait()
                if self.key and headers.get("authorization") != f"Bearer {self.key}":
                    _answer(writer, 401, {"error": "Unauthorized"})
                else:
                    await self._route(request.split()[1], body, headers, reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _route(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if path == "/v1/models":
            _answer(writer, 200, {"object": "list", "data": [self._model()]})
        elif path == "/metrics":
            self.metrics_told += 1
            _answer(writer, 200 if self.owner == "vllm" else 404, self._metrics(), kind="text/plain")
        elif path == "/v1/completions":
            self.asked_cores.append(headers.get("x-data-parallel-rank", ""))
            await self._complete(json.loads(body), reader, writer)
        else:
            _answer(writer, 404, {"detail": "Not Found"})

    def _model(self) -> dict[str, Any]:
        about = {"id": self.name, "object": "model", "created": 1, "owned_by": self.owner}
        if self.owner == "vllm":
            about |= {"root": self.root, "parent": None, "max_model_len": self.limits.max_model_len_tokens}
        return about

    def _metrics(self) -> str:
        load, limits = self.engine.load(), self.limits
        labels = f'engine="0",model_name="{self.name}"'
        usage = load.kv_blocks_used / limits.kv_blocks
        elsewhere = Counter(self._core_of[request] for request in self.engine.instance.request_ids)
        others = "".join(
            f'vllm:num_requests_running{{engine="{core}",model_name="{self.name}"}} {float(elsewhere[core])}\n'
            for core in range(1, self.cores)
        )
        running = max(0, load.running_requests - sum(elsewhere[core] for core in range(1, self.cores))) + self.foreign
        return (
            f"{others}vllm:num_requests_running{{{labels}}} {float(running)}\n"
            f"vllm:num_requests_waiting{{{labels}}} {float(load.queued_requests)}\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} {usage}\n"
            f'vllm:cache_config_info{{block_size="{limits.block_tokens}",engine="0",num_gpu_blocks="{limits.kv_blocks}"'
            f"}} 1.0\nvllm:num_preemptions_total{{{labels}}} 0.0\nprocess_start_time_seconds {self.started_s}\n"
        )

    async def _complete(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        prompt = body["prompt"]
        if body["model"] != self.name:
            _answer(writer, 404, _error(404, f"The model `{body['model']}` does not exist."))
            return
        if isinstance(prompt, list) and not self.takes_tokens:
            _answer(writer, 400, _error(400, "prompt must be a string"))
            return
        token_ids = tuple(prompt) if isinstance(prompt, list) else tuple(6 + byte for byte in prompt.encode())
        request = self._as_continued(body.get("request_id", f"r{len(self.bodies)}"), token_ids, _sampling(body))
        deltas = self._streams[request.request_id] = asyncio.Queue()
        self._core_of[request.request_id] = int(self.asked_cores[-1] or 0)
        try:
            self.engine.submit(request)
        except RequestRefused as refused:
            _answer(writer, 400, _error(400, str(refused)))
            return
        if body.get("stream"):
            await self._stream(request, body, deltas, reader, writer)
            return
        produced: list[int] = []
        while True:
            delta = await deltas.get()
            produced += delta.token_ids
            if delta.finish_reason is not None:
                break
        choice = {"index": 0, "text": "x", "finish_reason": delta.finish_reason.value}
        if body.get("return_token_ids") and self.tells_tokens:
            choice |= {"token_ids": produced, "prompt_token_ids": list(token_ids)}
        _answer(writer, 200, {"id": "cmpl-1", "object": "text_completion", "model": self.name, "choices": [choice]})

    def _as_continued(self, request_id: str, token_ids: tuple[int, ...], sampling: SamplingParams) -> EngineRequest:
        """The prompt as what a model would take it for: a simulated answer depends on where the prompt ends, so the
        longest end of it that this engine would have said is the answer so far, whoever said it."""
        for prompt_tokens in range(1, min(len(token_ids), self.limits.max_model_len_tokens)):
            prompt, emitted = token_ids[:prompt_tokens], token_ids[prompt_tokens:]
            if self._says(prompt, replace(sampling, max_tokens=1), 1) != emitted[:1]:
                continue
            whole = replace(
                sampling,
                max_tokens=sampling.max_tokens + len(emitted),
                min_tokens=sampling.min_tokens + len(emitted) if sampling.min_tokens else 0,
            )
            if self._says(prompt, whole, len(emitted)) == emitted:
                return EngineRequest(request_id, prompt, whole, emitted_token_ids=emitted)
        return EngineRequest(request_id, token_ids, sampling)

    def _says(self, prompt: tuple[int, ...], sampling: SamplingParams, tokens: int) -> tuple[int, ...]:
        """The first tokens of the answer."""
        config = self.engine.instance.config
        row = np.array(prompt, dtype=np.uint32)
        script = Script(row, (), sampling, config.max_model_len_tokens, config.output)
        return tuple(script.token_ids(0, min(tokens, script.total_tokens)))

    async def _stream(
        self,
        request: EngineRequest,
        body: dict[str, Any],
        deltas: "asyncio.Queue[TokenDelta]",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        gone = asyncio.create_task(reader.read(1))
        generated = list(request.emitted_token_ids)
        chunks = 0
        try:
            while True:
                take = asyncio.create_task(deltas.get())
                await asyncio.wait((take, gone), return_when=asyncio.FIRST_COMPLETED)
                if not take.done():
                    take.cancel()
                    raise ConnectionResetError
                delta = take.result()
                generated += delta.token_ids
                self._name_blocks(request, generated)
                _event(writer, self._chunk(delta, body, is_first=chunks == 0))
                chunks += 1
                if self.breaks_after and chunks >= self.breaks_after:
                    self.breaks_after = 0
                    raise ConnectionResetError
                if self.stops_after and chunks >= self.stops_after:
                    self.stops_after = 0
                    await asyncio.wait((gone,))
                    raise ConnectionResetError
                if delta.finish_reason is not None:
                    break
                await writer.drain()
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        except ConnectionError:  # heard of by reading, or by writing
            self.aborted.append(request.request_id)
            self.engine.abort(request.request_id)
            writer.transport.abort()
            raise
        finally:
            gone.cancel()
            with suppress(asyncio.CancelledError):
                await gone

    def _chunk(self, delta: TokenDelta, body: dict[str, Any], *, is_first: bool) -> dict[str, Any]:
        reason = delta.finish_reason
        text = bytes(token_id - 6 for token_id in delta.token_ids if 6 <= token_id < 262).decode("latin-1")
        choice: dict[str, Any] = {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": reason.value if reason is not None else None,
            "stop_reason": None,
        }
        if body.get("return_token_ids") and self.tells_tokens:
            choice["token_ids"] = list(delta.token_ids)
            choice["prompt_token_ids"] = body["prompt"] if is_first else None
        if body.get("logprobs") is not None:
            choice["logprobs"] = _logprobs(delta, body["logprobs"])
        return {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": self.name,
            "choices": [choice],
        }

    def _name_blocks(self, request: EngineRequest, generated: list[int]) -> None:
        context, size = [*request.prompt_token_ids, *generated], self.limits.block_tokens
        parent: int | None = None
        for index, block in enumerate(block_hashes(context, size)):
            self._tokens[block] = (parent, context[index * size : (index + 1) * size])
            self._stored_in.setdefault(block, self._core_of[request.request_id])
            parent = block

    async def _read_outputs(self) -> None:
        async for output in self.engine.outputs():
            for delta in output.deltas:
                self._streams[delta.request_id].put_nowait(delta)

    async def _read_kv_blocks(self) -> None:
        async for change in self.engine.kv_blocks():
            if not self._publishers:
                continue
            # A block is stored before its last token is told; one of an aborted request is never told of.
            for _ in range(50):
                if all(block in self._tokens for block in change.stored):
                    break
                await asyncio.sleep(0.001)
            for core in range(self.cores):
                await self._publish(core, change)

    async def _publish(self, core: int, change: KvBlocks) -> None:
        events: list[dict[str, Any]] = [
            {
                "type": "BlockStored",
                "block_hashes": [block],
                "parent_block_hash": self._tokens[block][0],
                "token_ids": self._tokens[block][1],
                "block_size": self.limits.block_tokens,
                "medium": "GPU",
            }
            for block in change.stored
            if block in self._tokens and self._stored_in[block] == core
        ]
        if change.removed:
            events.append({"type": "BlockRemoved", "block_hashes": list(change.removed), "medium": "GPU"})
        payload = msgspec.msgpack.encode([0.0, events])
        if core in self._unheard:
            # A subscription takes a connection first, and what is published before it arrives is lost.
            await self._publishers[core].recv()
            self._unheard.remove(core)
        await self._publishers[core].send_multipart([b"", self._sequences[core].to_bytes(8, "big"), payload])
        self._sequences[core] += 1


def _sampling(body: dict[str, Any]) -> SamplingParams:
    names = {each.name for each in fields(SamplingParams)}
    values = {name: value for name, value in body.items() if name in names}
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    if "structured_outputs" in values:
        values["structured_outputs"] = json.dumps(values["structured_outputs"])
    values["logit_bias"] = tuple((int(token), bias) for token, bias in (body.get("logit_bias") or {}).items())
    return SamplingParams(**values)


def _logprobs(delta: TokenDelta, top: int) -> dict[str, Any]:
    """As vLLM: the chosen token is among the top ones, added as one more where it is none of them."""
    return {
        "text_offset": [0] * len(delta.token_ids),
        "tokens": [f"token_id:{token_id}" for token_id in delta.token_ids],
        "token_logprobs": [position.chosen.logprob for position in delta.logprobs],
        "top_logprobs": [
            {f"token_id:{each.token_id}": each.logprob for each in (position.chosen, *position.top)}
            for position in delta.logprobs
        ],
    }


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return body


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}


def _answer(writer: asyncio.StreamWriter, status: int, content: Any, kind: str = "application/json") -> None:
    body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def _event(writer: asyncio.StreamWriter, content: Any) -> None:
    data = b"data: " + json.dumps(content).encode() + b"\n\n"
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
