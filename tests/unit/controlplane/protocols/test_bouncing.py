"""When a worker gives a request back, and how often one can be."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.queue_belief import PresentLoad, QueueBelief
from controlplane.protocols.bouncing import MAX_BOUNCES, SLACK_TOKENS, QueuedPrefills, is_bounced
from controlplane.protocols.recovery import (
    Begin,
    Bounced,
    Choose,
    Chosen,
    Pause,
    RecoveryLimits,
    RecoveryManager,
    Run,
    Submit,
    Submitted,
)


def test_a_request_is_given_back_only_where_more_than_the_slack_was_not_known() -> None:
    believed = QueueBelief(500, 200)
    assert not is_bounced(believed, PresentLoad(500 + SLACK_TOKENS, 3), SLACK_TOKENS)
    assert is_bounced(believed, PresentLoad(501 + SLACK_TOKENS, 3), SLACK_TOKENS)


def test_it_stays_where_nobody_believed_anything_where_it_was_given_back_before_and_where_that_is_off() -> None:
    full = PresentLoad(1_000_000, 900)
    assert not is_bounced(None, full, SLACK_TOKENS)
    assert not is_bounced(QueueBelief(0, 10, may_bounce=False), full, SLACK_TOKENS)
    assert not is_bounced(QueueBelief(0, 10), full, 0)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 5000), st.booleans())), st.integers(0, 20_000))
def test_the_queue_is_the_smaller_of_what_the_engine_and_the_placements_count(
    course: list[tuple[str, int, bool]], engine_tokens: int
) -> None:
    queued, model = QueuedPrefills(), dict[str, int]()
    for request_id, tokens, comes in course:
        if comes:
            queued.add(request_id, tokens)
            model[request_id] = tokens
        else:
            queued.done(request_id)
            model.pop(request_id, None)
        queued.validate()
        assert len(queued) == len(model)
        assert queued.queued_tokens(engine_tokens) == min(engine_tokens, sum(model.values()))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 100_000)), min_size=6, max_size=30))
def test_however_wrong_the_beliefs_are_a_request_is_given_back_three_times_at_most_and_then_runs(
    instances: list[tuple[str, int]],
) -> None:
    """Manager and worker together: nothing is excluded, no pause is made, no loss counts."""
    manager = RecoveryManager("r", RecoveryLimits())
    instruction, bounces = manager.handle(Begin(30.0), 0.0), 0
    for instance_id, queued_tokens in instances:
        assert instruction == Choose(), "it may go anywhere, at once"
        submit = manager.handle(Chosen(instance_id), 0.0)
        assert isinstance(submit, Submit)
        assert manager.handle(Submitted(instance_id), 0.0) == Run(instance_id, is_recovered=False)
        manager.validate()
        belief = QueueBelief(0, 100, submit.may_bounce)
        if not is_bounced(belief, PresentLoad(queued_tokens, 1), SLACK_TOKENS):
            break
        bounces += 1
        instruction = manager.handle(Bounced(instance_id, 0), 0.0)
        manager.validate()
    else:
        raise AssertionError("it goes round for ever")
    assert bounces <= MAX_BOUNCES
    assert manager.budget.losses == 0


def test_a_worker_that_gives_back_what_it_may_not_has_lost_it() -> None:
    manager = RecoveryManager("r", RecoveryLimits())
    manager.handle(Begin(30.0), 0.0)
    for _ in range(MAX_BOUNCES):
        assert manager.handle(Chosen("a"), 0.0) == Submit("a")
        manager.handle(Submitted("a"), 0.0)
        assert manager.handle(Bounced("a", 0), 0.0) == Choose()
    assert manager.handle(Chosen("a"), 0.0) == Submit("a", may_bounce=False)
    manager.handle(Submitted("a"), 0.0)
    assert manager.handle(Bounced("a", 0), 0.0) == Pause(0.0)
    assert manager.budget.losses == 1
