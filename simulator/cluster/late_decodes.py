"""Policies that choose where a request is decoded once its prompt has been computed (Arrow, section 5.2)."""

from collections.abc import Callable

from controlplane.model.placement import PlacementRequest
from controlplane.policies.interface import LateDecider
from controlplane.policies.place import place_decode
from simulator.cluster.events import EventQueue, Rank
from simulator.cluster.fleet import SimulatedFleet
from simulator.cluster.hand_overs import HandOvers
from simulator.cluster.ledger import Ledger


class LateDecodes:
    """The instance tells the scheduler of a first token, which takes a message; the scheduler chooses then."""

    def __init__(
        self,
        policy: LateDecider,
        model: str,
        message_delay_ms: float,
        events: EventQueue,
        ledger: Ledger,
        fleet: SimulatedFleet,
        hand_overs: HandOvers,
    ) -> None:
        self._policy = policy
        self._model = model
        self._message_delay_ms = message_delay_ms
        self._events = events
        self._ledger = ledger
        self._fleet = fleet
        self._hand_overs = hand_overs

    def first_token(self, request_id: str, instance_id: str, now_ms: float) -> None:
        """Of a request that has more to come."""
        self._events.at(now_ms + self._message_delay_ms, Rank.ARRIVAL, self._choose(request_id, instance_id))

    def _choose(self, request_id: str, instance_id: str) -> Callable[[float], None]:
        def choose(now_ms: float) -> None:
            entry = self._ledger.open.get(request_id)
            if entry is None or entry.instance_id != instance_id:
                return  # it has ended, or lost its instance, meanwhile
            self._fleet.see(now_ms)
            request = entry.request
            asked = PlacementRequest(
                request_id=request_id,
                model=self._model,
                prompt_tokens=request.prompt_tokens,
                now_s=now_ms / 1000,
                max_tokens=request.output_tokens,
                priority=request.priority,
            )
            chosen = place_decode(self._fleet.table, self._policy, asked, instance_id)
            if chosen is not None:
                self._hand_overs.begin(request_id, instance_id, chosen.instance_id)

        return choose
