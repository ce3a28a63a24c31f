"""Requests that leave: blocks published, the request paused, resumed or released. The source's half of
`MovableEngine`."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from engine_worker.engines.movable import ExportProgress, PausedRequest
from engine_worker.engines.vllm.carriers import UnreadRequests
from engine_worker.engines.vllm.connector.channel import CoreChannel
from engine_worker.engines.vllm.connector.messages import (
    ExpectPause,
    Export,
    PausedNotice,
    Published,
    Release,
    Withdraw,
)
from engine_worker.engines.vllm.running import EngineRequestState, Pause
from mesh.errors import EngineFailed

_ASK_AGAIN_S = 0.002


@dataclass(slots=True)
class _Export:
    running: EngineRequestState
    on_progress: Callable[[ExportProgress], None]
    block_ids: list[int] = field(default_factory=list)
    told_blocks: int = -1


class Exports:
    """The source's half of `MovableEngine` for vLLM: requests that are about to leave."""

    def __init__(
        self,
        channel: CoreChannel,
        core: UnreadRequests,
        block_tokens: int,
        go_on: Callable[[EngineRequestState], None],
    ) -> None:
        """`go_on` submits a paused request again."""
        self._go_on = go_on
        self._channel = channel
        self._core = core
        self._block_tokens = block_tokens
        self._exports: dict[str, _Export] = {}

    def export(
        self,
        running: EngineRequestState,
        migration_id: str,
        kv_token: str,
        on_progress: Callable[[ExportProgress], None],
    ) -> None:
        export = self._exports[migration_id] = _Export(running, on_progress)
        self._channel.send(Export(running.request_id, migration_id, kv_token))
        self._tell(export)

    def withdraw(self, migration_id: str) -> None:
        if self._exports.pop(migration_id, None) is not None:
            self._channel.send(Withdraw(migration_id))

    async def pause(self, running: EngineRequestState) -> PausedRequest | None:
        """See `MovableEngine.pause`. Also None if the pause was taken back meanwhile."""
        pause = running.pause = Pause(asyncio.get_running_loop().create_future())
        while not (internal_id := str(await self._channel.call(ExpectPause(running.request_id)))):
            # It is on its way to the engine core, or its last delta is on its way from there.
            await asyncio.wait([pause.notice], timeout=_ASK_AGAIN_S)
            if pause.notice.done():
                return None
        await self._core.take_out(running.request_id, internal_id)
        notice = await pause.notice
        if notice is None or pause.is_taken_back:
            return None
        await pause.reached.wait()
        if pause.is_taken_back:
            return None
        if running.serving is not None:
            running.serving.cancel()
        return PausedRequest(
            emitted_token_ids=running.request.emitted_token_ids + notice.generated_token_ids,
            computed_tokens=notice.computed_tokens,
            block_ids=notice.block_ids,
        )

    def noticed(self, notice: PausedNotice, running: EngineRequestState | None) -> None:
        """The engine core has paused a request."""
        pause = None if running is None else running.pause
        if running is None or pause is None or pause.notice.done():
            self._channel.send(Release(notice.internal_id))
            return
        pause.notice.set_result(notice)
        self.delivered(running)

    def published(self, notice: Published) -> None:
        """The engine core has published more blocks."""
        export = self._exports.get(notice.migration_id)
        if export is not None:
            export.block_ids[notice.first_block :] = notice.block_ids
            self._tell(export)

    def delivered(self, running: EngineRequestState) -> None:
        """Tokens of the request were put out."""
        pause = running.pause
        if pause is not None and pause.notice.done() and running.offset >= running.expects():
            pause.reached.set()
            if pause.is_taken_back:
                self._go_on(running)
        # Whoever is told may withdraw.
        for export in tuple(self._exports.values()):
            if export.running is running:
                self._tell(export)

    def ended(self, running: EngineRequestState) -> None:
        """The request ended by itself: its exports end, and whoever waits for its pause learns so."""
        pause = running.pause
        if pause is not None and pause.notice.done():
            # Aborted between the pause and the last of its tokens.
            pause.is_taken_back = True
            pause.reached.set()
            self._release(running)
        elif pause is not None:
            pause.notice.set_result(None)

    def resume(self, running: EngineRequestState) -> None:
        """See `MovableEngine.resume`. It goes on as soon as all that it has generated was put out."""
        if running.pause is not None:
            running.pause.is_taken_back = True
            self.delivered(running)

    def resumed(self, running: EngineRequestState) -> None:
        """Free what is held of a paused request, which is about to be submitted again with what it has emitted."""
        self._withdraw_of(running)
        notice = self._release(running)
        if notice is not None:
            emitted = running.request.emitted_token_ids + notice.generated_token_ids
            running.request = replace(running.request, emitted_token_ids=emitted)
        running.pause = None

    def release(self, running: EngineRequestState) -> None:
        self._withdraw_of(running)
        self._release(running)

    def fail(self, reason: str, requests: Iterable[EngineRequestState]) -> None:
        """The engine is dead, and these were in it."""
        for running in requests:
            if running.pause is not None and not running.pause.notice.done():
                running.pause.notice.set_exception(EngineFailed(reason))
        self._exports.clear()

    def _release(self, running: EngineRequestState) -> PausedNotice | None:
        notice = None if running.pause is None else running.pause.notice.result()
        if notice is not None:
            self._channel.send(Release(notice.internal_id))
        return notice

    def _withdraw_of(self, running: EngineRequestState) -> None:
        # `Release` withdraws what was exported of the request; nothing more is to be told of it.
        for migration_id in [name for name, export in self._exports.items() if export.running is running]:
            del self._exports[migration_id]

    def _tell(self, export: _Export) -> None:
        """Report blocks only once their tokens have been delivered."""
        running = export.running
        context = len(running.request.prompt_token_ids) + running.offset
        blocks = min(len(export.block_ids), context // self._block_tokens)
        if blocks > export.told_blocks:
            export.told_blocks = blocks
            export.on_progress(ExportProgress(tuple(export.block_ids[:blocks]), running.offset))
