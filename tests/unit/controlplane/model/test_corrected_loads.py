"""What an instance says when it gives a request back, applied to a table."""

import pytest

from controlplane.model.cluster import ClusterTable
from controlplane.model.queue_belief import PresentLoad
from tests.unit.controlplane.builders import cluster, report


def believed(table: ClusterTable) -> list[tuple[int, int]]:
    """Requests and prompt tokens to compute of each instance."""
    table.validate()
    snapshot = table.snapshot("m")
    assert snapshot is not None
    return list(zip(snapshot.batch_requests.tolist(), snapshot.pending_prefill_tokens.tolist(), strict=True))


def test_what_an_instance_says_to_have_counts_until_its_next_report() -> None:
    table = cluster("a", "b")
    table.placed("r", "a", 300, 0.0)
    table.corrected("a", PresentLoad(5000, 4), 0.0)
    assert believed(table) == [(4, 5000), (0, 0)]
    table.placed("s", "a", 200, 0.0)
    assert believed(table) == [(5, 5200), (0, 0)], "what is placed there afterwards comes on top"
    report(table, "a", admitted=("r",))
    assert believed(table) == [(1, 200), (0, 0)]


def test_an_instance_is_never_believed_to_have_less_than_was_placed_there() -> None:
    table = cluster("a")
    table.placed("r", "a", 3000, 0.0)
    table.corrected("a", PresentLoad(2000, 0), 0.0)
    assert believed(table) == [(1, 3000)]


def test_its_last_word_counts() -> None:
    table = cluster("a")
    table.corrected("a", PresentLoad(5000, 4), 0.0)
    table.corrected("a", PresentLoad(4000, 3), 0.1)
    assert believed(table) == [(3, 4000)]


@pytest.mark.parametrize("ends", ["age", "loss"])
def test_it_goes_with_its_age_and_with_its_instance(ends: str) -> None:
    table = cluster("a", "b")
    table.corrected("a", PresentLoad(5000, 4), 0.0)
    if ends == "age":
        table.forget_unreported(table.limits.unreported_s + 0.1)
        assert believed(table) == [(0, 0), (0, 0)]
    else:
        incarnation_id = table.incarnation_id("a")
        assert incarnation_id is not None
        table.lost("a", incarnation_id)
        assert believed(table) == [(0, 0)]


def test_an_instance_that_is_not_known_is_left_alone() -> None:
    table = cluster("a")
    table.corrected("b", PresentLoad(5000, 4), 0.0)
    assert believed(table) == [(0, 0)]
