"""A frontend with which nothing could be served does not start."""

from typing import Any

import pytest

from mesh.errors import ConfigurationError
from services.frontend.settings import FrontendSettings


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_running_requests", 0), ("max_choices", -1), ("request_deadline_s", 0.0), ("stall_s", float("nan"))],
)
def test_settings_that_serve_nobody_are_refused_by_their_option(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"--{name.replace('_', '-')} must be"):
        FrontendSettings(**{name: value})


def test_no_queue_and_no_recovery_are_choices() -> None:
    assert FrontendSettings(max_queued_requests=0, max_recoveries=0, instance_wait_s=0.0).max_queued_requests == 0
