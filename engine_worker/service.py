"""The worker's gRPC service: a thin shell around the instance."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias

import grpc

from controlplane.load_message import load_message, state_code
from controlplane.media_message import expanded_message, prompt_media
from controlplane.model.request import engine_priority
from controlplane.protocols.migration.source_events import MigrationOutcome
from engine_worker import wire
from engine_worker.engines.lora import LoraEngine
from engine_worker.engines.media import MediaEngine
from engine_worker.instance import Instance
from engine_worker.pooling import PoolingQueue
from engine_worker.step_watch import StepWatches
from engine_worker.streams import OutputStream
from mesh.errors import (
    AdapterNotFound,
    AdapterUnavailable,
    ConfigurationError,
    EngineFailed,
    ProtocolViolation,
    QueueFull,
    RequestRefused,
    StaleLeader,
)
from mesh.leadership_state import Fence
from mesh.runtime import Threads
from mesh.text_files import TextFiles, pieces, read_text_files, text_hash
from penstock.v1 import request_pb2, worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
STEP_SAMPLES_EVERY_S = 0.1
MAX_EXPANDED_AT_ONCE = 4
"""Prompts with images: decoding them takes a core each."""
CANNOT_MOVE = "the engine of this worker cannot move requests"

Context: TypeAlias = grpc.aio.ServicerContext
Inbound = AsyncIterator[worker_pb2.FrontendMessage]


class RequestMover(Protocol):
    """How requests leave this instance; the coordinator implements it."""

    async def migrate(self, request_id: str, target_id: str, *, stop_and_copy: bool = False) -> MigrationOutcome:
        """Move one request and wait for the end of it. `stop_and_copy` pauses the request for the whole copy, for
        comparisons."""

    def transfer(self, request_id: str, target_id: str) -> None:
        """The request, just admitted, is or may be decoded elsewhere: see `Coordinator.transfer`."""

    def leave(self) -> None:
        """Move all, then end the process. Once is enough, more is no harm."""


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """gRPC service penstock.v1.Worker: request streams, load, and orders to drain and to migrate."""

    def __init__(
        self,
        instance: Instance,
        clock: Callable[[], float],
        threads: Threads,
        mover: RequestMover | None = None,
        steps: StepWatches | None = None,
        device: str = "",
        fence: Fence | None = None,
        pooling: PoolingQueue | None = None,
        expander: MediaEngine | None = None,
        lora: LoraEngine | None = None,
        made_text: TextFiles | None = None,
    ) -> None:
        """`mover` if requests can move away from here, `steps` if the engine's steps can be watched, `pooling` if the
        model is a pooling model, `expander` if it takes images or the like, `lora` if the engine serves LoRA adapters.
        `fence` knows the leaders whose orders are taken; `made_text` is what frontends need and the checkpoint has
        not."""
        self._fence = fence or Fence()
        self._instance = instance
        self._steps = steps
        self._device = device
        self._clock = clock
        self._threads = threads
        self._pooling = pooling
        self._lora = lora
        self._made_text = made_text or {}
        self._mover = mover
        self._expander = expander
        self._expanding = asyncio.Semaphore(MAX_EXPANDED_AT_ONCE)

    async def Stream(self, inbound: Inbound, context: Context) -> None:
        """The data path; the end of it aborts its requests. A frontend that only closes its sending side still
        gets all answers."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                hello = await _read_hello(inbound)
        except TimeoutError:
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, "no hello came; send FrontendHello first")
        except ProtocolViolation as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not self._instance.has_room:
            message = f"{len(self._instance.streams)} frontends are connected, or the worker is stopping"
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        frontend_id = hello.frontend_id
        if hello.is_reconnect:
            self._instance.drop_orphans(frontend_id)
        stream = self._instance.open_stream(frontend_id, wants_heartbeats=hello.wants_heartbeats)
        log.info("a frontend has connected", extra={"frontend_id": frontend_id})
        try:
            await self._exchange(inbound, stream, context)
        except ProtocolViolation as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self._instance.close_stream(stream)
            log.info("a frontend has gone", extra={"frontend_id": frontend_id})
        if stream.is_cut:
            # Returns when the frontend reads again or its connection ends; until then gRPC keeps the call.
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, stream.cut_reason.result())

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.DescribeResponse:
        """The instance's identity, model, engine and limits, and its device."""
        return worker_pb2.DescribeResponse(
            instance=wire.description_message(self._instance.description),
            state=state_code(self._instance.state),
            device=self._device,
        )

    async def WatchSteps(
        self, request: worker_pb2.WatchStepsRequest, context: Context
    ) -> AsyncIterator[worker_pb2.StepSamples]:
        """Every engine step from now on, until the caller hangs up."""
        if self._steps is None:
            await _abort(context, grpc.StatusCode.UNIMPLEMENTED, "this worker does not tell of its steps")
        try:
            with self._steps.watch() as watch:
                while True:
                    yield wire.step_samples_message(await watch.take())
                    await asyncio.sleep(STEP_SAMPLES_EVERY_S)
        except RequestRefused as error:
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

    async def GetTextFiles(
        self, request: worker_pb2.GetTextFilesRequest, context: Context
    ) -> AsyncIterator[worker_pb2.TextFilePiece]:
        """The files that turn this model's text into tokens, if they are still those that were announced."""
        try:
            read = await self._threads.run(read_text_files, Path(self._instance.description.model_path))
        except ConfigurationError as error:
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        files = {**read, **self._made_text}
        if await self._threads.run(text_hash, files) != request.text_hash:
            message = "the tokenizer's files have changed since this worker was started: restart it"
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, message)
        for file, content in pieces(files):
            yield worker_pb2.TextFilePiece(file=file, content=content)

    async def Pool(self, request: worker_pb2.PoolRequest, context: Context) -> worker_pb2.PoolResponse:
        """Vectors or scores of prompts. A caller that hangs up takes them back."""
        if self._pooling is None or request.model != self._instance.description.model:
            message = f"this worker pools nothing for {request.model!r}: it serves {self._instance.description.model!r}"
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, message)
        try:
            parameters = wire.pooling_parameters(request)
            prompts = [prompt.token_ids for prompt in request.prompts]
            results = await self._pooling.pool(
                request.request_id,
                prompts,
                parameters,
                engine_priority(request.priority),
                request.first_segment_tokens,
            )
        except QueueFull as error:
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except RequestRefused as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except EngineFailed as error:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))
        return wire.pool_response(results)

    async def ExpandMedia(
        self, request: worker_pb2.ExpandMediaRequest, context: Context
    ) -> worker_pb2.ExpandMediaResponse:
        """A prompt with the tokens of its images and the like."""
        if self._expander is None or request.model != self._instance.description.model:
            message = (
                f"this worker takes text only, or no {request.model!r}: it serves {self._instance.description.model!r}"
            )
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, message)
        try:
            async with self._expanding:
                expanded = await self._expander.expand(prompt_media(request.media))
        except RequestRefused as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except EngineFailed as error:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))
        return expanded_message(expanded)

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: Context
    ) -> worker_pb2.LoadAdapterResponse:
        """Load a LoRA adapter, for an operator who wants to know whether it can be."""
        if self._lora is None:
            message = "this worker serves no LoRA adapters: start it with --engine-arg enable_lora=true"
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, message)
        try:
            loaded = await self._lora.load_adapter(wire.adapter_of(request.adapter))
        except AdapterNotFound as error:
            await _abort(context, grpc.StatusCode.NOT_FOUND, str(error))
        except AdapterUnavailable as error:
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except EngineFailed as error:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))
        return worker_pb2.LoadAdapterResponse(digest=loaded.digest)

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: Context
    ) -> worker_pb2.UnloadAdapterResponse:
        """Drop an adapter, unless a request uses it: then it goes when room is needed."""
        if self._lora is not None:
            await self._lora.unload_adapter(request.digest)
        return worker_pb2.UnloadAdapterResponse()

    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: Context) -> worker_pb2.GetLoadResponse:
        """The load and the state at this moment, not as last reported."""
        load = load_message(self._instance.load(), self._instance.state)
        return worker_pb2.GetLoadResponse(load=load)

    async def ListRequests(
        self, request: worker_pb2.ListRequestsRequest, context: Context
    ) -> worker_pb2.ListRequestsResponse:
        """Requests inside the engine, in the order of their admission."""
        now_s = self._clock()
        live = self._instance.table.live()
        return worker_pb2.ListRequestsResponse(
            requests=[wire.running_request_message(tracked, now_s) for tracked in live]
        )

    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:
        """Take nothing new from now on; with `migrate`, move what runs elsewhere, then end the process."""
        running = self._instance.start_draining()
        if request.migrate:
            if self._mover is None:
                await _abort(context, grpc.StatusCode.UNIMPLEMENTED, CANNOT_MOVE)
            self._mover.leave()
        return worker_pb2.DrainResponse(running_requests=running)

    async def Migrate(self, request: worker_pb2.MigrateRequest, context: Context) -> worker_pb2.MigrateResponse:
        """Move a request; answers when it has moved, or says why it stayed. A call that is given up cancels it."""
        if self._mover is None:
            return worker_pb2.MigrateResponse(moved=False, reason=CANNOT_MOVE)
        if request.HasField("fencing"):
            order = request.fencing
            try:
                self._fence.check(order.duty, order.epoch, order.leader)
            except StaleLeader as error:
                log.error("an order is refused", extra={"request_id": request.request_id, "reason": str(error)})
                highest = self._fence.highest(order.duty)
                return worker_pb2.MigrateResponse(moved=False, reason=str(error), highest_epoch=highest)
        outcome = await self._mover.migrate(
            request.request_id, request.target_instance_id, stop_and_copy=request.stop_and_copy
        )
        return worker_pb2.MigrateResponse(
            moved=outcome.moved,
            reason=outcome.reason,
            rounds=outcome.rounds,
            blocks=outcome.blocks,
            paused_ms=outcome.paused_ms or 0.0,
        )

    async def _exchange(self, inbound: Inbound, stream: OutputStream, context: Context) -> None:
        """Read and write until the stream is over or cut; raise what broke it."""
        hello = await stream.take()
        assert hello is not None, "a new stream begins with its hello"
        # Before anything else may abort: grpc.aio sends the initial metadata with the first message, and once more with
        # a status that comes meanwhile. That batch is refused, and the caller waits for good.
        await context.write(hello)
        reader = asyncio.create_task(self._read(inbound, stream))
        writer = asyncio.create_task(_write(stream, context))
        try:
            await _until_over(reader, writer, stream)
        finally:
            for task in (reader, writer):
                task.add_done_callback(_end_heard)
                task.cancel()

    async def _read(self, inbound: Inbound, stream: OutputStream) -> None:
        async for message in inbound:
            stream.heard_messages += 1
            match message.WhichOneof("message"):
                case "generate":
                    self._submit(stream, message.generate)
                case "abort":
                    abort = message.abort
                    self._instance.abort(stream, abort.request_id, abort.epoch, is_done=abort.is_done)
                case "adopt":
                    self._instance.adopt(stream, message.adopt.client_request_id, message.adopt.question)
                case "release":
                    self._instance.release(stream, message.release.request_id, message.release.epoch)
                case other:
                    raise ProtocolViolation(f"after the hello come generate, abort, adopt and release, not {other}")
        self._instance.end_input(stream)

    def _submit(self, stream: OutputStream, generate: request_pb2.GenerateRequest) -> None:
        moves = generate.decode_instance_id or generate.is_decode_open

        def submitted() -> None:
            if moves:
                self._order_transfer(generate.request_id, generate.decode_instance_id)

        self._instance.submit(
            stream,
            wire.engine_request(generate),
            model=generate.model,
            deadline_ms=generate.deadline_ms,
            epoch=generate.epoch,
            prefix=wire.prefix_source(generate),
            belief=wire.queue_belief(generate),
            submitted=submitted,
        )

    def _order_transfer(self, request_id: str, target_id: str) -> None:
        if self._mover is not None:
            self._mover.transfer(request_id, target_id)
            return
        extra = {"request_id": request_id, "target": target_id, "reason": CANNOT_MOVE}
        log.error("a request is decoded where it was prefilled: requests cannot move from here", extra=extra)


async def _read_hello(inbound: Inbound) -> worker_pb2.FrontendHello:
    async for message in inbound:
        if message.WhichOneof("message") != "hello" or not message.hello.frontend_id:
            raise ProtocolViolation("the first message must be a FrontendHello with a frontend_id")
        return message.hello
    raise ProtocolViolation("the stream ended before its hello")


async def _write(stream: OutputStream, context: Context) -> None:
    while (message := await stream.take()) is not None:
        await context.write(message)


async def _until_over(reader: asyncio.Task[None], writer: asyncio.Task[None], stream: OutputStream) -> None:
    """Return when the stream is written to its end or cut; raise what broke it."""
    waiting: list[asyncio.Future[Any]] = [reader, writer, stream.cut_reason]
    while not writer.done() and not stream.is_cut:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for finished in [each for each in waiting if each.done()]:
            finished.result()
            waiting.remove(finished)


def _end_heard(task: asyncio.Task[None]) -> None:
    """Where both failed, one has said why."""
    if not task.cancelled():
        task.exception()


async def _abort(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(code, message)
    raise AssertionError("abort returned")
