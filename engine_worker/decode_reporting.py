"""What a worker tells of its decoding requests, and how often: as the mesh's rescheduler is configured."""

from controlplane.model.running_request import RunningRequest
from controlplane.policies.rescheduling.decode_load import DecodeLoad, decode_load
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from controlplane.policies.rescheduling.record import ReschedulerRecord
from engine_worker.request_table import RequestTable


class DecodeReporting:
    """One for each worker, which tells nothing until the mesh has a mode that asks for it."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._mode = ReschedulerMode.OFF
        self._parameters = ReschedulerParameters()

    def configure(self, record: ReschedulerRecord, revision: int) -> None:
        """Take over the mesh's rescheduling settings. Raises `ConfigurationError`."""
        self._mode, self._parameters = record.read()

    @property
    def interval_s(self) -> float | None:
        """Between two reports; None while nobody wants any."""
        return None if self._mode is ReschedulerMode.OFF else self._parameters.interval_s

    def load(self) -> DecodeLoad:
        """The requests that decode now, with their load over the horizon."""
        return decode_load(running_requests(self._table), self._parameters.horizon)


def running_requests(table: RequestTable) -> list[RunningRequest]:
    """Requests that are past their first token, here or before they came here."""
    return [
        RunningRequest(
            tracked.request.request_id,
            len(tracked.request.prompt_token_ids) + len(tracked.emitted_token_ids),
            len(tracked.emitted_token_ids),
            tracked.remaining_tokens,
            tracked.frontend_id,
            tracked.band_tokens,
        )
        for tracked in table
        if tracked.state == "running" and tracked.emitted_token_ids
    ]
