"""All pulls of cached prefixes in a cluster: the messages between its instances, and how pulls ended."""

from collections import Counter

from controlplane.model.incarnation import Incarnation
from controlplane.model.placement import PrefixPull
from controlplane.protocols.prefix_pull.target import AskHold, Held, NotHeld, PullEnded, PullOutcome
from simulator.cluster.config import ClusterConfig
from simulator.cluster.events import EventQueue, Rank
from simulator.cluster.fleet import SimulatedFleet, incarnation_of
from simulator.cluster.host_loads import HostLoads
from simulator.cluster.kv_links import KvLinks
from simulator.cluster.prefix_pull.puller import SimulatedPuller, SubmitRequest
from simulator.cluster.worker import Worker
from simulator.instance.counted_request import CountedRequest


class PrefixPulls:
    """A puller for each instance, and the network between them."""

    def __init__(
        self, config: ClusterConfig, events: EventQueue, links: KvLinks, fleet: SimulatedFleet, loads: HostLoads
    ) -> None:
        self.events = events
        self.loads = loads
        self.links = links
        self.tick_ms = config.migration.tick_ms
        self.outcomes: Counter[PullOutcome] = Counter()
        self.pulled_tokens = 0
        self._message_delay_ms = config.migration.message_delay_ms
        self._block_tokens = config.instance.block_tokens
        self._fleet = fleet
        self._pullers: dict[str, SimulatedPuller] = {}
        """By instance."""

    def joined(self, worker: Worker) -> None:
        """A new life of an instance."""
        self._pullers[worker.description.instance_id] = SimulatedPuller(worker, self)

    def lost(self, instance_id: str) -> tuple[str, ...]:
        """An instance has died. Returns the requests that it had kept back."""
        lost = self._pullers.pop(instance_id)
        lost.stop()
        for puller in list(self._pullers.values()):
            puller.peer_lost(lost.own)
        return lost.waiting

    def begin(self, instance_id: str, request: CountedRequest, pull: PrefixPull | None, submit: SubmitRequest) -> bool:
        """See `SimulatedPuller`."""
        return self._pullers[instance_id].begin(request, pull, submit)

    def after_step(self, worker: Worker) -> None:
        """A step of an instance is over."""
        self._pullers[worker.description.instance_id].after_step()

    def validate(self) -> None:
        """Raises `InvariantBroken` where what is kept contradicts itself."""
        for puller in self._pullers.values():
            puller.validate()

    # -- what pullers ask for

    def prefill_ms(self, instance_id: str, tokens: int) -> float:
        """See `PullingCluster`."""
        return self._fleet.prefill_ms(instance_id, tokens)

    def ask(self, target: SimulatedPuller, source_id: str, ask: AskHold, prefix: CountedRequest) -> None:
        """See `PullingCluster`. The call of one that has hung up or died meanwhile is not heard."""
        called = self._pullers.get(source_id)
        if called is None:
            self.answer(target.own, NotHeld(ask.pull_id, f"{source_id} is not there", is_refusal=True))
            return

        def arrive(_: float) -> None:
            if self._is_alive(target.own) and self._pullers.get(source_id) is called:
                called.asked(target.own, ask, prefix)

        self.events.at(self.events.now_ms + self._message_delay_ms, Rank.MESSAGE, arrive)

    def hang_up(self, source_id: str, pull_id: str) -> None:
        """See `PullingCluster`."""

        def arrive(_: float) -> None:
            if (source := self._pullers.get(source_id)) is not None:
                source.hung_up(pull_id)

        self.events.at(self.events.now_ms + self._message_delay_ms, Rank.MESSAGE, arrive)

    def answer(self, target: Incarnation, event: Held | NotHeld) -> None:
        """See `PullingCluster`."""

        def arrive(_: float) -> None:
            if self._is_alive(target):
                self._pullers[target.instance_id].handle(event)

        self.events.at(self.events.now_ms + self._message_delay_ms, Rank.MESSAGE, arrive)

    def ended(self, ended: PullEnded) -> None:
        """See `PullingCluster`."""
        self.outcomes[ended.outcome] += 1
        self.pulled_tokens += ended.blocks * self._block_tokens

    def _is_alive(self, own: Incarnation) -> bool:
        worker = self._fleet.workers.get(own.instance_id)
        return worker is not None and incarnation_of(worker) == own
