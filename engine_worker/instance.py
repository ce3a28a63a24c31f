"""The living instance: engine, request table and output streams together, on one event loop."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from itertools import count

from msgspec import structs

from controlplane.model.instance import InstanceDescription, InstanceState, LoadReport
from controlplane.model.queue_belief import QueueBelief
from controlplane.model.request import EngineRequest, FinishReason, PrefixSource, StepOutput, TokenDelta
from engine_worker import wire
from engine_worker.admission import refusal
from engine_worker.bouncing import bounce
from engine_worker.deltas import Failure, FailureCode
from engine_worker.engine_stats import EngineStats
from engine_worker.engines.interface import Engine
from engine_worker.engines.lora import serves_adapters
from engine_worker.engines.media import takes_media
from engine_worker.liveness import HangDetector, Heartbeats
from engine_worker.metrics import WorkerMetrics
from engine_worker.prefix_pull.interface import PrefixPulls
from engine_worker.reported_load import reported_load
from engine_worker.request_spans import RequestSpans
from engine_worker.request_table import Instructions, RequestTable
from engine_worker.settings import WorkerSettings
from engine_worker.streams import OutputStream
from mesh.errors import AdapterUnavailable, EngineFailed, QueueFull, RequestRefused
from mesh.tracing import NO_TRACES, Tracer

log = logging.getLogger(__name__)


class Instance:
    """Decides nothing itself: asks the table, then tells engine and streams. Every method runs on the event
    loop and, `run` and the waits apart, returns at once."""

    def __init__(
        self,
        engine: Engine,
        description: InstanceDescription,
        settings: WorkerSettings,
        metrics: WorkerMetrics,
        clock: Callable[[], float],
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self.description = description
        self.spans = RequestSpans(tracer, description.instance_id)
        self.stats = EngineStats(metrics, clock)
        self.table = RequestTable(settings.max_orphans if settings.orphan_s > 0 else 0)
        self._tails_turn_s = clock()
        self.state = InstanceState.READY
        self.streams: dict[int, OutputStream] = {}
        self.on_change: list[Callable[[], None]] = []
        """Called after each step and each change of state."""
        self.on_hang_change: list[Callable[[], None]] = []
        """Called when the engine begins or ceases to hang."""
        self.on_handoff: list[Callable[[str], None]] = []
        """Called with the id of a request that is another instance's from now on."""
        self.keep_abort: Callable[[str], bool] = lambda _: False
        """Whether an abort of this request has to wait; asked before the engine aborts it (see `coordinator`)."""
        self.may_adopt: Callable[[str], bool] = lambda _: True
        """Whether a frontend may have this request now, for a client that came back; asked before it gets it. False of
        one that is between two instances: the frontend finds it when it asks again."""
        self.supersede: Callable[[str, int], bool] = lambda request_id, epoch: False
        """Have what moves to here of a request's lives up to this epoch discarded; called where the engine refuses the
        next one. Whether the request moves to or from here, or did so a moment ago."""
        self.pulls: PrefixPulls | None = None
        """None where prefixes cannot be pulled."""
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._hang = HangDetector(settings.hang_s)
        self._heartbeats = Heartbeats()
        self._stream_ids = count(1)
        self.last_load = LoadReport()
        """The engine's load as of the last tick, for other threads."""
        self.transfer_obstacle = ""
        """Why no request can be moved to or from here, although the engine could; empty if it can."""
        self._drained = asyncio.Event()
        self._no_streams = asyncio.Event()
        self._closed_reason = ""

    async def run(self) -> None:
        """Pass the engine's output on until `stop`. Raises EngineFailed when the engine dies; every request has
        been told by then."""
        try:
            async for step in self._engine.outputs():
                self._on_step(step)
            if not self._closed_reason:
                raise EngineFailed("the engine ended its output without being asked to stop")
        except EngineFailed as error:
            log.critical("the engine died", extra={"error": str(error), "requests": len(self.table)})
            self._closed_reason = "the engine died"
            self._carry_out(self.table.fail_all(FailureCode.UNAVAILABLE, str(error)), engine_lives=False)
            raise

    @property
    def has_room(self) -> bool:
        """Whether another frontend may connect: the worker is not closing and has fewer than `max_streams` streams."""
        return not self._closed_reason and len(self.streams) < self._settings.max_streams

    def open_stream(self, frontend_id: str, *, wants_heartbeats: bool = False) -> OutputStream:
        """A stream for one frontend; look at `has_room` first."""
        stream = OutputStream(
            next(self._stream_ids),
            frontend_id,
            max_messages=self._settings.stream_buffer_messages,
            max_bytes=self._settings.stream_buffer_bytes,
            wants_heartbeats=wants_heartbeats,
        )
        self.streams[stream.stream_id] = stream
        self._no_streams.clear()
        stream.put(wire.hello_message(self.description.instance_id, self.description.incarnation_id))
        return stream

    def end_input(self, stream: OutputStream) -> None:
        """The frontend will send nothing more: close its stream once its requests have ended."""
        stream.input_ended = True
        self._close_if_finished(stream)

    def close_stream(self, stream: OutputStream) -> None:
        """The stream is gone: abort what it asked for, but for what another frontend may go on with."""
        if self.streams.pop(stream.stream_id, None) is not None:
            before = self.table.orphaned_total
            self._carry_out(self.table.close_stream(stream.stream_id, None if stream.is_cut else self._orphans_end_s()))
            if orphaned := self.table.orphaned_total - before:
                self._metrics.orphaned.inc(orphaned)
                log.warning(
                    "requests wait for another frontend",
                    extra={
                        "frontend_id": stream.frontend_id,
                        "requests": orphaned,
                        "orphan_s": self._settings.orphan_s,
                    },
                )
        if not self.streams:
            self._no_streams.set()

    def submit(
        self,
        stream: OutputStream,
        request: EngineRequest,
        *,
        model: str,
        deadline_ms: int = 0,
        epoch: int = 0,
        prefix: PrefixSource | None = None,
        belief: QueueBelief | None = None,
        submitted: Callable[[], None] = lambda: None,
    ) -> None:
        """Hand a request to the engine, or answer why not. Its deltas are sent under `epoch`. `prefix`: pull that
        first. `belief`: what its placement believed of this instance. `submitted` is called once the engine has it."""
        if stream.is_cut:
            return
        if (duplicate := self.table.refuse_duplicate(stream.stream_id, request.request_id, epoch)) is not None:
            self._carry_out(duplicate)
            return
        failure = self._admission_failure(request, model)
        failure = failure or bounce(request, belief, self._engine.load(), self.table, self._settings.bounce_tokens)
        pulls, awaited = self.pulls, None
        if failure is None and pulls is not None:
            awaited = pulls.awaited(request, prefix)
        if failure is None and awaited is None:
            failure = self._submit_to_engine(request, epoch)
        if failure is not None:
            instructions = Instructions()
            instructions.send(stream.stream_id, failure, epoch)
            self._carry_out(instructions)
            return
        now_s = self._clock()
        self.table.admit(
            request,
            stream_id=stream.stream_id,
            frontend_id=stream.frontend_id,
            now_s=now_s,
            deadline_s=now_s + deadline_ms / 1000 if deadline_ms else None,
            epoch=epoch,
            new_prefill_tokens=None if belief is None else belief.new_prefill_tokens,
        )
        self.spans.begin(request)
        if pulls is None or awaited is None:
            submitted()
        else:
            pulls.begin(request, awaited, lambda: self._submit_pulled(request, submitted))
        self._changed()

    def _submit_pulled(self, request: EngineRequest, submitted: Callable[[], None]) -> None:
        """Its prefix is here, or is not waited for any longer."""
        tracked = self.table.find(request.request_id)
        failure = self._submit_to_engine(request, 0 if tracked is None else tracked.epoch)
        if failure is None:
            submitted()
            return
        self.table.take_out(request.request_id)
        self.spans.end(request.request_id, failure.message)
        instructions = Instructions()
        if tracked is not None and tracked.state != "discarded":
            instructions.send(tracked.stream_id, failure, tracked.epoch)
        self._carry_out(instructions)
        self._changed()

    def _withdraw_pulled(self, request_id: str) -> bool:
        """Whether the engine never heard of a request that is taken back: its end is told here instead."""
        if self.pulls is None or not self.pulls.withdraw(request_id):
            return False
        tracked = self.table.find(request_id)
        told = 0 if tracked is None else len(tracked.emitted_token_ids)
        end = StepOutput((TokenDelta(request_id, told, (), finish_reason=FinishReason.ABORT),))
        self.spans.step(end)
        self._carry_out(self.table.route(end))
        return True

    def abort(self, stream: OutputStream, request_id: str, epoch: int, *, is_done: bool = False) -> None:
        """Take a request of this stream back; see `RequestTable.abort`."""
        self._carry_out(self.table.abort(stream.stream_id, request_id, epoch, is_done=is_done))

    def release(self, stream: OutputStream, request_id: str, epoch: int) -> None:
        """The client of a request of this stream has left, and may come back to any frontend; see
        `RequestTable.release`."""
        before = self.table.orphaned_total
        self._carry_out(self.table.release(stream.stream_id, request_id, epoch, self._orphans_end_s()))
        self._metrics.orphaned.inc(self.table.orphaned_total - before)

    def drop_orphans(self, frontend_id: str) -> None:
        """This frontend is alive and has placed elsewhere what it had here."""
        self._carry_out(self.table.drop_orphans(frontend_id))

    def adopt(self, stream: OutputStream, client_request_id: str, question: int) -> None:
        """Give this stream's frontend all that is here of a client's request, and tell it what that is; `question` is
        the number that it asked under."""
        if stream.is_cut:
            return
        adoptions, instructions = self.table.adopt(
            client_request_id, stream.stream_id, stream.frontend_id, self.may_adopt
        )
        self._carry_out(instructions)
        model, now_s = self.description.model, self._clock()
        stream.put(wire.adopted_message(client_request_id, question, adoptions, model=model, now_s=now_s))
        self._drop_cut_streams([stream])
        if adoptions:
            self._metrics.adopted.inc(len(adoptions))
            log.info(
                "requests go on with another frontend",
                extra={"request_id": client_request_id, "frontend_id": stream.frontend_id, "choices": len(adoptions)},
            )

    def import_obstacle(self, request: EngineRequest, model: str, frontend_id: str) -> str | None:
        """Why a request cannot be taken over from another instance now; None if it can."""
        if self.table.find(request.request_id) is not None:
            return f"a request of the id {request.request_id} is here"
        if self._stream_of(frontend_id) is None:
            return f"frontend {frontend_id} has no stream to this instance"
        return (
            refusal(request, asked_model=model, served_model=self.description.model)
            or self._lack(request)
            or self._obstacle()
        )

    def take_over(self, request: EngineRequest, frontend_id: str, *, epoch: int, deadline_s: float | None) -> None:
        """The request is this instance's from now on; ask for the `import_obstacle` first, without a pause between."""
        stream = self._stream_of(frontend_id)
        assert stream is not None, "import_obstacle() has been asked"
        self.table.admit(
            request,
            stream_id=stream.stream_id,
            frontend_id=frontend_id,
            now_s=self._clock(),
            deadline_s=deadline_s,
            epoch=epoch,
            taken_over=True,
        )
        self.spans.begin(request, is_moved=True)
        self.stats.begin(request.request_id, is_moved=True)
        self._changed()

    def hand_off(self, request_id: str, instance_id: str, incarnation_id: str) -> None:
        """The request is another instance's: tell its frontend."""
        tracked = self.table.take_out(request_id)
        self.spans.end(request_id, moved_to=instance_id)
        self.stats.end(request_id)
        if tracked is not None and (stream := self.streams.get(tracked.stream_id)) is not None:
            moved = wire.moved_message(request_id, instance_id, incarnation_id, tracked.epoch + 1)
            self._metrics.message_bytes.observe(stream.put(moved))
            self._close_if_finished(stream)
            self._drop_cut_streams([stream])
        for callback in self.on_handoff:
            callback(request_id)
        self._carry_out(Instructions())
        self._changed()

    def give_up(self, request_id: str, reason: str) -> None:
        """Nobody is known to own the request any more: its frontend has to recover it."""
        tracked = self.table.take_out(request_id)
        self.spans.end(request_id, reason)
        self.stats.end(request_id)
        instructions = Instructions()
        if tracked is not None and tracked.state != "discarded":
            failure = Failure(request_id, len(tracked.emitted_token_ids), FailureCode.LOST, reason)
            instructions.send(tracked.stream_id, failure, tracked.epoch)
        self._carry_out(instructions)
        self._changed()

    def tick(self) -> None:
        """End requests past their deadline, look whether the engine hangs, and send heartbeats. Call it every 50 ms or
        so."""
        now_s = self._clock()
        expired = self.table.expired_orphans_total
        self._carry_out(self.table.expire(now_s))
        if self.table.expired_orphans_total != expired:
            self._metrics.expired_orphans.inc(self.table.expired_orphans_total - expired)
            log.warning("no frontend came for requests", extra={"requests": self.table.expired_orphans_total - expired})
        if now_s - self._tails_turn_s >= self._settings.orphan_s:
            self._tails_turn_s = now_s
            self.table.tails.turn()
        self.last_load = self._engine.load()
        kept_back = 0 if self.pulls is None else len(self.pulls)
        hang_changed = self._hang.observe(now_s, busy=len(self.table) > kept_back, load=self.last_load)
        self._send_heartbeats(now_s)
        if not hang_changed:
            return
        if self._hang.hung:
            log.critical(
                "the engine hangs: it has requests and makes no step",
                extra={"requests": len(self.table), "hang_s": self._settings.hang_s},
            )
        else:
            log.warning("the engine makes steps again")
        for callback in self.on_hang_change:
            callback()
        self._changed()

    @property
    def hung(self) -> bool:
        """The engine has requests and makes no step."""
        return self._hang.hung

    def load(self) -> LoadReport:
        """The load with all requests handed to the engine."""
        load = reported_load(self._engine.load(), self.table)
        if self.pulls is not None:
            load = structs.replace(load, pulls=self.pulls.totals)
        return structs.replace(load, transfer_obstacle=self.transfer_obstacle) if self.transfer_obstacle else load

    def start_draining(self) -> int:
        """Take nothing new from now on. Returns the number of requests that still run."""
        if self.state is not InstanceState.DRAINING:
            self.state = InstanceState.DRAINING
            log.info("draining", extra={"requests": len(self.table)})
            self._carry_out(Instructions())
            self._changed()
        return len(self.table.live())

    async def drained(self) -> None:
        """Return once no request is left; `start_draining` first."""
        await self._drained.wait()

    async def stop(self, flush_s: float) -> None:
        """End what still runs with UNAVAILABLE and give the streams `flush_s` to carry the news."""
        self._closed_reason = self._closed_reason or "the worker is stopping"
        message = f"{self._closed_reason}; another worker may take the request"
        self._carry_out(self.table.fail_all(FailureCode.UNAVAILABLE, message))
        for stream in self.streams.values():
            stream.close()
        if not self.streams:
            return
        try:
            async with asyncio.timeout(flush_s):
                await self._no_streams.wait()
        except TimeoutError:
            log.warning("some frontends did not read the end of their streams", extra={"streams": len(self.streams)})

    def _orphans_end_s(self) -> float | None:
        if self._closed_reason or self._settings.orphan_s <= 0:
            return None
        return self._clock() + self._settings.orphan_s

    def _send_heartbeats(self, now_s: float) -> None:
        busy = {tracked.stream_id for tracked in self.table.live()}
        streams = {key: stream for key, stream in self.streams.items() if stream.wants_heartbeats}
        for stream_id in self._heartbeats.due(now_s, {key: stream.messages for key, stream in streams.items()}, busy):
            streams[stream_id].put(wire.heartbeat_message(self._hang.stalled_s(now_s)))
        self._drop_cut_streams(streams.values())

    def _on_step(self, step: StepOutput) -> None:
        self._hang.note_step(self._clock())
        self.spans.step(step)
        strays = self.table.strays_total
        self._carry_out(self.table.route(step))
        if self.table.strays_total != strays:
            self._metrics.stray_deltas.inc(self.table.strays_total - strays)
            log.error("the engine went on with requests that are not here; this is a bug of the engine")
        self.stats.step(step, self._engine.load())
        self._changed()

    def _admission_failure(self, request: EngineRequest, model: str) -> Failure | None:
        served = self.description.model
        if (reason := refusal(request, asked_model=model, served_model=served)) is not None:
            return _failure(request, FailureCode.REFUSED, reason)
        if (lack := self._lack(request)) is not None:
            return _failure(request, FailureCode.UNAVAILABLE, f"{lack}; another worker may take the request")
        if (obstacle := self._obstacle()) is not None:
            return _failure(request, FailureCode.UNAVAILABLE, f"{obstacle}; another worker may take the request")
        return None

    def _lack(self, request: EngineRequest) -> str | None:
        """Why this instance cannot serve the request, although others of its model may."""
        if request.media is not None and not takes_media(self._engine):
            return "this instance takes text only"
        if request.adapter is not None and not serves_adapters(self._engine):
            return "this instance serves no LoRA adapters"
        return None

    def _obstacle(self) -> str | None:
        """Why nothing can be taken just now."""
        if self._closed_reason:
            return self._closed_reason
        if self.state is InstanceState.DRAINING:
            return "the worker is draining"
        if self.hung:
            return "the engine hangs"
        if len(self.table) >= self._settings.max_requests:
            return f"{len(self.table)} requests are here already, the limit"
        return None

    @property
    def frontends(self) -> frozenset[str]:
        """Ids of the frontends with a usable stream to this instance: whose requests it can take over."""
        return frozenset(stream.frontend_id for stream in self.streams.values() if _is_usable(stream))

    def _stream_of(self, frontend_id: str) -> OutputStream | None:
        """The newest usable stream of a frontend."""
        usable = (
            stream
            for stream in reversed(self.streams.values())
            if stream.frontend_id == frontend_id and _is_usable(stream)
        )
        return next(usable, None)

    def _submit_to_engine(self, request: EngineRequest, epoch: int) -> Failure | None:
        failure = self._refused(request, epoch)
        if failure is not None:
            self.table.shares.leave(request.request_id)
        return failure

    def _refused(self, request: EngineRequest, epoch: int) -> Failure | None:
        try:
            self._engine.submit(self.table.with_turn(request))
            self.stats.begin(request.request_id)
        except (QueueFull, AdapterUnavailable) as error:
            return _failure(request, FailureCode.UNAVAILABLE, str(error))
        except RequestRefused as error:
            # What moves may hold its id in the engine for a moment longer; that is no fault of the request.
            is_moving = self.supersede(request.request_id, epoch)
            return _failure(request, FailureCode.UNAVAILABLE if is_moving else FailureCode.REFUSED, str(error))
        except EngineFailed as error:
            return _failure(request, FailureCode.UNAVAILABLE, str(error))
        return None

    def _carry_out(self, instructions: Instructions, *, engine_lives: bool = True) -> None:
        if engine_lives:
            for request_id in instructions.aborts:
                if not self.keep_abort(request_id) and not self._withdraw_pulled(request_id):
                    self._engine.abort(request_id)
        for stream_id, deltas in instructions.messages.items():
            stream = self.streams[stream_id]
            self._metrics.message_bytes.observe(
                stream.put(wire.step_message(deltas, instructions.epochs, instructions.before))
            )
            self._close_if_finished(stream)
            self._metrics.count_failures(deltas)
        self._drop_cut_streams([self.streams[stream_id] for stream_id in instructions.messages])
        if self.state is InstanceState.DRAINING and not self.table.live():
            self._drained.set()

    def _drop_cut_streams(self, streams: Iterable[OutputStream]) -> None:
        for stream in streams:
            if stream.is_cut:
                log.error("a frontend is cut off", extra={"reason": stream.cut_reason.result()})
                self._metrics.cut_streams.inc()
                self.close_stream(stream)

    def _close_if_finished(self, stream: OutputStream) -> None:
        if stream.input_ended and not self.table.live(stream.stream_id):
            stream.close()

    def _changed(self) -> None:
        for callback in self.on_change:
            callback()


def _is_usable(stream: OutputStream) -> bool:
    """Whether the stream's frontend still reads it and may still send."""
    return not stream.is_cut and not stream.input_ended


def _failure(request: EngineRequest, code: FailureCode, message: str) -> Failure:
    return Failure(request.request_id, len(request.emitted_token_ids), code, message)
