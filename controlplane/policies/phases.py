"""Which phase of a request goes where, in a fleet whose operator has set instances aside for one phase.

Every engine is able to do both phases (Arrow, section 5.2), so that a phase of an instance is a wish: where no
instance of the right phase is ready, one of the other does both, and says so. Policies choose among the rows that
are left; where a policy chooses the decode instance too, its choice stands.
"""

from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from controlplane.model.placement import Decision, DecodeChoice, PlacementProblem, PlacementRequest
from controlplane.model.snapshot import Snapshot
from controlplane.policies.indicators import total_tokens
from controlplane.policies.selection import among_candidates, lowest

RULE = (
    "score = (running + queued + expected tokens) / KV tokens of the instance, among those that decode; "
    "ties go to the instance of the prefill, then to the longest cached prefix"
)
BY_POLICY = "chosen by the policy"
ONE_TOKEN = "one token is asked for: nothing is decoded"
DECODES_ALREADY = "it decodes already: its tokens so far are computed again where it goes on"
STAYS = "every instance does both: it stays where it was prefilled"
NONE_TO_DECODE = "no instance that decodes is ready: the instance of the prefill does both"


def phase_rows(snapshot: Snapshot, request: PlacementRequest, ready: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of the `ready` rows those whose phase suits the request's next step; all of them where none does."""
    suits = snapshot.decode_rows if request.is_decoding else snapshot.prefill_rows
    rows: NDArray[np.bool_] = ready & suits
    return rows if rows.any() else ready


def moves(request: PlacementRequest) -> bool:
    """Whether the request can be decoded elsewhere than where its prompt is computed."""
    return not request.is_decoding and request.max_tokens != 1


def choose_decode(problem: PlacementProblem, decision: Decision) -> DecodeChoice | None:
    """Where the request is decoded, given where its prompt is computed; None where the fleet knows no phases and the
    policy has said nothing."""
    if decision.decode_row >= 0:
        return DecodeChoice(decision.decode_row, BY_POLICY, decision.decode_scores)
    if not problem.snapshot.is_restricted:
        return None
    if problem.request.is_decoding:
        return DecodeChoice(decision.row, DECODES_ALREADY)
    if problem.decode_candidates is None:
        return DecodeChoice(decision.row, ONE_TOKEN)
    if not problem.decode_candidates.any():
        return DecodeChoice(decision.row, NONE_TO_DECODE)
    scores = among_candidates(_fill(problem), problem.decode_candidates)
    if scores[decision.row] <= scores.min():
        return DecodeChoice(decision.row, RULE, scores)
    turn = crc32(problem.request.request_id.encode())
    return DecodeChoice(lowest(scores, turn, tie_break=-problem.cached_tokens), RULE, scores)


def _fill(problem: PlacementProblem) -> NDArray[np.float64]:
    """How full of tokens each instance's KV memory would be with the request."""
    snapshot = problem.snapshot
    tokens = total_tokens(problem) + snapshot.unreported_decode_tokens + problem.request.prompt_tokens
    fill: NDArray[np.float64] = tokens / np.maximum(snapshot.kv_blocks_total * snapshot.block_tokens, 1)
    return fill
