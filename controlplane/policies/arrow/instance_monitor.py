"""Moves of instances that no request asks for (Arrow, section 5.5: prefill to decode, cases 2 and 3)."""

from controlplane.policies.arrow.instances import ElasticInstances
from controlplane.policies.arrow.parameters import ArrowParameters


class InstanceMonitor:
    """Watches one model's instances in time."""

    def __init__(self, parameters: ArrowParameters) -> None:
        self._parameters = parameters
        self._above_since_s: float | None = None
        """From when on the token interval has been above the TPOT threshold."""

    def watch(self, instances: ElasticInstances, now_s: float) -> int | None:
        """Move at most one instance to decoding; its row. `instances` have just been looked at."""
        moved = self._follow_token_interval(instances, now_s)
        if moved is None and not instances.decode_load_is_low():
            # Idle for prefill while decoding is busy.
            moved = instances.try_move_prefill_to_decode(idle_only=True)
        return moved

    def _follow_token_interval(self, instances: ElasticInstances, now_s: float) -> int | None:
        if mean_token_interval_ms(instances) <= self._parameters.tpot_ms:
            self._above_since_s = None
            return None
        if self._above_since_s is None:
            self._above_since_s = now_s
        if now_s - self._above_since_s < self._parameters.trigger_s:
            return None
        self._above_since_s = now_s
        return instances.try_move_prefill_to_decode()


def mean_token_interval_ms(instances: ElasticInstances) -> float:
    """Over the instances that are for decoding, do decode and still tell of it; 0 if none does."""
    rows = instances.decoding_rows() & instances.loads.is_decoding & (instances.snapshot.stale == 0)
    intervals = instances.loads.token_interval_ms[rows]
    known = intervals[intervals > 0]
    return float(known.mean()) if len(known) else 0.0
