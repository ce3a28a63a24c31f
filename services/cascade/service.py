"""The cascade router's gRPC methods."""

import logging
from collections.abc import Callable
from typing import Any

import grpc
import msgspec

from controlplane.model.cascade_record import SPECULATE_ROOM, CascadeRecord
from controlplane.protocols.cascade.no_score import NO_SCORE
from mesh.errors import ConfigurationError, JudgeUnavailable, StoreError
from mesh.store.interface import StateStore
from penstock.v1 import cascade_pb2, cascade_pb2_grpc
from services.cascade.cascades import Cascades
from services.cascade.judges.interface import JudgedAnswer, Judgement
from services.cascade.metrics import CascadeMetrics
from services.cascade.sampling.samplers import Samplers


def record_from(message: cascade_pb2.CascadeDescription) -> CascadeRecord:
    """Raises `ConfigurationError` for a value that a record does not have."""
    without_judge = message.without_judge or "escalate"
    if without_judge not in ("escalate", "accept"):
        raise ConfigurationError(f"without_judge is escalate or accept, got {without_judge!r}")
    return CascadeRecord(
        name=message.name,
        tiers=tuple(message.tiers),
        thresholds=tuple(message.thresholds),
        judges=tuple(message.judges) or ("confidence",),
        without_judge="accept" if without_judge == "accept" else "escalate",
        expected_s=tuple(message.expected_s),
        label=message.label,
        rubric=message.rubric,
        speculate=message.speculate,
        speculate_room=message.speculate_room or SPECULATE_ROOM,
        plan_revision=message.plan_revision,
    )


def message_from(record: CascadeRecord) -> cascade_pb2.CascadeDescription:
    """The record as its protobuf message."""
    return cascade_pb2.CascadeDescription(
        name=record.name,
        tiers=record.tiers,
        thresholds=record.thresholds,
        judges=record.judges,
        without_judge=record.without_judge,
        expected_s=record.expected_s,
        label=record.label,
        rubric=record.rubric,
        speculate=record.speculate,
        speculate_room=record.speculate_room,
        plan_revision=record.plan_revision,
    )


log = logging.getLogger(__name__)


class CascadeService(cascade_pb2_grpc.CascadeServicer):
    """Judges answers and keeps the cascades. Says that there is no judge, instead of accepting everything."""

    def __init__(
        self,
        store: StateStore,
        cascades: Cascades,
        samplers: Samplers,
        metrics: CascadeMetrics,
        max_judging: int,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._cascades = cascades
        self._samplers = samplers
        self._metrics = metrics
        self._max_judging = max_judging
        self._clock = clock
        self._judging = 0

    async def Judge(self, request: cascade_pb2.JudgeRequest, context: Any) -> cascade_pb2.JudgeResponse:
        """Score one answer, or just take the request into account."""
        record = await self._find(request.cascade, context)
        if request.sample_only:
            self._samplers.offer(record, request, None)
            return cascade_pb2.JudgeResponse()
        if self._judging >= self._max_judging:
            self._samplers.offer(record, request, None)  # it came, whether or not it is judged
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._judging} answers are being judged; add a cascade router"
            )
        judged = JudgedAnswer(
            request.prompt,
            request.answer,
            request.tier,
            tuple(request.token_logprobs),
        )
        self._judging += 1
        self._metrics.judging.set(self._judging)
        began_s = self._clock()
        judgement: Judgement | None = None
        try:
            judgement = await self._cascades.chain(record).judge(judged)
        except JudgeUnavailable as error:
            self._metrics.unjudged.labels(record.name).inc()
            self._metrics.passed_over.labels(record.name).inc()
            log.warning("nobody could judge an answer", extra={"request_id": request.request_id, "error": str(error)})
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error), (NO_SCORE,))
            raise AssertionError("abort raises") from None
        finally:
            self._samplers.offer(record, request, judgement)  # it came, though its deadline may have cut its judgement
            self._judging -= 1
            self._metrics.judging.set(self._judging)
            self._metrics.seconds.labels(record.name).observe(self._clock() - began_s)
        tier = request.tier if request.tier in record.tiers else "unknown"  # a caller's word is no label
        self._metrics.scores.labels(record.name, tier, judgement.judge).observe(judgement.score)
        if judgement.passed_over:
            self._metrics.passed_over.labels(record.name).inc()
            story = {"request_id": request.request_id, "judge": judgement.judge, "passed_over": judgement.passed_over}
            log.info("another judge stood in", extra=story)
        return cascade_pb2.JudgeResponse(
            score=judgement.score, judge=judgement.judge, passed_over=judgement.passed_over
        )

    async def GetThresholds(
        self, request: cascade_pb2.GetThresholdsRequest, context: Any
    ) -> cascade_pb2.GetThresholdsResponse:
        """The thresholds in force; none while there is no cascade."""
        if not request.cascade and not self._cascades.records:
            return cascade_pb2.GetThresholdsResponse()
        record = await self._find(request.cascade, context)
        return cascade_pb2.GetThresholdsResponse(tiers=record.tiers, thresholds=record.thresholds, cascade=record.name)

    async def ListCascades(
        self, request: cascade_pb2.ListCascadesRequest, context: Any
    ) -> cascade_pb2.ListCascadesResponse:
        """All cascades in force, with their thresholds and judges."""
        return cascade_pb2.ListCascadesResponse(cascades=map(message_from, self._cascades.records))

    async def SetCascade(self, request: cascade_pb2.SetCascadeRequest, context: Any) -> cascade_pb2.SetCascadeResponse:
        """Write it to the state store, which everyone follows."""
        try:
            record = record_from(request.cascade)
            self._cascades.check(record)
        except ConfigurationError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort raises") from None
        try:
            revision = await self._store.put(record.key, msgspec.json.encode(record))
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise AssertionError("abort raises") from None
        return cascade_pb2.SetCascadeResponse(revision=revision)

    async def RemoveCascade(
        self, request: cascade_pb2.RemoveCascadeRequest, context: Any
    ) -> cascade_pb2.RemoveCascadeResponse:
        """Delete the cascade from the state store."""
        record = await self._find(request.name, context)
        try:
            return cascade_pb2.RemoveCascadeResponse(removed=await self._store.delete(record.key))
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise AssertionError("abort raises") from None

    async def ExportSamples(
        self, request: cascade_pb2.ExportSamplesRequest, context: Any
    ) -> cascade_pb2.ExportSamplesResponse:
        """See the contract."""
        record = await self._find(request.cascade, context)
        kept = self._samplers.kept(record.name)
        if request.texts and not kept.keeps_texts:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this cascade router keeps no texts of samples: start it with --sample-texts, and mind that prompts "
                "are your clients'",
            )
        samples = (
            cascade_pb2.ExportedSample(
                number=sample.number, line=sample.line, text=sample.text if request.texts else b""
            )
            for sample in kept.page(request.after)
        )
        return cascade_pb2.ExportSamplesResponse(
            samples=samples,
            tiers=record.tiers,
            judge=record.judges[0] if record.judges else "",
            label=record.label,
            rate_per_s=kept.rate_per_s,
        )

    async def _find(self, name: str, context: Any) -> CascadeRecord:
        record = self._cascades.find(name)
        if record is not None:
            return record
        if not self._cascades.records:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "no cascade is configured, so there is no judge: set one up with `penstock cascade set`",
            )
        names = ", ".join(record.name for record in self._cascades.records)
        await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no cascade {name!r}; there are {names}")
        raise AssertionError("abort raises")
