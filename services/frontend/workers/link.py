"""The frontend's side of its stream to one worker: requests out, tokens in."""

import asyncio
import logging
from collections.abc import Callable

from controlplane.model.incarnation import Incarnation
from controlplane.model.queue_belief import QueueBelief
from controlplane.model.request import PrefixSource
from controlplane.protocols.relay.events import LossReason
from mesh.errors import PeerUnavailable, PenstockError
from mesh.membership import Member
from mesh.rpc.peer_stream import PeerStream, StreamHandlers
from mesh.runtime import Transport
from penstock.v1 import worker_pb2, worker_pb2_grpc
from services.frontend.workers.liveness import Hang
from services.frontend.workers.relay import Relay, RelayRegistry

log = logging.getLogger(__name__)


class WrongWorker(PenstockError):
    """Another process than the announced one answers at a worker's address."""


class WorkerLink:
    """One incarnation of one worker. The end of the stream leaves all requests on it without an owner, at once."""

    def __init__(
        self,
        member: Member,
        frontend_id: str,
        relays: RelayRegistry,
        clock: Callable[[], float],
        transport: Transport,
        on_connected: Callable[[], None],
        on_unusable: Callable[[], None],
        on_adopted: Callable[[Incarnation, worker_pb2.Adopted], None],
    ) -> None:
        """`on_connected`: it takes requests from now on; `on_unusable`: it does not, and what it had is not lost yet;
        `on_adopted`: what it has of a request."""
        self.member = member
        self.instance_id = member.member_id
        self.sender = Incarnation(member.member_id, member.incarnation_id)
        self.connected = asyncio.Event()
        """Set while the worker takes requests from us."""
        self.retired = asyncio.Event()
        """Set once the worker has left the mesh and its last request has ended."""
        self.leaving = False
        self.hung: Hang | None = None
        """How, if the worker is known to hang. Ends with its next message, its engine's next step, or when it has got
        what it was sent."""
        self.stalled_s = 0.0
        """For how long its engine had made no step, by its last message."""
        self.has_moved = False
        """The worker is announced at another address than that of the stream."""
        self.messages = 0
        """How many messages have come, heartbeats included: a sign of life is that it grows."""
        self.unheard = 0
        """Messages of ours that the worker had not got when it sent its last one."""
        self.heard_messages = 0
        """Those that it had got, on the stream of now; 0 if it does not count them."""
        self._sent_messages = 0
        self._heard_when_hung = 0
        self._hello = worker_pb2.FrontendMessage(
            hello=worker_pb2.FrontendHello(frontend_id=frontend_id, wants_heartbeats=True)
        )
        self._on_adopted = on_adopted
        self._relays = relays
        self._clock = clock
        self._on_connected = on_connected
        self._on_unusable = on_unusable
        self._stream: PeerStream[worker_pb2.FrontendMessage, worker_pb2.WorkerMessage] = PeerStream(
            f"worker {self.instance_id}",
            member.address,
            transport,
            lambda channel: worker_pb2_grpc.WorkerStub(channel).Stream,  # type: ignore[no-untyped-call]
            StreamHandlers(self._opened, self._received, self._lost),
            member.role,
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
        """The name of the model that the worker serves; empty if it did not announce one."""
        return self.member.attributes.get("model", "")

    @property
    def transport_name(self) -> str:
        """See `PeerStream.transport_name`."""
        return self._stream.transport_name

    @property
    def requests(self) -> int:
        """Requests of ours that it has."""
        return self._relays.owned()[self.sender]

    @property
    def is_connected(self) -> bool:
        """Whether it takes requests from us."""
        return self.connected.is_set() and not self.leaving and self.hung is None

    def readdress(self, member: Member) -> None:
        """The same worker is announced at another address. What runs on the stream stays there as long as it lives."""
        self.member, self.has_moved = member, member.address != self.member.address or self.has_moved
        self._stream.readdress(member.address)

    def reconnect(self) -> None:
        """Open the stream anew, at the address of now."""
        self.has_moved = False
        self._stream.reconnect()

    def note_hang(self, hang: Hang) -> None:
        """The worker is known to hang, until it says otherwise."""
        if self.hung is not Hang.DEAF:  # which outlasts any other hang: its next message says no more of that
            self.hung, self._heard_when_hung = hang, self.heard_messages
        self._on_unusable()

    def submit(
        self,
        relay: Relay,
        decode_instance_id: str,
        *,
        is_decode_open: bool,
        prefix: PrefixSource | None = None,
        belief: QueueBelief | None = None,
    ) -> None:
        """Send a request. `decode_instance_id`: who decodes it after its first token, empty for this worker;
        `is_decode_open`: the worker is to ask the scheduler for one then; `prefix`: what it is to pull first;
        `belief`: what it was believed to have to do. Raises PeerUnavailable while the worker is not connected."""
        if not self.connected.is_set():
            raise PeerUnavailable(f"worker {self.instance_id} at {self.member.address} is not connected")
        generate = relay.generate_request(self._clock())
        generate.decode_instance_id = decode_instance_id
        generate.is_decode_open = is_decode_open
        if prefix is not None:
            generate.prefix.instance_id, generate.prefix.tokens = prefix.instance_id, prefix.tokens
            generate.prefix.comes_ms = prefix.comes_ms
        if belief is not None:
            generate.belief.queued_prefill_tokens = belief.queued_prefill_tokens
            generate.belief.new_prefill_tokens = belief.new_prefill_tokens
            generate.belief.may_bounce = belief.may_bounce
        self._send(worker_pb2.FrontendMessage(generate=generate))
        self._relays.submitted(relay, self.sender)

    def abort(self, request_id: str, epoch: int, *, is_done: bool = False) -> None:
        """Tell the worker to drop a request in the life of this epoch; `is_done`: its client has all that it wanted."""
        abort = worker_pb2.AbortRequest(request_id=request_id, epoch=epoch, is_done=is_done)
        self._tell_if_open(worker_pb2.FrontendMessage(abort=abort), request_id)

    def release(self, request_id: str, epoch: int) -> None:
        """Tell the worker that the client of a request may come back to any frontend, in the life of this epoch."""
        release = worker_pb2.ReleaseRequest(request_id=request_id, epoch=epoch)
        self._tell_if_open(worker_pb2.FrontendMessage(release=release), request_id)

    def adopt(self, client_request_id: str, question: int) -> bool:
        """Ask the worker for all that it has of a client's request; False if it cannot be asked. The answer bears the
        number of the `question`."""
        if not self.connected.is_set():
            return False
        adopt = worker_pb2.AdoptRequests(client_request_id=client_request_id, question=question)
        return self._tell_if_open(worker_pb2.FrontendMessage(adopt=adopt), client_request_id)

    def _tell_if_open(self, message: worker_pb2.FrontendMessage, request_id: str) -> bool:
        if not self._stream.is_open:
            return False
        try:
            self._send(message)
        except PeerUnavailable as error:
            log.error("a worker could not be told", extra={"request_id": request_id, "error": str(error)})
            return False
        return True

    def _send(self, message: worker_pb2.FrontendMessage) -> None:
        self._stream.send(message)
        self._sent_messages += 1

    def drop_requests(self, message: str) -> None:
        """Take all requests from a worker that hangs."""
        self._relays.worker_lost(self.sender, LossReason.WORKER_HUNG, message, is_connected=True)

    def _opened(self) -> None:
        self.has_moved = False
        self._sent_messages = self.heard_messages = self._heard_when_hung = self.unheard = 0
        hello = worker_pb2.FrontendMessage()
        hello.CopyFrom(self._hello)
        self._send(hello)
        self._hello.hello.is_reconnect = True

    def _received(self, message: worker_pb2.WorkerMessage) -> None:
        self.messages += 1
        self.heard_messages = message.heard_messages
        self.unheard = self._sent_messages - self.heard_messages if self.heard_messages else 0
        is_heartbeat = message.HasField("heartbeat")
        self.stalled_s = message.heartbeat.stalled_ms / 1000 if is_heartbeat else 0.0
        if self.hung is not None and self._ends_hang(is_heartbeat=is_heartbeat):
            self._note_life()
        if is_heartbeat:
            return
        if message.HasField("step"):
            now_s, sender, deliver = self._clock(), self.sender, self._relays.deliver
            for delta in message.step.deltas:
                deliver(sender, delta, now_s)
        elif message.HasField("moved"):
            self._relays.moved(self.sender, message.moved)
        elif message.HasField("adopted"):
            self._on_adopted(self.sender, message.adopted)
        elif message.HasField("hello"):
            self._greeted(message.hello)

    def _ends_hang(self, *, is_heartbeat: bool) -> bool:
        match self.hung:
            case Hang.DEAF:
                return self.heard_messages > self._heard_when_hung
            case Hang.STALLED:
                return not is_heartbeat
            case _:
                return True

    def _note_life(self) -> None:
        self.hung = None
        if self.is_connected:
            self._on_connected()

    def _greeted(self, hello: worker_pb2.WorkerHello) -> None:
        if hello.incarnation_id != self.member.incarnation_id:
            raise WrongWorker(
                f"{self.member.address} answers as incarnation {hello.incarnation_id} of {hello.instance_id}, "
                f"announced is {self.member.incarnation_id} of {self.instance_id}"
            )
        log.info("worker connected", extra={"instance_id": self.instance_id, "address": self.member.address})
        self.connected.set()
        self._on_connected()

    def _lost(self, reason: str) -> None:
        self.connected.clear()
        self.stalled_s = 0.0
        self._on_unusable()
        self._relays.worker_lost(self.sender, LossReason.WORKER_LOST, reason)
