"""Calls to a length predictor of the mesh."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import grpc

from controlplane.prediction.repetition import Repetition
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
    """0 where the engine tells no states."""
    states: bytes
    repetition: Repetition
    ended: tuple[tuple[str, int], ...] = ()
    """Requests that have ended by themselves or at their limit since the last batch, with their output tokens."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Predicted remaining tokens, in the order of the batch."""

    remaining_tokens: Sequence[float]
    """Not a number where nothing is known yet."""
    artefact: str
    is_learnt: bool = False
    """Learnt while serving, not by an artefact."""
    low_tokens: Sequence[float] = ()
    """As many or fewer with a probability of 10 %; empty where no range is said."""
    high_tokens: Sequence[float] = ()
    """The same of 90 %."""

    def bands(self) -> Iterable[tuple[float, float] | None]:
        """Both ends for each request; None where no range is said."""
        if len(self.low_tokens) != len(self.remaining_tokens) or len(self.high_tokens) != len(self.remaining_tokens):
            return (None,) * len(self.remaining_tokens)
        return zip(self.low_tokens, self.high_tokens, strict=True)


@dataclass(frozen=True, slots=True)
class Predictor:
    """Who would answer now."""

    artefact: str
    is_learnt: bool


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
            period_tokens=batch.repetition.period_tokens.tolist(),
            repeated_tokens=batch.repetition.repeated_tokens.tolist(),
            distinct_share=batch.repetition.distinct_share.tolist(),
            ended_request_ids=[request_id for request_id, _ in batch.ended],
            ended_output_tokens=[tokens for _, tokens in batch.ended],
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
        return Answer(answer.remaining_tokens, answer.artefact, answer.is_learnt, answer.low_tokens, answer.high_tokens)

    async def who_answers(self) -> Predictor:
        """The artefact, or what is learnt. Raises RpcError where neither would."""
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
                return Predictor(folder.artefact, is_learnt=False)
        if answer.learns:
            return Predictor(f"{self._model}@learnt", is_learnt=True)
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
            self._channel = open_channel(self._transport, member.address, member.role)
            self._address = member.address
        return predictor_pb2_grpc.LengthPredictorStub(self._channel)  # type: ignore[no-untyped-call]
