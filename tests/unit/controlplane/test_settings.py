"""Monitors, schedulers and predictors do not start with settings by which they could not work."""

from typing import Any

import pytest

from controlplane.monitor.settings import MonitorSettings
from controlplane.scheduler.settings import SchedulerSettings
from mesh.errors import ConfigurationError
from services.predictor.settings import PredictorSettings


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (MonitorSettings, "stale_s", 0.0),
        (MonitorSettings, "heartbeat_ms", 0.0),
        (MonitorSettings, "max_backlog", 0),
        (SchedulerSettings, "monitor_silence_s", float("nan")),
        (SchedulerSettings, "max_indexed_blocks", 0),
        (SchedulerSettings, "record_mib", -1),
        (SchedulerSettings, "migration_deadline_s", 0.0),
        (PredictorSettings, "artefact_poll_s", 0.0),
    ],
)
def test_settings_that_cannot_work_are_refused_by_their_option(kind: Any, name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"--{name.replace('_', '-')} must be above 0"):
        kind(**{name: value})


def test_no_gathering_no_explanations_and_no_migrations_are_choices() -> None:
    assert MonitorSettings(settle_s=0.0, flush_ms=0.0).flush_ms == 0
    assert SchedulerSettings(max_explanations=0, rescheduler_in_flight=0).max_explanations == 0
