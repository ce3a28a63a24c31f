"""How often a request that keeps losing its owner is placed again."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.protocols.recovery import LONGEST_PAUSE_S, RecoveryBudget

LOSSES = st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 20.0)), max_size=60)
"""Tokens gained since the loss before, and seconds."""


@given(LOSSES, st.integers(0, 5), st.floats(0.0, 60.0))
def test_a_request_is_given_up_only_after_both_bounds_without_a_token(
    losses: list[tuple[int, float]], max_losses: int, patience_s: float
) -> None:
    budget = RecoveryBudget(max_losses, patience_s)
    now_s, tokens, in_vain, since_s = 0.0, 0, 0, 0.0
    for gained, elapsed_s in losses:
        now_s, tokens = now_s + elapsed_s, tokens + gained
        if gained or not in_vain:
            in_vain, since_s = 0, now_s
        pause_s = budget.lost(tokens, now_s)
        if in_vain >= max_losses and now_s - since_s >= patience_s:
            assert pause_s is None
            return
        assert pause_s is not None
        assert 0.0 <= pause_s <= LONGEST_PAUSE_S
        assert (pause_s == 0.0) == (in_vain == 0), "the first loss costs no pause"
        in_vain += 1


@given(st.integers(0, 5), st.floats(0.0, 60.0))
def test_a_request_that_kills_whatever_has_it_is_given_up(max_losses: int, patience_s: float) -> None:
    """Its worker dies at once each time."""
    budget, now_s, placements = RecoveryBudget(max_losses, patience_s), 0.0, 1
    while (pause_s := budget.lost(0, now_s)) is not None:
        now_s += pause_s
        placements += 1
        assert placements < 30
    assert now_s >= patience_s or placements > max_losses


@given(st.lists(st.floats(0.0, 1000.0), min_size=50, max_size=50))
def test_a_request_that_gains_tokens_between_its_losses_is_never_given_up(elapsed_s: list[float]) -> None:
    budget, now_s = RecoveryBudget(3, 30.0), 0.0
    for tokens, elapsed in enumerate(elapsed_s):
        now_s += elapsed
        assert budget.lost(tokens, now_s) == 0.0
