"""The frontend's side of its stream to one worker: requests out, tokens in, told apart by request id."""

import asyncio
import logging
from collections.abc import Callable

from mesh.errors import PeerUnavailable, PenstockError
from mesh.membership import Member
from penstock.v1 import request_pb2, worker_pb2, worker_pb2_grpc
from services.frontend.api.errors import ApiError, upstream_failed
from services.frontend.metrics import FrontendMetrics
from services.frontend.peer_stream import PeerStream, StreamHandlers
from services.frontend.relay import Relay, TokenGap

log = logging.getLogger(__name__)


class WrongWorker(PenstockError):
    """Another process than the announced one answers at a worker's address."""


class WorkerLink:
    """One incarnation of one worker. The end of the stream fails all requests on it at once."""

    def __init__(self, member: Member, frontend_id: str, metrics: FrontendMetrics, clock: Callable[[], float]) -> None:
        self.member = member
        self.instance_id = member.member_id
        self.connected = asyncio.Event()
        """Set while the worker takes requests from us."""
        self.retired = asyncio.Event()
        """Set once the worker has left the mesh and its last request has ended."""
        self._leaving = False
        self._hello = worker_pb2.FrontendMessage(hello=worker_pb2.FrontendHello(frontend_id=frontend_id))
        self._metrics = metrics
        self._clock = clock
        self._relays: dict[str, Relay] = {}
        self._stream: PeerStream[worker_pb2.FrontendMessage, worker_pb2.WorkerMessage] = PeerStream(
            f"worker {self.instance_id}",
            member.address,
            lambda channel: worker_pb2_grpc.WorkerStub(channel).Stream,  # type: ignore[no-untyped-call]
            StreamHandlers(self._opened, self._received, self._lost),
        )

    async def run(self) -> None:
        """Keep the stream open until cancelled or retired."""
        stream = asyncio.ensure_future(self._stream.run())
        retired = asyncio.ensure_future(self.retired.wait())
        try:
            await asyncio.wait((stream, retired), return_when=asyncio.FIRST_COMPLETED)
        finally:
            retired.cancel()
            stream.cancel()
            await asyncio.wait((stream,))
        if not stream.cancelled():
            stream.result()

    @property
    def model(self) -> str:
        """The model it serves."""
        return self.member.attributes.get("model", "")

    @property
    def requests(self) -> int:
        """Requests of ours that it has."""
        return len(self._relays)

    @property
    def is_connected(self) -> bool:
        """Whether it takes requests from us."""
        return self.connected.is_set() and not self._leaving

    def leave(self) -> None:
        """The worker is no longer announced: its running requests go on, the link ends with the last of them."""
        self._leaving = True
        self._retire_if_idle()

    def submit(self, relay: Relay) -> None:
        """Send a request. Raises PeerUnavailable while the worker is not connected."""
        if not self.connected.is_set():
            raise PeerUnavailable(f"worker {self.instance_id} at {self.member.address} is not connected")
        relay.instance_id = self.instance_id
        message = worker_pb2.FrontendMessage(generate=relay.generate_request(self._clock()))
        self._stream.send(message)
        self._relays[relay.request_id] = relay

    def abort(self, relay: Relay) -> None:
        """Take a request back; it is forgotten here at once, tokens that cross the abort are dropped."""
        if self._relays.pop(relay.request_id, None) is None or not self._stream.is_open:
            return
        abort = request_abort(relay.request_id)
        try:
            self._stream.send(abort)
        except PeerUnavailable as error:
            log.error("a request could not be taken back", extra={"request_id": relay.request_id, "error": str(error)})
        self._retire_if_idle()

    def _opened(self) -> None:
        self._stream.send(self._hello)

    def _received(self, message: worker_pb2.WorkerMessage) -> None:
        if message.HasField("step"):
            relays = self._relays
            for delta in message.step.deltas:
                relay = relays.get(delta.request_id)
                if relay is not None:
                    self._deliver(relay, delta)
        elif message.HasField("hello"):
            self._greeted(message.hello)

    def _greeted(self, hello: worker_pb2.WorkerHello) -> None:
        if hello.incarnation_id != self.member.incarnation_id:
            raise WrongWorker(
                f"{self.member.address} answers as incarnation {hello.incarnation_id} of {hello.instance_id}, "
                f"announced is {self.member.incarnation_id} of {self.instance_id}"
            )
        log.info("worker connected", extra={"instance_id": self.instance_id, "address": self.member.address})
        self.connected.set()

    def _deliver(self, relay: Relay, delta: request_pb2.TokenDelta) -> None:
        try:
            relay.accept(delta)
        except TokenGap as error:
            log.error("token stream broken", extra={"request_id": relay.request_id, "error": str(error)})
            self._metrics.token_gaps.inc()
            self.abort(relay)
            relay.fail(upstream_failed(f"The worker's token stream is broken: {error}", "token_gap"))
        if relay.finished:
            self._relays.pop(relay.request_id, None)
            self._retire_if_idle()

    def _lost(self, reason: str) -> None:
        self.connected.clear()
        relays, self._relays = self._relays, {}
        if relays:
            log.error("requests lost with their worker", extra={"instance_id": self.instance_id, "lost": len(relays)})
            self._metrics.worker_losses.inc(len(relays))
        for relay in relays.values():
            relay.fail(_worker_lost(self.instance_id, reason))
        self._retire_if_idle()

    def _retire_if_idle(self) -> None:
        if self._leaving and not self._relays:
            self.retired.set()


def request_abort(request_id: str) -> worker_pb2.FrontendMessage:
    """The message that takes a request back."""
    return worker_pb2.FrontendMessage(abort=worker_pb2.AbortRequest(request_id=request_id))


def _worker_lost(instance_id: str, reason: str) -> ApiError:
    return upstream_failed(f"The worker {instance_id} that served this request was lost: {reason}", "worker_lost")
