"""Running requests and migration orders refuse to be nonsense."""

import pytest

from controlplane.model.migration_order import MigrationOrder
from controlplane.model.running_request import RunningRequest


@pytest.mark.parametrize(("context", "generated", "remaining"), [(10, 11, None), (10, -1, None), (10, 3, -1)])
def test_counts_that_cannot_be_are_refused(context: int, generated: int, remaining: int | None) -> None:
    with pytest.raises(ValueError, match="r1"):
        RunningRequest("r1", context, generated, remaining)


def test_an_order_names_two_instances() -> None:
    with pytest.raises(ValueError, match="already where it is"):
        MigrationOrder("r1", "a", "a", "because")
