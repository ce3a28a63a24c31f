"""Place one request: from the cluster table through a policy to an instance."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.cluster import ClusterTable
from controlplane.model.expected_blocks import marks_of
from controlplane.model.instance import InstanceDescription
from controlplane.model.placement import (
    Decision,
    DecodeChoice,
    Placement,
    PlacementProblem,
    PlacementRequest,
    PrefixPull,
)
from controlplane.model.queue_belief import QueueBelief
from controlplane.model.shared_event import MAX_SHARED_MARKS, SharedEvent, SharedKind
from controlplane.model.snapshot import Snapshot
from controlplane.policies import adapters, kv_options, phases
from controlplane.policies.interface import Policy, decides_late
from mesh.errors import NoInstance, UnknownModel

FAILED_BEFORE = "has failed this request before"
UNREACHABLE = "is not connected to the frontend of this request"
MAX_REASONS = 8
"""Instances named in an error message."""


def place(table: ClusterTable, policy: Policy, request: PlacementRequest, *, asks_later: bool = False) -> Placement:
    """Choose the instance for the prompt and, where phases are kept apart, the one to decode; count the request as
    their load.

    `asks_later`: the caller will call `place_decode` at the end of the prefill for a policy that `decides_late`; the
    decode instance then stays open.
    Raises `UnknownModel` if no instance has announced the model and `NoInstance` if none may take the request now.
    """
    snapshot = table.snapshot(request.model)
    if snapshot is None:
        raise UnknownModel(_unknown_model(table, request.model))
    candidates = snapshot.placeable
    excluded: dict[str, str] = {}
    is_narrower = request.excluded_instance_ids or request.unreachable_instance_ids or request.adapter_digest
    if is_narrower or snapshot.placeable_instances < len(snapshot):
        candidates, excluded = _narrow(table, snapshot, request)
    if len(excluded) == len(snapshot):
        raise NoInstance(_no_instance(request.model, excluded))
    decode_candidates = _movable(table, snapshot, candidates) if phases.moves(request) else None
    if snapshot.is_restricted:
        if decode_candidates is not None:
            decode_candidates = decode_candidates & snapshot.decode_rows
        suited = phases.phase_rows(snapshot, request, candidates)
        for row in np.flatnonzero(candidates & ~suited).tolist():
            excluded[snapshot.instances[row].instance_id] = f"is for {snapshot.instances[row].phase} only"
        candidates = suited
    if request.adapter_digest:
        candidates, passed_over = adapters.preferred(table, snapshot, request.adapter_digest, candidates)
        excluded |= passed_over
    held_tokens, host_tokens = table.known_tokens(snapshot, request.block_hashes)
    if not snapshot.brings_kv:
        host_tokens = None
    cached_tokens, comes_ms = table.with_expected(snapshot, request.block_hashes, held_tokens, request.now_s)
    stays_open = asks_later and decides_late(policy) and not request.is_decoding
    problem = PlacementProblem(
        request, snapshot, cached_tokens, candidates, decode_candidates, stays_open, held_tokens, comes_ms, host_tokens
    )
    decision = policy.decide(problem)
    stays_open = stays_open and not decision.stays
    if decision.pull_row is None and snapshot.brings_kv:
        decision = _with_pull(problem, decision)
    instance = snapshot.instances[decision.row]
    cached = min(int(cached_tokens[decision.row]), request.prompt_tokens)
    had_tokens, pull = min(_had_tokens(problem, decision), request.prompt_tokens), _pull(problem, decision)
    new_tokens = request.prompt_tokens - had_tokens
    marks = marks_of(request.block_hashes, instance.block_tokens, cached)
    placement = Placement(
        request,
        instance,
        cached,
        policy.name,
        policy.rule,
        decision,
        snapshot.instances,
        excluded,
        is_decode_open=stays_open and decode_candidates is not None,
        decode=None if stays_open else phases.choose_decode(problem, decision),
        loaded_tokens=0 if host_tokens is None else max(0, int(host_tokens[decision.row]) - cached),
        pull=pull,
        computed_ms=kv_options.computed_ms(problem, decision.row, pull, had_tokens) if marks else 0.0,
        belief=QueueBelief(int(snapshot.pending_prefill_tokens[decision.row]), new_tokens),
    )
    table.placed(request.request_id, instance.instance_id, new_tokens, request.now_s, marks, placement.computed_ms)
    if placement.is_split:
        decode_id = placement.decode_instance.instance_id
        table.placed_decode(request.request_id, decode_id, request.prompt_tokens, request.now_s)
    return placement


def shared_events(placement: Placement) -> tuple[SharedEvent, ...]:
    """What other schedulers are to count of a placement."""
    request, instance = placement.request, placement.instance
    tokens = request.prompt_tokens - placement.cached_tokens
    marks = marks_of(request.block_hashes, instance.block_tokens, placement.cached_tokens)
    prefill = SharedEvent(
        SharedKind.PREFILL,
        request.request_id,
        instance.instance_id,
        tokens,
        marks=tuple(marks[:MAX_SHARED_MARKS]),
        computed_ms=placement.computed_ms,
    )
    if not placement.is_split:
        return (prefill,)
    decode_id = placement.decode_instance.instance_id
    return prefill, SharedEvent(SharedKind.DECODE, request.request_id, decode_id, request.prompt_tokens)


def place_decode(
    table: ClusterTable, policy: Policy, request: PlacementRequest, prefill_instance_id: str
) -> InstanceDescription | None:
    """Where a request is decoded whose prompt the instance has computed; None: where it is. See `choose_decode`."""
    chosen = choose_decode(table, policy, request, prefill_instance_id)
    if chosen is None:
        return None
    instances, choice = chosen
    return None if instances[choice.row].instance_id == prefill_instance_id else instances[choice.row]


def choose_decode(
    table: ClusterTable, policy: Policy, request: PlacementRequest, prefill_instance_id: str
) -> tuple[tuple[InstanceDescription, ...], DecodeChoice] | None:
    """The instances and the choice among them, at the end of a prefill; None where there is nothing to choose.

    `request.now_s` is the time of this question. The request counts as load to come of the instance that is chosen.
    A policy that does not decide late has come into force since the request was placed: then `phases` decides.
    """
    snapshot = table.snapshot(request.model)
    prefill_row = None if snapshot is None else snapshot.row(prefill_instance_id)
    if snapshot is None or prefill_row is None or not phases.moves(request):
        return None
    candidates, _ = _narrow(table, snapshot, request)
    decode_candidates = _movable(table, snapshot, candidates) & snapshot.decode_rows
    nothing_cached = np.zeros(len(snapshot), np.int64)
    problem = PlacementProblem(request, snapshot, nothing_cached, candidates, decode_candidates)
    if decides_late(policy):
        choice = policy.decide_decode(problem, prefill_row)
    else:
        stays = Decision(prefill_row, np.zeros(len(snapshot)))
        choice = phases.choose_decode(problem, stays) or DecodeChoice(prefill_row, phases.STAYS)
    if choice.row != prefill_row:
        decode_id = snapshot.instances[choice.row].instance_id
        table.placed_decode(request.request_id, decode_id, request.prompt_tokens, request.now_s, is_prefilled=True)
    return snapshot.instances, choice


def _with_pull(problem: PlacementProblem, decision: Decision) -> Decision:
    source = kv_options.choose_pull(problem, decision.row)
    if source is None:
        return decision
    return msgspec.structs.replace(
        decision,
        pull_row=source.row,
        pull_tokens=source.tokens,
        pull_comes_ms=source.comes_ms,
        pull_loads_tokens=source.loads_tokens,
    )


def _pull(problem: PlacementProblem, decision: Decision) -> PrefixPull | None:
    if decision.pull_row is None or decision.pull_row < 0:
        return None
    source = kv_options.PrefixSource(decision.pull_row, decision.pull_tokens)
    return PrefixPull(
        problem.snapshot.instances[source.row],
        source.tokens,
        kv_options.pull_ms(problem, source, decision.row),
        kv_options.compute_ms(problem, source.tokens, decision.row),
        decision.pull_comes_ms,
        decision.pull_loads_tokens,
    )


def _had_tokens(problem: PlacementProblem, decision: Decision) -> int:
    """Leading prompt tokens that the chosen instance need not compute: cached, pulled or loaded from its host."""
    row = decision.row
    loaded = 0 if problem.host_tokens is None else int(problem.host_tokens[row])
    return max(int(problem.cached_tokens[row]), decision.pull_tokens, loaded)


def _movable(table: ClusterTable, snapshot: Snapshot, candidates: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of the candidates those that a request can be moved to."""
    rows = [row for each in table.immovable if (row := snapshot.row(each)) is not None]
    if not rows:
        return candidates
    movable = candidates.copy()
    movable[rows] = False
    return movable


def _narrow(
    table: ClusterTable, snapshot: Snapshot, request: PlacementRequest
) -> tuple[NDArray[np.bool_], dict[str, str]]:
    """Where the request may go, and why each other instance may not take it."""
    candidates = snapshot.placeable.copy()
    reasons = {
        snapshot.instances[row].instance_id: snapshot.refusal(row) for row in np.flatnonzero(~candidates).tolist()
    }
    for instance_ids, reason in (
        (request.excluded_instance_ids, FAILED_BEFORE),
        (request.unreachable_instance_ids, UNREACHABLE),
    ):
        for instance_id in sorted(instance_ids):  # a set: its order is another one in every process
            row = snapshot.row(instance_id)
            if row is not None and candidates[row]:
                candidates[row] = False
                reasons[instance_id] = reason
    if request.adapter_digest:
        for row in np.flatnonzero(candidates).tolist():
            if reason := adapters.refusal(table, snapshot.instances[row], request.adapter_digest):
                candidates[row] = False
                reasons[snapshot.instances[row].instance_id] = reason
    return candidates, reasons


def _unknown_model(table: ClusterTable, model: str) -> str:
    served = ", ".join(sorted(table.models())) or "none yet"
    return f"no instance serves the model {model!r}; models served: {served}"


def _no_instance(model: str, excluded: dict[str, str]) -> str:
    if not excluded:
        return f"every instance of {model!r} has gone; start one, or retry once it is back"
    reasons = "; ".join(f"{instance_id} {why}" for instance_id, why in list(excluded.items())[:MAX_REASONS])
    more = f"; and {len(excluded) - MAX_REASONS} more" if len(excluded) > MAX_REASONS else ""
    return f"no instance of {model!r} can take the request now ({reasons}{more}); retry shortly"
