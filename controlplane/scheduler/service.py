"""The gRPC methods of `penstock.v1.Scheduler`."""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, Final

import grpc
import numpy as np

from controlplane.policies.registry import POLICIES
from controlplane.scheduler.explanations import Explanation
from controlplane.scheduler.peers import Peers
from controlplane.scheduler.placement_service import PlacementService
from controlplane.scheduler.policy_config import PolicyConfig
from controlplane.scheduler.rescheduling.config import ReschedulerConfig
from controlplane.scheduler.rescheduling.service import ReschedulingService
from controlplane.scheduler.rescheduling.wire import order_message, status_message
from controlplane.scheduler.shown_snapshot import ShownSnapshot
from mesh.errors import ConfigurationError, PenstockError
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc

MAX_LISTED_PLACEMENTS: Final = 64
MAX_LISTED_OPTIONS: Final = 8


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """A thin shell around the placement service and the rescheduler."""

    def __init__(
        self,
        placements: PlacementService,
        policy_config: PolicyConfig,
        rescheduling: ReschedulingService,
        rescheduler_config: ReschedulerConfig,
        peers: Peers,
        snapshot: ShownSnapshot,
    ) -> None:
        self._peers = peers
        self._snapshot = snapshot
        self._placements = placements
        self._policy_config = policy_config
        self._rescheduling = rescheduling
        self._rescheduler_config = rescheduler_config

    async def Place(self, request: scheduler_pb2.PlaceRequest, context: Any) -> scheduler_pb2.PlaceResponse:
        """Choose an instance for one request."""
        return self._placements.place(request)

    async def Ready(self, request: scheduler_pb2.ReadyRequest, context: Any) -> scheduler_pb2.ReadyResponse:
        """Whether a placement would be refused because no monitor has been heard yet."""
        message = self._placements.not_ready()
        return scheduler_pb2.ReadyResponse(
            is_ready=not message, message=message, leader_id=self._placements.switch.leader_id
        )

    async def PlaceDecode(
        self, request: scheduler_pb2.PlaceDecodeRequest, context: Any
    ) -> scheduler_pb2.PlaceDecodeResponse:
        """Choose who decodes a request whose prompt is computed."""
        return self._placements.place_decode(request)

    async def PlaceStream(self, request_iterator: Any, context: Any) -> None:
        """Choose for request after request; take in how they ended.

        Reads and writes by hand: a quarter cheaper than iterating and yielding.
        """
        with self._placements.frontend() as links:
            while (message := await context.read()) is not grpc.aio.EOF:
                if message.HasField("links"):
                    self._placements.linked(links, message.links)
                for ended in message.ended:
                    self._placements.ended(ended)
                if message.HasField("place"):
                    await context.write(self._placements.place(message.place, links))

    async def Share(self, request_iterator: Any, context: Any) -> None:
        """Take in what another scheduler has placed."""
        await self._peers.take(context)

    async def Explain(self, request: scheduler_pb2.ExplainRequest, context: Any) -> scheduler_pb2.ExplainResponse:
        """Indicators and scores behind a placement."""
        explanation = self._placements.explanations.get(request.request_id)
        moves = self._rescheduling.manager.migrations.of_request(request.request_id)
        if explanation is None and moves:  # another scheduler placed it
            ordered = [order_message(each) for each in moves]
            return scheduler_pb2.ExplainResponse(request_id=request.request_id, moves=ordered)
        if explanation is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no placement of request {request.request_id!r} is known here; "
                f"the last {len(self._placements.explanations)} are kept",
            )
        assert explanation is not None, "abort raises"
        message = _explain(request.request_id, explanation)
        message.moves.extend(order_message(ordered) for ordered in moves)
        return message

    async def ListPlacements(
        self, request: scheduler_pb2.ListPlacementsRequest, context: Any
    ) -> scheduler_pb2.ListPlacementsResponse:
        """The last placements, each with its best options."""
        latest = self._placements.explanations.latest(min(request.limit, MAX_LISTED_PLACEMENTS))
        options = min(request.options, MAX_LISTED_OPTIONS)
        return scheduler_pb2.ListPlacementsResponse(placements=[recent_placement(*each, options) for each in latest])

    async def GetPolicy(self, request: scheduler_pb2.GetPolicyRequest, context: Any) -> scheduler_pb2.GetPolicyResponse:
        """The configured policy, and the fallback if one stands in."""
        switch = self._placements.switch
        return scheduler_pb2.GetPolicyResponse(
            policy=switch.configured.name,
            available=POLICIES.usable(),
            fallback=switch.in_force.name if switch.fallback_reason else "",
            fallback_reason=switch.fallback_reason,
            parameters=switch.configured.parameters.values(),
            profile=switch.profile_key,
            is_standby=switch.is_standby,
            unusable=[f"{each.name} of {each.source}: {each.reason}" for each in POLICIES.failures()],
        )

    async def SetPolicy(self, request: scheduler_pb2.SetPolicyRequest, context: Any) -> scheduler_pb2.SetPolicyResponse:
        """Switch the policy of all schedulers."""
        try:
            await self._policy_config.set(request.policy, request.parameters)
        except ConfigurationError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except PenstockError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        configured = self._placements.switch.configured
        return scheduler_pb2.SetPolicyResponse(policy=configured.name, parameters=configured.parameters.values())

    async def GetRescheduler(
        self, request: scheduler_pb2.GetReschedulerRequest, context: Any
    ) -> scheduler_pb2.GetReschedulerResponse:
        """The configured mode, what stands in for it, and what was done of late."""
        return status_message(self._rescheduling)

    async def SetRescheduler(
        self, request: scheduler_pb2.SetReschedulerRequest, context: Any
    ) -> scheduler_pb2.SetReschedulerResponse:
        """Switch the rescheduler of the mesh."""
        try:
            await self._rescheduler_config.set(request.mode, request.parameters)
        except ConfigurationError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except PenstockError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        switch = self._rescheduling.manager.switch
        return scheduler_pb2.SetReschedulerResponse(mode=switch.mode, parameters=switch.parameters.values())

    async def GetSnapshot(
        self, request: scheduler_pb2.GetSnapshotRequest, context: Any
    ) -> scheduler_pb2.GetSnapshotResponse:
        """What the next decision would see."""
        return await self._snapshot.get(request.max_age_ms)


def recent_placement(request_id: str, explanation: Explanation, options: int) -> scheduler_pb2.RecentPlacement:
    """A placement with its best options, the chosen ones among them."""
    chosen = (explanation.chosen_instance_id, explanation.decode.instance_id)
    best = np.argsort(explanation.scores, kind="stable")[:options].tolist()
    names = [instance.instance_id for instance in explanation.instances]
    rows = dict.fromkeys([*(names.index(name) for name in chosen if name in names), *best])
    shown = [row for row in rows if names[row] in chosen or isfinite(explanation.scores[row])]
    return scheduler_pb2.RecentPlacement(
        explanation=_explain(request_id, explanation, shown[: max(options, 1)]),
        instances=len(names),
        excluded=len(names) - int(np.isfinite(explanation.scores).sum()),
    )


def _explain(
    request_id: str, explanation: Explanation, rows: Iterable[int] | None = None
) -> scheduler_pb2.ExplainResponse:
    """`rows`: of the instances whose scores are told; None: all."""
    decode_scores = explanation.decode.score_of()
    told = range(len(explanation.instances)) if rows is None else rows
    return scheduler_pb2.ExplainResponse(
        request_id=request_id,
        policy=explanation.policy,
        chosen_instance_id=explanation.chosen_instance_id,
        scores=[_score(explanation, row, decode_scores) for row in told],
        prompt_tokens=explanation.prompt_tokens,
        placed_unix_ms=explanation.placed_unix_ms,
        rule=explanation.rule,
        decode_instance_id=explanation.decode.instance_id,
        decode_rule=explanation.decode.rule,
        cached_tokens=explanation.cached_tokens,
        loaded_tokens=explanation.loaded_tokens,
        pull=_pull(explanation),
        vllm_parts=explanation.vllm_parts,
    )


def _pull(explanation: Explanation) -> scheduler_pb2.PulledPrefix | None:
    pull = explanation.pull
    if pull is None:
        return None
    return scheduler_pb2.PulledPrefix(
        instance_id=pull.source.instance_id,
        tokens=pull.tokens,
        pull_ms=pull.pull_ms,
        compute_ms=pull.compute_ms,
        comes_ms=pull.comes_ms,
        loads_tokens=pull.loads_tokens,
    )


def _score(explanation: Explanation, row: int, decode_scores: Mapping[str, float]) -> scheduler_pb2.InstanceScore:
    """JSON knows no infinity, so an instance that was no candidate, or that the policy left out, scores 0."""
    instance_id, score = explanation.instances[row].instance_id, float(explanation.scores[row])
    excluded = explanation.excluded.get(instance_id, "" if isfinite(score) else "left out by the policy")
    message = scheduler_pb2.InstanceScore(
        instance_id=instance_id,
        score=0.0 if excluded else score,
        indicators={name: values[row] for name, values in explanation.indicators.items()},
        excluded=excluded,
        pool=explanation.pools[row] if explanation.pools else "",
    )
    if instance_id in decode_scores:
        message.decode_score = decode_scores[instance_id]
    return message
