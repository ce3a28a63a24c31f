"""The cluster as a scheduler knows it: events in, snapshots out."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.counted_requests import CountedRequests
from controlplane.model.expected_blocks import ExpectedBlocks, mark_spacing
from controlplane.model.fleet import Fleet
from controlplane.model.host_blocks import HostBlocks, TierSlots
from controlplane.model.instance import InstanceDescription, InstanceState, KvBlocks, KvTier, LoadReport
from controlplane.model.kv_costs import KvCosts
from controlplane.model.prefix_index import PrefixIndex
from controlplane.model.queue_belief import PresentLoad
from controlplane.model.shared_event import PLACED_KINDS, SharedEvent, SharedKind
from controlplane.model.snapshot import Integers, Snapshot
from controlplane.model.step_costs import StepCosts
from controlplane.model.unreported import UnreportedRequest, UnreportedRequests
from controlplane.model.unseen_loads import UnseenLoads
from mesh.errors import IllegalTransition
from mesh.invariants import invariants


class ClusterTable:
    """Takes in what happens to instances and requests; hands out each model's `Snapshot` and prefix counts.

    Updates must be about an instance that has joined, in the incarnation that joined: anything else is a
    bug of the feed and raises `IllegalTransition`.
    """

    def __init__(self, limits: ClusterLimits | None = None, index: PrefixIndex | None = None) -> None:
        """`index`: an empty one for as many blocks as the limits say; None: the usual one."""
        self.limits = limits or ClusterLimits()
        self.index = PrefixIndex(self.limits.max_indexed_blocks) if index is None else index
        self.host_blocks = HostBlocks(self.index)
        self.disk_blocks = HostBlocks(self.index)
        self._tier_slots: dict[str, TierSlots] = {}
        """By model, of the last snapshot that was asked about; empty whenever an instance's slots change."""
        self._fleets: dict[str, Fleet] = {}
        self._instances: dict[str, InstanceDescription] = {}
        self._loads: dict[str, LoadReport] = {}
        self.immovable: set[str] = set()
        """Instances that say that no request can be moved to or from them."""
        self._unreported = UnreportedRequests(self.limits.max_unreported_requests)
        self._decodes = UnreportedRequests(self.limits.max_unreported_requests)
        """Requests that are prefilled elsewhere first."""
        self._arriving = UnreportedRequests(self.limits.max_unreported_requests)
        """Requests whose prompt was computed elsewhere."""
        self._counted = CountedRequests(self.limits.max_counted)
        self._unseen = UnseenLoads()
        """What instances have said to have besides all that is known here."""
        self.expected = ExpectedBlocks(self.limits.max_expected_marks)
        """What instances are going to have in their prefix caches."""
        self._unmonitored: set[str] = set()
        self._admitted: dict[tuple[str, str], None] = {}
        """(request, instance) of late, oldest first."""

    # -- what happens

    def joined(self, instance: InstanceDescription) -> None:
        """A new instance or a new incarnation of one; it starts without load and with an empty cache."""
        known = self._instances.get(instance.instance_id)
        if known is not None:
            self.lost(known.instance_id, known.incarnation_id)
        fleet = self._fleets.get(instance.model)
        if fleet is None:
            self._forget_empty_fleets()
            fleet = self._fleets[instance.model] = Fleet(instance.model)
        fleet.add(instance, self.index.add_instance())
        self._instances[instance.instance_id] = instance
        self._loads[instance.instance_id] = LoadReport()

    def lost(self, instance_id: str, incarnation_id: str) -> None:
        """The instance is gone, and with it its cache and its unreported requests."""
        fleet = self._fleet_of(instance_id, incarnation_id, "lost")
        self.index.retire(fleet.slot(instance_id))
        self.host_blocks.lost(instance_id)
        self.disk_blocks.lost(instance_id)
        fleet.remove(instance_id)
        self._unreported.close_instance(instance_id)
        self._decodes.close_instance(instance_id)
        self._arriving.close_instance(instance_id)
        self.expected.lost(instance_id)
        self._counted.lost(instance_id)
        self._unseen.lost(instance_id)
        self._unmonitored.discard(instance_id)
        del self._instances[instance_id]
        del self._loads[instance_id]
        self.immovable.discard(instance_id)

    def reported(
        self,
        instance_id: str,
        incarnation_id: str,
        load: LoadReport,
        state: InstanceState,
        admitted_request_ids: Iterable[str] = (),
        ended_request_ids: Iterable[str] = (),
    ) -> None:
        """The instance's load; from now on it counts the admitted requests itself, and no more those that have ended
        there, or moved away."""
        fleet = self._fleet_of(instance_id, incarnation_id, "load report")
        prefill_tokens = dict[str, int]()
        for request_id in admitted_request_ids:
            self._admitted[request_id, instance_id] = None
            prefill_tokens[request_id] = 0
            for request in self._unreported.close(request_id, instance_id):
                fleet.admit(instance_id, request.tokens)
                prefill_tokens[request_id] = request.tokens
            self._take_back_decodes(self._decodes.close(request_id, instance_id))
            self._take_back_decodes(self._arriving.close(request_id, instance_id))
        self._counted.reported(instance_id, prefill_tokens, ended_request_ids)
        self._unseen.reported(instance_id)
        fleet.report(instance_id, load, state, self._loads[instance_id])
        self._loads[instance_id] = load
        self.expected.reported(instance_id)
        if load.transfer_obstacle:
            self.immovable.add(instance_id)
        elif self.immovable:
            self.immovable.discard(instance_id)
        while len(self._admitted) > self.limits.max_admitted:
            del self._admitted[next(iter(self._admitted))]

    def corrected(self, instance_id: str, present: PresentLoad, now_s: float) -> None:
        """The instance has given a request back, which counts there no more, and says what it has: until its next
        report it is believed to have at least that. One that is not known is left alone."""
        instance = self._instances.get(instance_id)
        if instance is not None:
            self._unseen.correct(self._fleets[instance.model], instance_id, present, now_s)

    def staled(self, instance_id: str, incarnation_id: str, stale: bool) -> None:
        """The instance's load signal has become too old to be believed, or is fresh again."""
        self._fleet_of(instance_id, incarnation_id, "staleness").mark_stale(instance_id, stale)

    def unmonitor(self, instance_id: str, incarnation_id: str) -> None:
        """No monitor hears of the instance any more, but it lives. Its last load stands until it joins again; what is
        placed there counts until it ends, because no report will count it."""
        self._fleet_of(instance_id, incarnation_id, "loss of its reports")
        self._unmonitored.add(instance_id)

    def adopt(self, source: "ClusterTable", instance_id: str) -> None:
        """Take over an instance that this table does not know as another one knows it, without its prefix cache."""
        instance = source._instances[instance_id]
        fleet = source._fleets[instance.model]
        self.joined(instance)
        self.reported(instance_id, instance.incarnation_id, source._loads[instance_id], fleet.state(instance_id))
        self.staled(instance_id, instance.incarnation_id, fleet.is_stale(instance_id))
        if fleet.is_profiled(instance_id):
            self.costed(instance_id, instance.incarnation_id, fleet.costs(instance_id))
        self.kv_costed(instance_id, instance.incarnation_id, fleet.kv_costs(instance_id))
        self.unmonitor(instance_id, instance.incarnation_id)
        for kind in PLACED_KINDS:
            for request in source._ledger(kind).of(instance_id):
                self._open(kind, request)
        self._counted.adopt(source._counted, instance_id)
        self.expected.take_over(source.expected, lambda where: where == instance_id)

    def costed(self, instance_id: str, incarnation_id: str, costs: StepCosts) -> None:
        """A profile says what the instance's steps cost."""
        self._fleet_of(instance_id, incarnation_id, "step costs").set_costs(instance_id, costs)

    def kv_costed(self, instance_id: str, incarnation_id: str, costs: KvCosts) -> None:
        """What it takes to bring KV to the instance is known; until then nobody tries."""
        self._fleet_of(instance_id, incarnation_id, "KV costs").set_kv_costs(instance_id, costs)

    def cached(self, instance_id: str, incarnation_id: str, blocks: KvBlocks) -> int:
        """The instance's prefix cache, or what it could load from its host, has changed. Returns how many blocks the
        index refused."""
        fleet = self._fleet_of(instance_id, incarnation_id, "KV update")
        if blocks.tier is not KvTier.ENGINE:
            tier = self.host_blocks if blocks.tier is KvTier.HOST else self.disk_blocks
            former_slot = tier.slot(instance_id)
            refused = tier.update(instance_id, blocks)
            if tier.slot(instance_id) != former_slot:
                self._tier_slots.clear()
            return refused
        slot = fleet.slot(instance_id)
        if blocks.cleared:
            self._tier_slots.clear()
            self.index.retire(slot)
            slot = self.index.add_instance()
            fleet.move_slot(instance_id, slot)
        self.expected.stored(instance_id, blocks.stored)
        self.index.remove(slot, blocks.removed)
        return self.index.store(slot, blocks.stored)

    def placed(
        self,
        request_id: str,
        instance_id: str,
        prefill_tokens: int,
        now_s: float,
        marks: Sequence[int] = (),
        computed_ms: float = 0.0,
    ) -> None:
        """A request was placed: it counts as load of the instance until a report says so, or it ends. `marks` (see
        `marks_of`) of its prompt count as cached there from now on, though they are thought to be computed in
        `computed_ms` only."""
        self.expected.forget_older(now_s - self.limits.expected_s)
        self.expected.add(request_id, instance_id, marks, now_s, now_s + computed_ms / 1000)
        self._take_back(self._unreported.close_older(now_s - self.limits.unreported_s, self._unmonitored))
        model = self._instances[instance_id].model
        request = UnreportedRequest(request_id, model, instance_id, prefill_tokens, now_s)
        self._take_back(self._unreported.add(request))
        self._fleets[model].add_unreported(instance_id, 1, prefill_tokens)

    def placed_decode(
        self, request_id: str, instance_id: str, context_tokens: int, now_s: float, *, is_prefilled: bool = False
    ) -> None:
        """A placed request is to be decoded there after its prefill elsewhere: it counts as load to come until a report
        of that instance names it, or it ends. `is_prefilled`: it can come now."""
        self._forget_decodes(now_s)
        model = self._instances[instance_id].model
        ledger = self._arriving if is_prefilled else self._decodes
        self._take_back_decodes(ledger.add(UnreportedRequest(request_id, model, instance_id, context_tokens, now_s)))
        self._fleets[model].add_unreported_decodes(instance_id, 1, context_tokens)

    def ended(self, request_id: str) -> tuple[str, ...]:
        """A placed request is over, or never came to run: it counts nowhere from now on. Returns the instances that had
        not reported it yet."""
        return self._ended(request_id, None)

    def shared(self, event: SharedEvent, now_s: float) -> bool:
        """Another scheduler has placed a request, or heard of its end: what it placed counts here, too, until a report
        does. False if it changes nothing: the instance is not known, has reported the request already, or the request
        was placed again by this scheduler, which knows better."""
        if event.kind is SharedKind.ENDED:
            return bool(self._ended(event.request_id, event.instance_id))
        instance = self._instances.get(event.instance_id)
        if instance is None or (event.request_id, event.instance_id) in self._admitted:
            return False
        ledger = self._ledger(event.kind)
        known = ledger.get(event.request_id)
        if known is not None and not known.origin:
            return False
        if event.kind is SharedKind.PREFILL:
            computed_s = now_s + event.computed_ms / 1000
            self.expected.add(event.request_id, event.instance_id, event.marks, now_s, computed_s)
        placed = UnreportedRequest(
            event.request_id, instance.model, event.instance_id, event.tokens, now_s, event.origin
        )
        self._open(event.kind, placed)
        return True

    def open_placements(self) -> list[SharedEvent]:
        """This scheduler's own that no report counts yet, for one that has just come."""
        return [
            SharedEvent(kind, request.request_id, request.instance_id, request.tokens)
            for kind in PLACED_KINDS
            for request in self._ledger(kind)
            if not request.origin
        ]

    def take_over(self, former: "ClusterTable") -> int:
        """Go on with the placements that the table before this one counted and nobody has reported since. Returns how
        many. This table has none of its own yet."""
        assert not self.expected_requests(), "placements are made from the table in force"
        taken = 0
        for kind in PLACED_KINDS:
            for request in former._ledger(kind):
                is_same = self._is_same_incarnation(former, request.instance_id)
                if is_same and (request.request_id, request.instance_id) not in self._admitted:
                    self._open(kind, request)
                    taken += 1
        self.expected.take_over(former.expected, lambda where: self._is_same_incarnation(former, where))
        return taken

    def forget_unreported(self, now_s: float) -> int:
        """Drop placements that no report has counted for too long. Returns how many."""
        forgotten = self._unreported.close_older(now_s - self.limits.unreported_s, self._unmonitored)
        self._take_back(forgotten)
        self._unseen.close_older(now_s - self.limits.unreported_s)
        self._forget_decodes(now_s)
        self.expected.forget_older(now_s - self.limits.expected_s)
        return len(forgotten)

    # -- what is known

    def models(self) -> tuple[str, ...]:
        """Every model that an instance has announced, those without an instance now included."""
        return tuple(self._fleets)

    def instances(self) -> tuple[InstanceDescription, ...]:
        """All instances of all models, in the order in which they joined."""
        return tuple(self._instances.values())

    def incarnation_id(self, instance_id: str) -> str | None:
        """The incarnation that has joined; None for an unknown instance."""
        instance = self._instances.get(instance_id)
        return None if instance is None else instance.incarnation_id

    def step_costs(self, instance_id: str) -> tuple[StepCosts, int]:
        """What the instance's steps cost, as far as is known, and how many tokens a step has. Raises `KeyError` for an
        unknown instance."""
        instance = self._instances[instance_id]
        return self._fleets[instance.model].costs(instance_id), instance.max_step_tokens

    def kv_costs(self, instance_id: str) -> KvCosts:
        """What it takes to bring KV to the instance, as far as is known. Raises `KeyError` for an unknown instance."""
        return self._fleets[self._instances[instance_id].model].kv_costs(instance_id)

    def placeable_instances(self) -> int:
        """Instances of all models that new requests may go to."""
        return sum(fleet.placeable_instances for fleet in tuple(self._fleets.values()))

    def load(self, instance_id: str) -> LoadReport:
        """The last report; empty before the first."""
        return self._loads[instance_id]

    def state(self, instance_id: str) -> InstanceState:
        """The instance's state by its last load report; starting before the first. Raises `KeyError` for an unknown
        instance."""
        return self._fleets[self._instances[instance_id].model].state(instance_id)

    def is_stale(self, instance_id: str) -> bool:
        """Whether the instance's load signal is too old to be placed by. Raises `KeyError` for an unknown instance."""
        return self._fleets[self._instances[instance_id].model].is_stale(instance_id)

    def snapshot(self, model: str) -> Snapshot | None:
        """The model's instances now; None for a model that nobody has announced."""
        fleet = self._fleets.get(model)
        return None if fleet is None else fleet.snapshot()

    def held_tokens(self, snapshot: Snapshot, block_hashes: Sequence[int]) -> Integers:
        """Leading prompt tokens that each instance of the (current) snapshot holds now, in its order."""
        if not block_hashes:
            return np.zeros(len(snapshot), np.int64)
        fleet = self._fleets[snapshot.model]
        held: Integers = self.index.lookup(block_hashes, fleet.slots_mask).take(snapshot.slots) * snapshot.block_tokens
        return held

    def known_tokens(self, snapshot: Snapshot, block_hashes: Sequence[int]) -> tuple[Integers, Integers | None]:
        """Leading prompt tokens that each instance holds now, and those that it holds or could load from the memory or
        the disk of its host; None: nobody could load any."""
        if not (self.host_blocks.slots_mask or self.disk_blocks.slots_mask) or not block_hashes:
            return self.held_tokens(snapshot, block_hashes), None
        tiers = self._tier_slots.get(snapshot.model)
        if tiers is None or tiers.instances is not snapshot.instances:
            tiers = self._tier_slots[snapshot.model] = TierSlots.of(snapshot, (self.host_blocks, self.disk_blocks))
        leading = self.index.lookup(block_hashes, self._fleets[snapshot.model].slots_mask | tiers.slots_mask)
        held, *loadable = leading.take(tiers.slots) * tiers.block_tokens
        if not loadable:
            return held, None
        most = np.maximum(held, loadable[0])
        for tokens in loadable[1:]:
            np.maximum(most, tokens, out=most)
        return held, most

    def with_expected(
        self, snapshot: Snapshot, block_hashes: Sequence[int], held_tokens: Integers, now_s: float
    ) -> tuple[Integers, NDArray[np.float64] | None]:
        """What `held_tokens` becomes with what each instance is going to hold, and in how long that is thought to be
        computed: 0 where nothing is added, or it should be by now; None, and the same array, if nothing is anywhere."""
        if not len(self.expected) or not block_hashes or not len(snapshot):
            return held_tokens, None
        block_tokens = snapshot.instances[0].block_tokens  # chains are hashed in blocks of one size
        # Only what goes beyond the longest prefix that is cached anywhere is worth the look.
        held_blocks = int(held_tokens[held_tokens.argmax()]) // block_tokens
        leading = self.expected.leading(block_hashes, mark_spacing(block_tokens), held_blocks)
        if not leading:
            return held_tokens, None
        cached, comes_ms, fleet = held_tokens.copy(), np.zeros(len(snapshot)), self._fleets[snapshot.model]
        for instance_id, (blocks, computed_s) in leading.items():
            row = fleet.row(instance_id)
            if row is not None and blocks * block_tokens > cached[row]:
                cached[row] = blocks * block_tokens
                comes_ms[row] = max(0.0, 1000 * (computed_s - now_s))
        return cached, comes_ms

    def expected_requests(self) -> int:
        """Requests placed, or to be decoded somewhere, that no report counts yet."""
        return len(self._unreported) + len(self._decodes) + len(self._arriving)

    def unreported_requests(self) -> int:
        """Requests placed that no report counts yet."""
        return len(self._unreported)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`. Looks at all but the prefix index, whose own `validate` takes long."""
        known = self._instances.keys()
        assert self._loads.keys() == known, "each instance has a load"
        assert self.immovable <= known, "nothing is kept of an instance that has gone"
        assert self._unmonitored <= known, "nothing is kept of an instance that has gone"
        assert len(self._admitted) <= self.limits.max_admitted, "admissions that are remembered are bounded"
        self.expected.validate()
        for blocks in (self.host_blocks, self.disk_blocks):
            blocks.validate()
            assert blocks.instance_ids() <= known, "nothing is kept of an instance that has gone"
        assert self.expected.instance_ids() <= known, "nothing is expected of one that has gone"
        on_hosts = self.host_blocks.slots_mask + self.disk_blocks.slots_mask
        slots = sum(fleet.slots_mask for fleet in self._fleets.values()) + on_hosts
        assert self.index.live_slots == slots, "slots are instances' or hosts'"
        expected = {instance_id: [0, 0, 0, 0] for instance_id in known}
        for ledger, columns in ((self._unreported, (0, 1)), (self._decodes, (2, 3)), (self._arriving, (2, 3))):
            ledger.validate()
            for request in ledger:
                assert request.instance_id in known, f"{request} is to come to an instance that is not there"
                requests, tokens = columns
                expected[request.instance_id][requests] += 1
                expected[request.instance_id][tokens] += request.tokens
        self._counted.validate()
        self._unseen.validate()
        for unseen in self._unseen:
            assert unseen.instance_id in known, "nothing is kept of an instance that has gone"
            expected[unseen.instance_id][0] += unseen.requests
            expected[unseen.instance_id][1] += unseen.prefill_tokens
        for model, fleet in self._fleets.items():
            fleet.validate()
            view = fleet.snapshot()
            for row, instance in enumerate(view.instances):
                assert instance is self._instances[instance.instance_id], "fleets are made of the instances"
                assert instance.model == model, "a fleet serves one model"
                counted = [
                    int(column[row])
                    for column in (
                        view.unreported_requests,
                        view.unreported_prefill_tokens,
                        view.unreported_decodes,
                        view.unreported_decode_tokens,
                    )
                ]
                to_come = expected[instance.instance_id]
                assert counted == to_come, f"{to_come} are to come to {instance.instance_id}, counted are {counted}"
        assert sum(len(fleet.snapshot()) for fleet in self._fleets.values()) == len(known), "each is in one fleet"

    # -- inside

    def _fleet_of(self, instance_id: str, incarnation_id: str, event: str) -> Fleet:
        instance = self._instances.get(instance_id)
        if instance is None or instance.incarnation_id != incarnation_id:
            known = "unknown" if instance is None else f"in incarnation {instance.incarnation_id}"
            raise IllegalTransition(
                f"cluster table: {event} of instance {instance_id}, incarnation {incarnation_id}, which is {known}; "
                "an instance must join first, and updates of a past incarnation must not be passed on"
            )
        return self._fleets[instance.model]

    def _is_same_incarnation(self, former: "ClusterTable", instance_id: str) -> bool:
        now, then = self._instances.get(instance_id), former._instances.get(instance_id)
        return now is not None and then is not None and now.incarnation_id == then.incarnation_id

    def _ledger(self, kind: SharedKind) -> UnreportedRequests:
        match kind:
            case SharedKind.PREFILL:
                return self._unreported
            case SharedKind.DECODE:
                return self._decodes
            case _:
                return self._arriving

    def _open(self, kind: SharedKind, request: UnreportedRequest) -> None:
        fleet = self._fleets[request.model]
        if kind is SharedKind.PREFILL:
            self._take_back(self._unreported.add(request))
            fleet.add_unreported(request.instance_id, 1, request.tokens)
        else:
            self._take_back_decodes(self._ledger(kind).add(request))
            fleet.add_unreported_decodes(request.instance_id, 1, request.tokens)

    def _ended(self, request_id: str, instance_id: str | None) -> tuple[str, ...]:
        prefills = self._unreported.close(request_id, instance_id)
        decodes = self._decodes.close(request_id, instance_id) + self._arriving.close(request_id, instance_id)
        self._take_back(prefills)
        self._take_back_decodes(decodes)
        counted = self._counted.ended(request_id, instance_id)
        if counted is not None:
            fleet = self._fleets[self._instances[counted.instance_id].model]
            fleet.take_out(counted.instance_id, counted.prefill_tokens)
        self.expected.ended(request_id, instance_id)
        return tuple(request.instance_id for request in (*prefills, *decodes))

    def _take_back(self, closed: Iterable[UnreportedRequest]) -> None:
        for request in closed:
            self._fleets[request.model].add_unreported(request.instance_id, -1, -request.tokens)

    def _forget_decodes(self, now_s: float) -> None:
        kept = self._unmonitored
        self._take_back_decodes(self._decodes.close_older(now_s - self.limits.unreported_decode_s, kept))
        self._take_back_decodes(self._arriving.close_older(now_s - self.limits.arriving_s, kept))

    def _take_back_decodes(self, closed: Iterable[UnreportedRequest]) -> None:
        for request in closed:
            self._fleets[request.model].add_unreported_decodes(request.instance_id, -1, -request.tokens)

    def _forget_empty_fleets(self) -> None:
        """Make room for one more model, if need be, among those that have no instance left."""
        if len(self._fleets) < self.limits.max_models:
            return
        for model in [model for model, fleet in self._fleets.items() if not len(fleet.snapshot())]:
            del self._fleets[model]
            self._tier_slots.pop(model, None)
