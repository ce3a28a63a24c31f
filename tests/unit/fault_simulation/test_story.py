"""A simulation told."""

import pytest

from fault_simulation.story import tell
from tests.unit.fault_simulation.test_invariants import peaceful


@pytest.mark.slow
def test_a_story_has_faults_requests_and_messages() -> None:
    told = tell(peaceful(), every_message=True)
    assert "request 0 to frontend-0" in told
    assert "frontend-0 -> worker-0: Worker/Stream generate {" in told
    assert "nothing was violated" in told
