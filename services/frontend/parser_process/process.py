"""The one process of a frontend with vLLM's own parts: started when a model or a request needs it, watched, and started
anew when it is lost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import grpc

from mesh.backoff import Backoff
from mesh.errors import ConfigurationError, PeerUnavailable
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Threads, Transport
from mesh.tasks import TaskSet
from mesh.text_files import TextFiles
from penstock.v1 import parser_pb2, parser_pb2_grpc
from services.frontend.metrics import FrontendMetrics
from services.frontend.parser_process.launcher import Launched, Launcher

log = logging.getLogger(__name__)

START_DEADLINE_S: Final = 180.0
"""8 s of CPU are usual; a busy machine takes many times as long."""
CALL_DEADLINE_S: Final = 60.0
"""For a model to be loaded, and for a request to be rendered or prepared."""
MAX_FAILURES: Final = 3
"""In a row, of one request or answer: then it is what the process cannot do."""
CLOSE_GRACE_S: Final = 5.0
"""For calls over the connection to a process that has ended to find that out by themselves."""
PEER: Final = "the parser process"

Answer = TypeVar("Answer")


@dataclass(eq=False, slots=True)
class Life:
    """One process."""

    launched: Launched
    channel: grpc.aio.Channel
    stub: parser_pb2_grpc.ParserStub
    ended: bool = False


class ParserProcess:
    """Nothing runs before the first call. Whoever has begun an answer in a process that is lost asks `life` for the
    next one."""

    def __init__(self, launcher: Launcher, transport: Transport, threads: Threads, metrics: FrontendMetrics) -> None:
        self._launcher = launcher
        self._transport = transport
        self._threads = threads
        self._metrics = metrics
        self._tasks = TaskSet("parser process")
        self._life: Life | None = None
        self._starting: asyncio.Task[Life] | None = None
        self._started = 0
        self._backoff = Backoff(0.1, 5.0)
        self._pause_s = 0.0
        self._is_stopped = False
        self._trouble = ""
        self.replaying = asyncio.Lock()
        """Held by the one answer that is read anew. One at a time, so that an answer on which the parsers hang is found
        out: it alone fails again."""

    @property
    def state(self) -> str:
        """For operators; empty where none was needed yet."""
        if self._life is not None:
            return "running"
        if self._starting is not None:
            return f"starting{self._trouble}"
        return f"down{self._trouble}" if self._started else ""

    @property
    def pid(self) -> int | None:
        """Of the process that runs, if one does."""
        return None if self._life is None else self._life.launched.pid

    async def life(self) -> Life:
        """The process that runs, or the next one. Raises PeerUnavailable and ConfigurationError if there is none."""
        if self._life is not None:
            return self._life
        if self._starting is None:
            self._launcher.check()
            self._starting = self._tasks.spawn(self._start(), name="start")
        return await asyncio.shield(self._starting)

    async def ask(self, call: Callable[[parser_pb2_grpc.ParserStub], Awaitable[Answer]]) -> Answer:
        """Make a call of the process, and of the next one where it is lost. Raises PeerUnavailable and
        ConfigurationError if there is none; what else the call raises."""
        for _ in range(MAX_FAILURES):
            life = await self.life()
            try:
                return await call(life.stub)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise
                self.kill(life, f"it did not answer: {error.details()}")
                log.warning("the next parser process is asked", extra={"error": error.details()})
        raise PeerUnavailable(f"{PEER} was lost {MAX_FAILURES} times over this request")

    async def load(self, model: parser_pb2.ParserModel, *, renders: bool = False) -> None:
        """Make sure of a model's parsers and, if it `renders`, of what makes its prompts. Raises ConfigurationError for
        names that vLLM has not, or cannot use with this model; RpcError."""
        life = await self.life()
        request = parser_pb2.LoadParserRequest(model=model, renders=renders)
        try:
            loaded = await life.stub.Load(request, timeout=CALL_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise ConfigurationError(str(error.details())) from error
            raise rpc_error(error, PEER) from error
        extra = {"tools": model.tool_parser, "reasoning": model.reasoning_parser, "vllm": loaded.vllm_version}
        log.info("vLLM's own parts serve a model", extra={**extra, "renders": renders})

    async def folder_of(self, name: str, files: TextFiles) -> Path:
        """A directory with a model's files, for the process."""
        folder = self._launcher.folder / name
        await self._threads.run(_write, folder, files)
        return folder

    def kill(self, life: Life, reason: str) -> None:
        """End a process that does not answer; the next one is started. No effect on one that is lost already."""
        self._lose(life, reason)
        life.launched.kill()

    @property
    def is_possible(self) -> bool:
        """Whether this machine has what it runs."""
        try:
            self._launcher.check()
        except ConfigurationError:
            return False
        return True

    def count_prompt(self) -> None:
        """A prompt was made."""
        self._metrics.outside_prompts.inc()

    def count_answer(self) -> None:
        """An answer is begun."""
        self._metrics.outside_answers.inc()

    def count_replay(self) -> None:
        """An answer is read anew."""
        self._metrics.parser_replays.inc()

    async def stop(self) -> None:
        """End the process and remove what it was given."""
        self._is_stopped = True
        if self._life is not None:
            self._life.launched.kill()
        await self._tasks.cancel()
        if self._life is not None:
            await self._life.channel.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_GRACE_S):
                    await self._life.launched.wait()
        self._launcher.close()

    async def _start(self) -> Life:
        try:
            await asyncio.sleep(self._pause_s)
            life = await self._started_process()
        except BaseException as error:
            self._pause_s = self._backoff.next_s()
            self._trouble = f": {error}"
            raise
        finally:
            self._starting = None
        self._life, self._trouble, self._pause_s = life, "", 0.0
        self._backoff.reset()
        self._tasks.spawn(self._watch(life), name="watch")
        return life

    async def _started_process(self) -> Life:
        self._started += 1
        socket = str(self._launcher.folder / f"{self._started}.sock")
        try:
            launched = await self._launcher.launch(socket)
        except OSError as error:
            raise PeerUnavailable(f"{PEER} cannot be started: {error}") from error
        channel = open_channel(self._transport, f"unix:{socket}")
        ready, ended = asyncio.ensure_future(channel.channel_ready()), asyncio.ensure_future(launched.wait())
        try:
            await asyncio.wait((ready, ended), timeout=START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and not ended.done():
                stub = parser_pb2_grpc.ParserStub(channel)  # type: ignore[no-untyped-call]
                return Life(launched, channel, stub)
            reason = (
                f"ended with status {ended.result()} before it answered; the frontend's log has its last words"
                if ended.done()
                else f"did not answer within {START_DEADLINE_S:g} s"
            )
            log.error("the parser process did not start", extra={"pid": launched.pid, "reason": reason})
            raise PeerUnavailable(f"{PEER} {reason}")
        except BaseException:
            launched.kill()
            await channel.close()
            raise
        finally:
            ready.cancel()
            ended.cancel()

    async def _watch(self, life: Life) -> None:
        status = await life.launched.wait()
        self._lose(life, f"ended with status {status}")
        await life.channel.close(CLOSE_GRACE_S)

    def _lose(self, life: Life, reason: str) -> None:
        if life.ended or self._is_stopped:
            return
        life.ended = True
        self._life = None
        self._trouble = f": the last one {reason}"
        self._metrics.parser_losses.inc()
        log.error("the parser process is lost; the next one is started", extra={"reason": reason})
        if self._starting is None:
            self._starting = self._tasks.spawn(self._start(), name="start")


def _write(folder: Path, files: TextFiles) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
