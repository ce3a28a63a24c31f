"""How an instance gets the KV of a prompt: computes it, loads it from its host's memory or pulls it from another one.

It may pull what another one has cached, is going to have computed, or loads from the memory of its own host first.
Each way has a price in milliseconds for everybody: until the prompt can begin, behind the prompts that wait there or as
soon as the KV has come, whichever is later; then its own new tokens; and what those take from who runs there. Bringing
KV takes none of the steps of either instance: a copy reads memory at a percent of the rate of a step, and who serves it
lets no decode wait for more than a step.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import isfinite
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.kv_costs import KvCostRow
from controlplane.model.placement import PlacementProblem, PrefixPull
from controlplane.model.prompt_prices import PriceRow
from controlplane.model.snapshot import Snapshot
from controlplane.model.step_costs import CostRow

Milliseconds = NDArray[np.float64]

LEAST_BROUGHT_TOKENS: Final = 128
"""A shorter piece of a prefix is computed sooner than it is asked for."""
MOST_AWAITED_MS: Final = 4_000.0
"""What an instance computes later than this is not waited for by another one: pulls are given up after a time, and by
then much is different."""
MAX_LINKS: Final = 10_000
"""Links remembered before those that are idle again are forgotten."""
_NEVER_MS: Final = 1e12
"""In place of infinity, which times no tokens is no number."""
# As arrays: numpy reads a number of Python's in as long as it takes to multiply a column.
_ONE: Final = np.array(1.0)
_LEAST_BROUGHT_TOKENS: Final = np.array(float(LEAST_BROUGHT_TOKENS))
_NEVER: Final = np.array(np.inf)


def step_costs(snapshot: Snapshot) -> Sequence[Milliseconds | float]:
    """Numbers rather than columns where instances are alike: a decision is some thirty operations over them all."""
    costs: Sequence[Milliseconds | float] = snapshot.uniform_costs or snapshot.costs  # type: ignore[assignment]
    return costs


@lru_cache(maxsize=16)
def _finite(costs: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(min(value, _NEVER_MS) for value in costs)


def kv_costs(snapshot: Snapshot) -> Sequence[Milliseconds | float]:
    """Likewise of bringing KV, and finite."""
    if snapshot.uniform_kv_costs is not None:
        return _finite(snapshot.uniform_kv_costs)
    columns: Sequence[Milliseconds] = np.minimum(snapshot.kv_costs, _NEVER_MS)  # type: ignore[assignment]
    return columns


class PrefixSource(msgspec.Struct, frozen=True, eq=False):
    """The instance whose prefix would be pulled."""

    row: int
    tokens: int
    """Computed leading tokens of the prompt that it has, is going to have, or can load."""
    busy_ms: float = 0.0
    """Until earlier pulls from it are through, as far as is known."""
    comes_ms: float = 0.0
    """Until it has computed or loaded them; 0: it has."""
    loads_tokens: int = 0
    """So many of them it loads from the memory of its host."""

    @property
    def ready_ms(self) -> float:
        """Until they can be read."""
        return max(self.busy_ms, self.comes_ms)


class Way(msgspec.Struct, frozen=True, eq=False):
    """Bringing KV to each instance instead of computing it."""

    begin: Milliseconds
    """Until its own new tokens can be computed."""
    new: NDArray[np.float64] | float
    """Its own new tokens."""
    total: Milliseconds
    """To everybody, until the prompt is computed; infinite where it cannot be gone."""
    others: Milliseconds
    """The same by the cheapest of the ways before this one."""

    @property
    def is_best(self) -> NDArray[np.bool_]:
        """Where it is the cheapest of those and itself."""
        return self.total < self.others


class PrefillWays(msgspec.Struct, frozen=True, eq=False):
    """All ways to get the prompt's KV, on each instance."""

    prompt_tokens: int
    prices: NDArray[np.float64]
    """Those of the snapshot."""
    wait: Milliseconds
    """Until the prompts that wait on each instance are computed, and what of this one is to come there."""
    new: NDArray[np.float64]
    """Tokens that are new where what is not cached there is computed."""
    computed: Milliseconds
    """What that costs everybody, until the prompt is computed."""
    total: Milliseconds
    """The same by the cheapest way, with what is `displaced`."""
    loaded: Way | None
    """From the host's memory as far as it has it; the rest is computed. None: it has no more than is cached."""
    sources: Sequence[PrefixSource]
    pulled: Sequence[Way]
    """From each of the sources as far as it has it; the rest is computed."""
    displaced: Milliseconds | float
    """Of each way's total: what has no place there yet takes that of other KV, which somebody will load again from the
    host. Without host memory a price on that was tried and rejected (see `Penstock`)."""

    @classmethod
    def of(cls, problem: PlacementProblem, sources: Sequence[PrefixSource]) -> "PrefillWays":
        """The ways to get the prompt's KV with these to pull from."""
        prices = problem.snapshot.prices
        # As floats: an operation on integers and floats takes twice as long as one on floats alone.
        cached, prompt_tokens = problem.cached_tokens.astype(np.float64), problem.request.prompt_tokens
        host_tokens = None if problem.host_tokens is None else problem.host_tokens.astype(np.float64)
        wait, tokens, pairs = prices[PriceRow.WAIT], np.array(float(prompt_tokens)), np.array(2.0 * prompt_tokens + 1.0)
        if problem.comes_ms is not None:
            wait = np.maximum(wait, problem.comes_ms)
        new = tokens - cached
        np.maximum(new, _ONE, out=new)
        computed = _total(prices, wait, new, pairs)
        if not sources and host_tokens is None:
            return cls(prompt_tokens, prices, wait, new, computed, computed, None, (), (), 0.0)
        pull_fixed, pull_token, load_fixed, load_token = kv_costs(problem.snapshot)
        total = computed
        loaded: Way | None = None
        pulled: list[Way] = []
        if host_tokens is not None:
            brought = host_tokens - cached
            if brought[brought.argmax()] >= LEAST_BROUGHT_TOKENS:
                begin = brought * load_token
                begin += load_fixed
                np.maximum(wait, begin, out=begin)
                left = tokens - host_tokens
                np.maximum(left, _ONE, out=left)
                costs = _total(prices, begin, left, pairs)
                np.putmask(costs, brought < _LEAST_BROUGHT_TOKENS, _NEVER)
                loaded = Way(begin, left, costs, total)
                total = np.minimum(total, costs)
        for source in sources:
            begin = np.asarray(source.tokens * pull_token + (pull_fixed + source.ready_ms)) - cached * pull_token
            np.maximum(wait, begin, out=begin)
            rest = max(prompt_tokens - source.tokens, 1.0)
            costs = _total(prices, begin, rest, pairs)
            np.putmask(costs, cached > np.array(float(source.tokens - LEAST_BROUGHT_TOKENS)), _NEVER)
            pulled.append(Way(begin, rest, costs, total))
            total = np.minimum(total, costs)
        if host_tokens is None:
            return cls(prompt_tokens, prices, wait, new, computed, total, loaded, sources, pulled, 0.0)
        displaced = new * finite_or_none(load_token)
        return cls(prompt_tokens, prices, wait, new, computed, total + displaced, loaded, sources, pulled, displaced)

    def source_of(self, row: int) -> PrefixSource | None:
        """Whom the instance had best pull the KV from; None: that is not the cheapest way to get it."""
        found: PrefixSource | None = None
        for source, way in zip(self.sources, self.pulled, strict=True):
            if way.total[row] < way.others[row]:
                found = source
        return found

    def begin_and_new(self) -> tuple[Milliseconds, NDArray[np.float64]]:
        """When the prompt can begin, and its new tokens, by the cheapest way."""
        begin, new = self.wait, self.new
        for way in (self.loaded, *self.pulled):
            if way is not None:
                begin, new = np.where(way.is_best, way.begin, begin), np.where(way.is_best, way.new, new)
        return begin, new

    def own(self, new: NDArray[np.float64], pair_ms: Milliseconds | float) -> Milliseconds:
        """What the prompt with so many new tokens costs the request itself, once it begins. `pair_ms`: what steps cost
        by pair of tokens that attend."""
        own_token = self.prices[PriceRow.OWN_TOKEN]
        own: Milliseconds = new * (own_token + pair_ms * (self.prompt_tokens + 0.5 - 0.5 * new))
        return own

    def named_totals(self) -> Mapping[str, Milliseconds]:
        """What each way costs everybody until the prompt is computed, where there is more than one; infinite where it
        cannot be gone."""
        others = {} if self.loaded is None else {"if_loaded": self.loaded.total}
        for source, way in zip(self.sources, self.pulled, strict=True):
            waits = "if_awaited" if source.comes_ms else "if_pulled"
            others["if_pulled_from_host" if source.loads_tokens else waits] = way.total
        named = {"if_computed": self.computed, **others} if others else {}
        return {name: total + self.displaced for name, total in named.items()}


def _total(
    prices: NDArray[np.float64],
    begin: Milliseconds,
    new: NDArray[np.float64] | float,
    pairs: NDArray[np.float64],
) -> Milliseconds:
    """To everybody, until a prompt is computed that can begin at `begin` and has so many new tokens. `pairs`: twice its
    tokens and one; less the new ones, twice as many tokens as a new one attends to in the mean."""
    # In place, and no more of them than need be: an operation's call takes as long as ten times as many instances.
    total: Milliseconds = (pairs - new) * prices[PriceRow.HALF_PAIR]
    total += prices[PriceRow.TOKEN]
    total *= new
    total += begin
    return total


def finite_or_none(token_ms: Milliseconds | float) -> Milliseconds | float:
    """What a token takes to be brought; nothing where it cannot be."""
    if isinstance(token_ms, float):
        return token_ms if token_ms < _NEVER_MS else 0.0
    return np.where(token_ms < _NEVER_MS, token_ms, 0.0)


def _askable(problem: PlacementProblem, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The tokens, but none of an instance that may take no requests or has failed this one: it would refuse, or, where
    it hangs, be waited for."""
    snapshot, failed = problem.snapshot, problem.request.excluded_instance_ids
    if snapshot.placeable_instances < len(snapshot):
        tokens = tokens * snapshot.placeable
    if failed:
        tokens = tokens * np.array([each.instance_id not in failed for each in snapshot.instances])
    return tokens


def longest_sources(problem: PlacementProblem) -> list[int]:
    """Rows of the instances with the longest computed prefix, of those that can be asked for it; empty where it is too
    short for anybody to pull it."""
    snapshot = problem.snapshot
    if not snapshot.brings_kv or not problem.request.block_hashes:
        return []
    held = _askable(problem, problem.cached_tokens if problem.held_tokens is None else problem.held_tokens)
    if snapshot.uniform_kv_costs is None:
        held = held * np.isfinite(snapshot.kv_costs[KvCostRow.PULL_TOKEN])
    elif snapshot.uniform_kv_costs[KvCostRow.PULL_TOKEN] > _NEVER_MS:
        return []
    longest = held[held.argmax()]  # quicker than max(), which goes through Python
    if longest < LEAST_BROUGHT_TOKENS:
        return []
    rows = (held == longest).nonzero()[0]
    return [] if len(rows) == len(snapshot) else rows.tolist()


def awaited_source(problem: PlacementProblem) -> PrefixSource | None:
    """The instance that is going to have more of the prompt than any has; None: nobody is, or it takes too long.

    When it was placed it was known by when it is going to be computed, by a chain of pulls perhaps. The wait for the
    prompts there alone, which knows of none, made conversations near saturation take up to 11 % longer end to end.
    """
    cached, held, snapshot = problem.cached_tokens, problem.held_tokens, problem.snapshot
    if cached is held or held is None or not snapshot.brings_kv:
        return None
    cached, held = _askable(problem, cached), _askable(problem, held)
    row = int(cached.argmax())
    if cached[row] - held[held.argmax()] < LEAST_BROUGHT_TOKENS:
        return None
    prices: list[float] = snapshot.prices[:, row].tolist()
    # Overdue, it is waited for as long as what waits there takes.
    comes_ms = 0.0 if problem.comes_ms is None else float(problem.comes_ms[row])
    comes_ms = comes_ms or prices[PriceRow.WAIT]
    # Where not all has room, prompts wait for that, and nobody knows how long: most such waits were in vain.
    has_room = prices[PriceRow.HELD_TOKENS] <= snapshot.kv_blocks_total[row] * snapshot.block_tokens[row]
    is_near = has_room and 0 < comes_ms <= MOST_AWAITED_MS
    can_pull = np.isfinite(snapshot.kv_costs[KvCostRow.PULL_TOKEN, row])
    return PrefixSource(row, int(cached[row]), comes_ms=comes_ms) if is_near and can_pull else None


def hosted_source(problem: PlacementProblem) -> PrefixSource | None:
    """The instance whose host has more of the prompt in its memory than any instance has itself: it would load that
    first. None: there is none, or all can load as much themselves."""
    host, snapshot = problem.host_tokens, problem.snapshot
    if host is None:
        return None
    held = _askable(problem, problem.cached_tokens if problem.held_tokens is None else problem.held_tokens)
    askable = _askable(problem, host)
    row = int(askable.argmax())
    tokens = int(askable[row])
    if tokens - held[held.argmax()] < LEAST_BROUGHT_TOKENS or host[host.argmin()] == tokens:
        return None
    _, pull_token, load_fixed, load_token = snapshot.kv_costs[:, row].tolist()
    if not isfinite(pull_token) or not isfinite(load_token):
        return None
    loads_tokens = tokens - int(held[row])
    return PrefixSource(row, tokens, comes_ms=load_fixed + load_token * loads_tokens, loads_tokens=loads_tokens)


def held_tokens(problem: PlacementProblem, row: int) -> int:
    """Leading prompt tokens that the instance has computed."""
    return int((problem.cached_tokens if problem.held_tokens is None else problem.held_tokens)[row])


def choose_pull(problem: PlacementProblem, row: int) -> PrefixSource | None:
    """Whom the instance had better pull the prompt's prefix from; None: nobody. For policies that place without a
    thought of it."""
    rows, hosted = longest_sources(problem), hosted_source(problem)
    sources: tuple[PrefixSource, ...] = () if hosted is None else (hosted,)
    if rows:
        busy = problem.snapshot.batch_requests
        longest = min(rows, key=lambda each: int(busy[each]))
        sources = (PrefixSource(longest, held_tokens(problem, longest)), *sources)
    if not sources or sources[-1].tokens - problem.cached_tokens[row] < LEAST_BROUGHT_TOKENS:
        return None
    return PrefillWays.of(problem, sources).source_of(row)


def pull_ms(problem: PlacementProblem, source: PrefixSource, row: int) -> float:
    """How long an instance's pull from the source keeps its link busy."""
    costs = problem.snapshot.uniform_kv_costs or problem.snapshot.kv_costs[:, row].tolist()
    fixed, token = costs[KvCostRow.PULL_FIXED], costs[KvCostRow.PULL_TOKEN]
    return float(fixed + token * (source.tokens - int(problem.cached_tokens[row])))


def compute_ms(problem: PlacementProblem, tokens: int, row: int) -> float:
    """How long an instance on its own would compute the prompt up to so many tokens, from what it has cached on."""
    fixed, token, _, _, pair = problem.snapshot.uniform_costs or problem.snapshot.costs[:, row].tolist()
    cached = int(problem.cached_tokens[row])
    new = tokens - cached
    steps = max(1.0, new / max(1, int(problem.snapshot.step_tokens[row])))
    return float(fixed * steps + new * (token + pair * (cached + 0.5 * new)))


def computed_ms(problem: PlacementProblem, row: int, pull: PrefixPull | None, had_tokens: int) -> float:
    """How long until the instance has the whole prompt, of which it need not compute `had_tokens`: behind the prompts
    that wait there, and once what of it is to come, or is pulled or loaded, is there."""
    snapshot, prompt_tokens = problem.snapshot, problem.request.prompt_tokens
    prices: list[float] = snapshot.prices[:, row].tolist()
    wait_ms = prices[PriceRow.WAIT]
    if pull is not None:
        wait_ms = max(wait_ms, pull.comes_ms + pull.pull_ms)
    else:
        come_ms = 0.0 if problem.comes_ms is None else float(problem.comes_ms[row])
        wait_ms = max(wait_ms, come_ms, _load_ms(problem, row))
    pair_ms = (snapshot.uniform_costs or snapshot.costs[:, row].tolist())[CostRow.ATTENDED_PAIR]
    new = max(prompt_tokens - had_tokens, 1)
    return float(wait_ms + new * (prices[PriceRow.OWN_TOKEN] + pair_ms * (prompt_tokens + 0.5 - 0.5 * new)))


def _load_ms(problem: PlacementProblem, row: int) -> float:
    if problem.host_tokens is None:
        return 0.0
    brought = int(problem.host_tokens[row]) - int(problem.cached_tokens[row])
    costs = problem.snapshot.uniform_kv_costs or problem.snapshot.kv_costs[:, row].tolist()
    load_ms = costs[KvCostRow.LOAD_FIXED] + costs[KvCostRow.LOAD_TOKEN] * brought
    return load_ms if brought > 0 and isfinite(load_ms) else 0.0


class PullLinks:
    """Until when earlier pulls keep the links of the instances that they are from busy, as far as this scheduler has
    ordered them."""

    def __init__(self) -> None:
        self._busy_until_s: dict[str, float] = {}

    def busy_ms(self, instance_id: str, now_s: float) -> float:
        """How long another pull would wait there."""
        return max(0.0, 1000 * (self._busy_until_s.get(instance_id, now_s) - now_s))

    def pulled(self, instance_id: str, begins_s: float, pull_ms: float) -> None:
        """One more prefix is pulled from there, from then on or as soon as earlier ones are through."""
        links = self._busy_until_s
        links[instance_id] = max(links.get(instance_id, begins_s), begins_s) + pull_ms / 1000
        if len(links) > MAX_LINKS:
            self._busy_until_s = {each: until_s for each, until_s in links.items() if until_s > begins_s}
