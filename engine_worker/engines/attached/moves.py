"""How KV comes to and leaves an attached vLLM that was started with our connector: what `vllm.migrations` is for an
engine core of our own. Orders go over the connector's control socket, requests over HTTP as all others do."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from controlplane.model.request import EngineRequest
from engine_worker.adapters import NumberedAdapter
from engine_worker.engines.attached.client import ServerClient, ServerLost
from engine_worker.engines.attached.wire import StreamError, parse_chunk
from engine_worker.engines.hidden_state_source import HiddenStates
from engine_worker.engines.interface import EngineLimits
from engine_worker.engines.vllm.carriers import kv_parameters
from engine_worker.engines.vllm.connector.control import BEAT_S, SILENT_S
from engine_worker.engines.vllm.connector.messages import (
    Attach,
    Beat,
    Capture,
    Detach,
    EndedInstead,
    Notice,
    PausedNotice,
    States,
)
from engine_worker.engines.vllm.connector_moves import ConnectorMoves
from engine_worker.engines.vllm.hidden_states.message import CapturedStates
from engine_worker.engines.vllm.running import EngineRequestState
from mesh.errors import EngineFailed, KvTransferRefused, PenstockError, RequestRefused
from mesh.runtime import Clock
from mesh.tasks import TaskSet

log = logging.getLogger(__name__)

_ANSWER_S: Final = 5.0
_ATTACH_S: Final = SILENT_S + 3 * BEAT_S
_LEAVE_S: Final = 0.5
_WAITING_STATES: Final = 64


@dataclass(slots=True, eq=False)
class AttachedRequest(EngineRequestState):
    """A request at the server."""

    token_ids: list[int] = field(default_factory=list)
    """Generated there, as far as they have come."""
    cached_tokens: int | None = 0
    """To be told with the first delta; None once it was."""
    transfer_params: dict[str, Any] = field(default_factory=dict)
    """For the connector, with the first stream of it."""

    def continued(self) -> EngineRequest:
        """As it stands now: what a new stream has to go on with."""
        return replace(self.request, emitted_token_ids=(*self.request.emitted_token_ids, *self.token_ids))


class AttachedMoves(ConnectorMoves):
    """Those of the server that a worker is attached to."""

    def __init__(
        self,
        endpoint: str,
        token: str,
        client: ServerClient,
        clock: Clock,
        requests: Mapping[str, AttachedRequest],
        *,
        begin_again: Callable[[AttachedRequest], None],
        go_on: Callable[[EngineRequestState], None],
        lost: Callable[[str], None],
    ) -> None:
        """`begin_again`: a request whose stream was closed for a pause has ended meanwhile, with tokens that nobody
        has heard. `lost`: the control socket does not answer any more."""
        super().__init__(endpoint, "", requests, go_on, connects=True)
        self._attached = requests
        self._endpoint = endpoint
        self._token = token
        self._client = client
        self._clock = clock
        self._begin_again = begin_again
        self._lost = lost
        self._secret = ""
        self._block_tokens = 1
        self._model = ""
        self._sent: dict[str, str] = {}
        """The mesh's ids of requests, by the server's."""
        self._states: deque[CapturedStates] = deque(maxlen=_WAITING_STATES)
        self._has_states = asyncio.Event()
        self._tasks = TaskSet("attached moves")

    async def start(self, model: str, limits: EngineLimits) -> None:
        """Become the server's worker; one that was killed is waited out. Raises `EngineFailed` where that cannot be,
        and `ConfigurationError` where its blocks are none that could move."""
        self._model = model
        try:
            await self._attach()
        except TimeoutError:
            raise EngineFailed(
                f"nobody answers at {self._endpoint}: is the server started with Penstock's connector, and that as its "
                "control? `penstock attach URL --check` prints the flags"
            ) from None
        except PenstockError as error:
            raise EngineFailed(f"the server's connector does not take this worker: {error}") from error
        async with asyncio.timeout(_ANSWER_S):
            about = await self.agent.describe()
        if about.layout.block_tokens != limits.block_tokens:
            raise EngineFailed(
                f"KV blocks at {self._endpoint} have {about.layout.block_tokens} tokens, at {self._client.url} "
                f"{limits.block_tokens}: is it another server's?"
            )
        self._host, self._block_tokens = about.settings.host, limits.block_tokens
        self._begin(self, limits, None, about)
        self._tasks.spawn(self._beat(), name="beat")

    def begin(self, running: AttachedRequest, server_id: str) -> dict[str, Any]:
        """A stream of the request is about to begin, under this id: what its body is to have besides, so that it can
        move."""
        self._sent[f"cmpl-{server_id}-0"] = running.request_id
        told, running.transfer_params = running.transfer_params, {}
        running.staged = told.get("staged", "")
        return self._parameters({"request_id": running.request_id, **told})

    def ended(self, server_id: str) -> None:
        """That stream is over."""
        self._sent.pop(f"cmpl-{server_id}-0", None)

    async def run_unread(
        self,
        request_id: str,
        like: EngineRequest,
        token_ids: Sequence[int],
        transfer_params: Mapping[str, Any],
        priority: int,
        adapter: NumberedAdapter | None = None,
    ) -> str | None:
        """See `UnreadRequests`. The server may order requests by their arrival only, so it is told no priority."""
        if like.media is not None or like.adapter is not None:
            raise RequestRefused("requests with images or a LoRA adapter do not move to or from an attached server")
        body = {
            "model": self._model,
            "prompt": list(token_ids),
            "stream": True,
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "add_special_tokens": False,
            "request_id": request_id,
            **self._parameters(transfer_params),
        }
        if like.cache_salt:
            body["cache_salt"] = like.cache_salt
        reason: str | None = None
        try:
            async for data in self._client.stream("/v1/completions", body, {}):
                chunk = parse_chunk(data, None)
                if chunk is not None and chunk.finish_reason is not None:
                    reason = chunk.finish_reason.value
        except StreamError as error:
            if error.is_request:
                raise RequestRefused(error.reason) from error
            reason = "error"  # as it ends a carrier whose load failed; who asked knows why
        except ServerLost:
            reason = "abort"
        return reason

    async def take_out(self, request_id: str, internal_id: str) -> None:
        """See `UnreadRequests`. The stream is closed, which is how a server hears of an abort; what it had generated
        and not sent is generated again."""
        running = self._attached.get(request_id)
        if running is not None and running.serving is not None:
            running.serving.cancel()
            await asyncio.wait((running.serving,))

    async def capture_hidden_states(self, every_steps: int) -> str:
        """See `HiddenStateSource`."""
        return str(await self._channel.call(Capture(every_steps)))

    async def hidden_states(self) -> AsyncIterator[HiddenStates]:
        """See `HiddenStateSource`."""
        while True:
            while self._states:
                yield self._with_our_ids(self._states.popleft())
            self._has_states.clear()
            await self._has_states.wait()

    async def close(self) -> None:
        """Leave the server to whoever comes next."""
        await self._tasks.cancel()
        with suppress(TimeoutError, PenstockError):
            async with asyncio.timeout(_LEAVE_S):
                await self._channel.call(Detach())
        await super().close()

    def _parameters(self, transfer_params: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = kv_parameters({**transfer_params, "secret": self._secret})["extra_args"]
        return found

    async def _attach(self) -> None:
        until_s = self._clock.now_s() + _ATTACH_S
        while True:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    self._secret = str(await self._channel.call(Attach(self._token)))
                    return
            except KvTransferRefused as error:  # it has another worker, which may be dead
                if self._clock.now_s() >= until_s:
                    raise
                log.warning("the server is waited for", extra={"reason": str(error)})
            await self._clock.sleep(BEAT_S)

    async def _beat(self) -> None:
        try:
            while True:
                async with asyncio.timeout(_ANSWER_S):
                    await self._channel.call(Beat())
                await self._clock.sleep(BEAT_S)
        except TimeoutError:
            self._lost(f"the control socket {self._endpoint} does not answer any more")
        except PenstockError as error:
            self._lost(str(error))

    def _notice(self, notice: Notice) -> None:
        match notice:
            case PausedNotice():
                running = self._attached.get(notice.request_id)
                super()._notice(notice if running is None else as_heard(notice, running, self._block_tokens))
            case EndedInstead(request_id):
                self._ended_instead(self._attached.get(request_id))
            case States(content):
                self._states.append(msgspec.msgpack.decode(content, type=CapturedStates))
                self._has_states.set()
            case _:
                super()._notice(notice)

    def _ended_instead(self, running: AttachedRequest | None) -> None:
        if running is None or running.pause is None or running.pause.notice.done():
            return
        pause, running.pause = running.pause, None
        pause.notice.set_result(None)
        self._begin_again(running)

    def _with_our_ids(self, captured: CapturedStates) -> HiddenStates:
        """Rows of other clients have no name here, and nobody looks for them."""
        names = (internal_id.rpartition("-")[0] for internal_id in captured.internal_ids)
        return HiddenStates(
            step=captured.step,
            request_ids=tuple(self._sent.get(name, "") for name in names),
            context_tokens=tuple(captured.context_tokens),
            hidden_size=captured.hidden_size,
            states=captured.states,
        )


def as_heard(notice: PausedNotice, running: AttachedRequest, block_tokens: int) -> PausedNotice:
    """A pause with those tokens only that came before the stream was closed, and their KV."""
    heard = tuple(running.token_ids)
    context = len(running.request.prompt_token_ids) + len(running.request.emitted_token_ids) + len(heard)
    computed = max(0, min(notice.computed_tokens, context - 1))
    return PausedNotice(
        request_id=notice.request_id,
        internal_id=notice.internal_id,
        generated_token_ids=heard,
        computed_tokens=computed,
        block_ids=notice.block_ids[: -(-computed // block_tokens)],
    )
