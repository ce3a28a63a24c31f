"""What is asked of a placement policy, and what it answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import InstanceDescription
from controlplane.model.queue_belief import QueueBelief
from controlplane.model.snapshot import Snapshot


class PlacementRequest(msgspec.Struct, frozen=True):
    """A request as placement sees it: lengths and block hashes, no tokens."""

    request_id: str
    model: str
    prompt_tokens: int
    now_s: float
    """When the decision is made, on the caller's clock (monotonic in the mesh, simulated in the simulator)."""
    block_hashes: Sequence[int] = ()
    """Chain of the prompt's full blocks, see `prefix_hash`."""
    max_tokens: int = 0
    priority: int = 0
    excluded_instance_ids: frozenset[str] = frozenset()
    """Instances that failed this request before."""
    unreachable_instance_ids: frozenset[str] = frozenset()
    """Instances that the frontend that asks is not connected to."""
    is_decoding: bool = False
    """It has emitted tokens already (it lost its instance): it goes where requests are decoded, and stays there."""
    adapter_digest: str = ""
    """Of the LoRA adapter that it is for; empty: the model as it is."""
    vllm_parts: str = ""
    """What vLLM's own parts beside the frontend do of it: its prompt, its answer; empty: nothing. For `explain`."""


class PlacementProblem(msgspec.Struct, frozen=True, eq=False):
    """All that a policy may look at. Arrays have the shape (instances,), in the order of the snapshot."""

    request: PlacementRequest
    snapshot: Snapshot
    cached_tokens: NDArray[np.int64]
    """Leading prompt tokens in each instance's prefix cache."""
    candidates: NDArray[np.bool_]
    """Where the request may go; at least one; read-only. A policy that filters hands a narrower problem to the next."""
    decode_candidates: NDArray[np.bool_] | None = None
    """Where it may be decoded if not where it is prefilled; None: it must stay where it is prefilled."""
    is_decode_chosen_later: bool = False
    """A `LateDecider` will be asked for the decode instance at the end of the prefill, so it says nothing now."""
    held_tokens: NDArray[np.int64] | None = None
    """Of `cached_tokens` those that are computed, so that another instance could pull them; None: all of them."""
    comes_ms: NDArray[np.float64] | None = None
    """Until the rest of `cached_tokens` is computed, as was thought when it was placed; 0 where there is no rest, or it
    should be there by now. None: there is none anywhere."""
    host_tokens: NDArray[np.int64] | None = None
    """Leading prompt tokens that each instance holds or could load from its host's memory; None: nobody loads any."""


class DeferredIndicators(Mapping[str, NDArray[np.int64]]):
    """Indicators that are worked out only once somebody asks why: few ask, and it takes as long as to decide."""

    def __init__(self, work_out: Callable[[], Mapping[str, NDArray[np.int64]]], nbytes: int) -> None:
        """`work_out` rests on nothing that is a part of a snapshot, and keeps about `nbytes` of memory."""
        self.nbytes = nbytes
        self._work_out = work_out

    def __getitem__(self, name: str) -> NDArray[np.int64]:
        return self._indicators[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._indicators)

    def __len__(self) -> int:
        return len(self._indicators)

    @cached_property
    def _indicators(self) -> Mapping[str, NDArray[np.int64]]:
        return self._work_out()


class Decision(msgspec.Struct, frozen=True, eq=False):
    """A policy's choice and, for `explain`, what it was made of (arrays that the policy needed anyway)."""

    row: int
    """The chosen instance's place in the snapshot; always a candidate."""
    scores: NDArray[np.float64]
    """Lower wins; infinite where the instance was out of the question."""
    indicators: Mapping[str, NDArray[np.int64]] = {}
    decode_row: int = -1
    """Where the request is to be decoded: `row` or a decode candidate. -1: the policy does not say; `place` then keeps
    the request where it is prefilled or, where instances are for one phase only, decides by `phases`."""
    decode_scores: NDArray[np.float64] | None = None
    """What `decode_row` was made of; lower wins, infinite where the instance was out of the question."""
    stays: bool = False
    """The policy need not be asked at the end of the prefill, though it can be: the request is decoded where it is
    prefilled, or where the operator's phases say."""
    pull_row: int | None = None
    """The instance whose cached prefix is pulled before the rest is computed; -1: nothing is pulled; None: the policy
    does not say, and `place` has it pulled where that is cheaper."""
    pull_tokens: int = 0
    """How many leading tokens of the prompt are there then, those included that were there before."""
    pull_comes_ms: float = 0.0
    """How long the other instance is thought to go on computing or loading them; 0: it has them."""
    pull_loads_tokens: int = 0
    """So many of them it loads from the memory of its host first."""


class DecodeChoice(msgspec.Struct, frozen=True, eq=False):
    """The instance that decodes a placed request, with the reason."""

    row: int
    rule: str
    """The rule in one line, or why there was nothing to choose."""
    scores: NDArray[np.float64] | None = None
    """Lower wins; infinite where the instance was out of the question. None where there was nothing to choose."""


class PrefixPull(msgspec.Struct, frozen=True):
    """A prefix that an instance gets from another one before it computes the rest."""

    source: InstanceDescription
    tokens: int
    """Leading prompt tokens that are there then, those included that were there before."""
    pull_ms: float = 0.0
    """What it is expected to take."""
    compute_ms: float = 0.0
    """What it would take to compute the same."""
    comes_ms: float = 0.0
    """How long the source is thought to go on computing or loading it; 0: it has it."""
    loads_tokens: int = 0
    """So many of them the source loads from the memory of its host first."""


class Placement(msgspec.Struct, frozen=True, eq=False):
    """A request's first assignment, with its reasons."""

    request: PlacementRequest
    instance: InstanceDescription
    cached_tokens: int
    policy: str
    rule: str
    decision: Decision
    instances: tuple[InstanceDescription, ...]
    """The instances in the order of the snapshot, to which the rows of `decision` refer."""
    excluded: Mapping[str, str]
    """Instances that were no candidates, and why."""
    is_decode_open: bool = False
    """Who decodes is to be asked at the end of the prefill; until then it is where that is."""
    decode: DecodeChoice | None = None
    """None: where it is prefilled, as everywhere in a fleet in which every instance does both."""
    pull: PrefixPull | None = None
    """None: the instance computes what it has not cached, or loads it from its host's memory."""
    loaded_tokens: int = 0
    """Behind `cached_tokens`, what the instance could load from its host's memory."""
    computed_ms: float = 0.0
    """Until the prompt is computed, as is thought; 0: it is too short for others to wait for."""
    belief: QueueBelief | None = None
    """What the instance was believed to have to do, this request apart; `place` always says so."""

    @property
    def decode_instance(self) -> InstanceDescription:
        """Where the request is decoded: `instance` itself unless it moves after its first token."""
        return self.instance if self.decode is None else self.instances[self.decode.row]

    @property
    def is_split(self) -> bool:
        """Whether it is decoded elsewhere than it is prefilled."""
        return self.decode is not None and self.decode.row != self.decision.row
