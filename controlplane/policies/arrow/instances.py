"""The instances of one model under Arrow: pools, queues, loads, and the moves between pools (Algorithms 3 and 4)."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import InstancePhase
from controlplane.model.placement import PlacementProblem
from controlplane.model.snapshot import Integers, Snapshot
from controlplane.policies.arrow.parameters import ArrowParameters
from controlplane.policies.arrow.pools import ElasticPools, Pool
from controlplane.policies.arrow.prefill_queues import PrefillQueues
from controlplane.policies.indicators import uncached_tokens

# The load of every instance in Arrow's terms (section 5.3).


@dataclass(frozen=True, slots=True, eq=False)
class InstanceLoads:
    """Arrays of shape (instances,), in the order of the snapshot."""

    prefill_delay_ms: NDArray[np.float64]
    """Until all that is queued there is prefilled."""
    running_tokens: Integers
    """Of the requests being processed and of those on their way to be decoded there."""
    max_running_tokens: Integers
    token_interval_ms: NDArray[np.float64]
    """Average over the sliding window of the instance; 0 where nothing decodes."""
    is_prefilling: NDArray[np.bool_]
    """Has prompts left to compute."""
    is_decoding: NDArray[np.bool_]
    """Has requests left to decode, or on their way."""


def loads_of(snapshot: Snapshot, queues: PrefillQueues, max_running_tokens: int) -> InstanceLoads:
    """The loads now. `max_running_tokens` 0: what the KV memory holds."""
    kv_tokens: Integers = snapshot.kv_blocks_total * snapshot.block_tokens
    return InstanceLoads(
        prefill_delay_ms=queues.delays_ms(snapshot),
        running_tokens=snapshot.running_tokens + snapshot.unreported_decode_tokens,
        max_running_tokens=np.minimum(kv_tokens, max_running_tokens) if max_running_tokens else kv_tokens,
        token_interval_ms=snapshot.token_interval_us / 1000,
        is_prefilling=(snapshot.pending_prefill_tokens > 0) | (snapshot.unreported_requests > 0),
        is_decoding=(snapshot.decoding_requests > 0) | (snapshot.unreported_decodes > 0),
    )


NO_POOLS: Mapping[str, Pool] = MappingProxyType({})
_ONLY = {InstancePhase.PREFILL: Pool.PREFILL, InstancePhase.DECODE: Pool.DECODE}
POOL_CODES = {pool: code for code, pool in enumerate(Pool)}
"""As `explain` shows them: 0 prefill, 1 decode, 2 prefill to decode, 3 decode to prefill."""
_FIRST_TRANSITION = POOL_CODES[Pool.PREFILL_TO_DECODE]


class ElasticInstances:
    """What Arrow knows of one model's instances. `look` brings it up to date; everything else is about that look."""

    def __init__(self, parameters: ArrowParameters, former: Mapping[str, Pool] = NO_POOLS) -> None:
        """`former`: the pools in which another scheduler had the instances, to go on with."""
        self.pools = ElasticPools()
        self._former = dict(former)
        """Of the instances that have not been seen yet."""
        self.snapshot: Snapshot
        self.loads: InstanceLoads
        self._parameters = parameters
        self._codes: NDArray[np.int64] = np.zeros(0, np.int64)
        """The pool of each row."""
        self._phases: dict[str, InstancePhase] = {}
        """As they joined: one that is back for another phase joins anew."""
        self._queues = PrefillQueues(parameters.curve)

    def look(self, snapshot: Snapshot) -> None:
        """Take in who has joined or left, and which instances have finished their old kind of work."""
        self.snapshot = snapshot
        known = {instance.instance_id: instance for instance in snapshot.instances}
        for instance_id, phase in list(self._phases.items()):
            if instance_id not in known or known[instance_id].phase is not phase:
                self.pools.leave(instance_id)
                del self._phases[instance_id]
        # Those that have a pool come first: the others make both kinds even.
        for instance_id in sorted(known.keys() - set(self.pools), key=lambda each: (each not in self._former, each)):
            phase = known[instance_id].phase
            self.pools.join(instance_id, _ONLY.get(phase), self._former.pop(instance_id, None))
            self._phases[instance_id] = phase
        self.loads = loads_of(snapshot, self._queues, self._parameters.max_running_tokens)
        self._read_pools()
        for row in np.flatnonzero(self._codes >= _FIRST_TRANSITION).tolist():
            prefills, decodes = bool(self.loads.is_prefilling[row]), bool(self.loads.is_decoding[row])
            self._codes[row] = POOL_CODES[self.pools.settle(self._id(row), prefills, decodes)]
        self._keep_both_kinds()

    def placed(self, problem: PlacementProblem, row: int) -> None:
        """A prompt was placed there, in the snapshot that was looked at last."""
        self._queues.add(problem, row, int(uncached_tokens(problem)[row]))

    def pool(self, row: int) -> Pool:
        """The pool of the instance in this row of the current snapshot."""
        return self.pools[self._id(row)]

    def rows_in(self, pool: Pool) -> NDArray[np.bool_]:
        """True for the instances of a pool. Shape (instances,)."""
        rows: NDArray[np.bool_] = self._codes == POOL_CODES[pool]
        return rows

    def decoding_rows(self) -> NDArray[np.bool_]:
        """True for the instances that new decodes may go to."""
        return self.rows_in(Pool.DECODE) | self.rows_in(Pool.PREFILL_TO_DECODE)

    def pool_codes(self) -> NDArray[np.int64]:
        """Each instance's pool as a number (`POOL_CODES`), for `explain`; shape (instances,)."""
        return self._codes.copy()

    def decode_load_is_low(self) -> bool:
        """Whether decoding can spare an instance: Algorithm 1, and the overload rule of section 5.5."""
        rows = self.decoding_rows()
        limit_tokens = self._parameters.low_load * int(self.loads.max_running_tokens[rows].sum())
        return int(self.loads.running_tokens[rows].sum()) <= limit_tokens

    def try_move_decode_to_prefill(self) -> int | None:
        """Algorithm 3: the instance, now for prefill, with the fewest running tokens; None if none can be spared."""
        if not self.pools.can_give_to_prefill():
            return None
        row = self._least(self.loads.running_tokens, Pool.PREFILL_TO_DECODE, Pool.DECODE)
        if row is not None:
            self._codes[row] = POOL_CODES[self.pools.assign_prefill(self._id(row), bool(self.loads.is_decoding[row]))]
        return row

    def try_move_prefill_to_decode(self, idle_only: bool = False) -> int | None:
        """Algorithm 4: the instance, now for decoding, that has the least prefill delay; None if none can be spared.

        `idle_only`: only one that has nothing to prefill (section 5.5, case 3).
        """
        if not self.pools.can_give_to_decode():
            return None
        among = ~self.loads.is_prefilling if idle_only else np.ones(len(self.snapshot), np.bool_)
        row = self._least(self.loads.prefill_delay_ms, Pool.DECODE_TO_PREFILL, Pool.PREFILL, among=among)
        if row is not None:
            self._codes[row] = POOL_CODES[self.pools.assign_decode(self._id(row), bool(self.loads.is_prefilling[row]))]
        return row

    def _keep_both_kinds(self) -> None:
        """Make up for the last instance of a kind that has left."""
        if self.pools.prefilling == 0:
            self.try_move_decode_to_prefill()
        elif self.pools.decoding == 0:
            self.try_move_prefill_to_decode()

    def _least(
        self,
        load: NDArray[np.int64] | NDArray[np.float64],
        first: Pool,
        then: Pool,
        among: NDArray[np.bool_] | None = None,
    ) -> int | None:
        """The elastic instance with the least load in the first pool; in the other one if the first has none."""
        instances = self.snapshot.instances
        elastic = np.fromiter((self.pools.is_elastic(each.instance_id) for each in instances), np.bool_, len(instances))
        for pool in (first, then):
            rows = np.flatnonzero(self.rows_in(pool) & elastic & (True if among is None else among))
            if len(rows):
                return int(rows[load[rows].argmin()])
        return None

    def _read_pools(self) -> None:
        codes = (POOL_CODES[self.pools[instance.instance_id]] for instance in self.snapshot.instances)
        self._codes = np.fromiter(codes, np.int64, len(self.snapshot))

    def _id(self, row: int) -> str:
        return self.snapshot.instances[row].instance_id
