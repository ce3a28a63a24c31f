"""Calls to a length predictor of the mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from mesh.errors import PeerUnavailable, ProtocolViolation
from mesh.membership import Directory, Member
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Threads, Transport
from penstock.v1 import predictor_pb2, predictor_pb2_grpc

ROLE = "predictor"


@dataclass(frozen=True, slots=True)
class StateBatch:
    """Hidden states of some requests of one instance, in columns."""

    request_ids: tuple[str, ...]
    prompt_tokens: tuple[int, ...]
    generated_tokens: tuple[int, ...]
    hidden_size: int
    states: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """Predicted remaining tokens, in the order of the batch."""

    remaining_tokens: Sequence[float]
    artefact: str


class PredictorLink:
    """To whichever predictor the directory lists first; any of them will do."""

    def __init__(
        self,
        directory: Directory,
        instance_id: str,
        model: str,
        fingerprint: Callable[[], str],
        deadline_s: float,
        transport: Transport,
        threads: Threads,
    ) -> None:
        """`fingerprint` of the checkpoint: reads files, once, at the first call."""
        self._directory = directory
        self._instance_id = instance_id
        self._model = model
        self._fingerprint = fingerprint
        self._known_fingerprint = ""
        self._deadline_s = deadline_s
        self._transport = transport
        self._threads = threads
        self._channel: grpc.aio.Channel | None = None
        self._address = ""

    async def predict(self, batch: StateBatch) -> Answer:
        """Raises RpcError where there is no answer within the deadline, ConfigurationError for no checkpoint."""
        member = self._predictor()
        request = predictor_pb2.PredictRequest(
            instance_id=self._instance_id,
            model=self._model,
            model_fingerprint=await self._checkpoint(),
            hidden_size=batch.hidden_size,
            hidden_states=batch.states,
            request_ids=batch.request_ids,
            prompt_tokens=batch.prompt_tokens,
            generated_tokens=batch.generated_tokens,
        )
        stub = await self._stub(member)
        try:
            answer = await stub.Predict(request, timeout=self._deadline_s)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, f"predictor {member.member_id} at {member.address}") from error
        if len(answer.remaining_tokens) != len(batch.request_ids):
            raise ProtocolViolation(
                f"predictor {member.member_id} answered {len(answer.remaining_tokens)} lengths for "
                f"{len(batch.request_ids)} requests"
            )
        return Answer(answer.remaining_tokens, answer.artefact)

    async def artefact(self) -> str:
        """The artefact that would answer now. Raises RpcError where none would."""
        member = self._predictor()
        stub = await self._stub(member)
        peer = f"predictor {member.member_id} at {member.address}"
        try:
            answer = await stub.GetArtefact(predictor_pb2.GetArtefactRequest(), timeout=self._deadline_s)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, peer) from error
        own = await self._checkpoint()
        for folder in answer.folders:
            if folder.artefact and folder.model_fingerprint == own:
                return str(folder.artefact)
        raise PeerUnavailable(f"{peer} has no artefact of the model {self._model!r} (checkpoint {own})")

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def _checkpoint(self) -> str:
        if not self._known_fingerprint:
            self._known_fingerprint = await self._threads.run(self._fingerprint)
        return self._known_fingerprint

    def _predictor(self) -> Member:
        members = self._directory.members(ROLE)
        if not members:
            raise PeerUnavailable("no length predictor is in the mesh; start one with penstock serve predictor")
        return members[0]

    async def _stub(self, member: Member) -> predictor_pb2_grpc.LengthPredictorStub:
        if self._channel is None or member.address != self._address:
            await self.close()
            self._channel, self._address = open_channel(self._transport, member.address), member.address
        return predictor_pb2_grpc.LengthPredictorStub(self._channel)  # type: ignore[no-untyped-call]
