"""Load and step times of every instance over simulated time, in bounded memory."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh.errors import ConfigurationError

_LOT = 256

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RecordingConfig:
    """How often is looked."""

    interval_ms: float = 1000.0
    max_samples: int = 1024
    """When there are so many, every second one is dropped and the interval doubled."""

    def __post_init__(self) -> None:
        if self.interval_ms <= 0 or self.max_samples < 2:
            raise ConfigurationError("a recording needs interval_ms > 0 and max_samples >= 2")


@dataclass(slots=True)
class StepTimes:
    """Of the steps of one instance that decode something."""

    steps: int = 0
    sum_ms: float = 0.0
    squares_ms2: float = 0.0
    longest_ms: float = 0.0

    def add(self, durations_ms: Floats) -> None:
        """Further steps."""
        self.steps += len(durations_ms)
        self.sum_ms += float(np.add.reduce(durations_ms))
        self.squares_ms2 += float(np.dot(durations_ms, durations_ms))
        self.longest_ms = max(self.longest_ms, float(durations_ms[durations_ms.argmax()]))

    @property
    def mean_ms(self) -> float:
        """0 without a step."""
        return self.sum_ms / self.steps if self.steps else 0.0

    @property
    def variance_ms2(self) -> float:
        """Of the durations, each step counted once."""
        return max(self.squares_ms2 / self.steps - self.mean_ms**2, 0.0) if self.steps else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class LoadSeries:
    """Arrays of shape (samples, instances); an instance that is down counts as empty."""

    times_s: Floats
    """Shape (samples,)."""
    instance_ids: tuple[str, ...]
    running_requests: Integers
    queued_requests: Integers
    running_tokens: Integers
    kv_fill: Floats
    """Share of the KV blocks that requests hold."""
    step_ms: Floats
    """Mean duration of the decoding steps since the sample before; 0 where there was none."""

    @property
    def imbalance(self) -> Floats:
        """Standard deviation over mean of the requests (running and queued) of the instances; 0 where all are idle.
        Shape (samples,)."""
        requests = (self.running_requests + self.queued_requests).astype(np.float64)
        mean = requests.mean(axis=1)
        deviation: Floats = np.divide(requests.std(axis=1), mean, out=np.zeros_like(mean), where=mean > 0)
        return deviation


class Recording:
    """What a simulation notes down while it runs."""

    def __init__(self, instance_ids: tuple[str, ...], config: RecordingConfig) -> None:
        self.interval_ms = config.interval_ms
        self.instance_ids = instance_ids
        self.preemptions = dict.fromkeys(instance_ids, 0)
        """Times that an instance ran out of KV memory and took a request's away."""
        self._step_times = {instance_id: StepTimes() for instance_id in instance_ids}
        self._uncounted: dict[str, list[Floats]] = {instance_id: [] for instance_id in instance_ids}
        """Durations that are not in the step times yet: counted in lots, because a lot costs as much as a step."""
        self._config = config
        self._rows = {instance_id: row for row, instance_id in enumerate(instance_ids)}
        self._times_s: list[float] = []
        self._loads: list[Integers] = []
        self._fills: list[Floats] = []
        self._step_ms: list[Floats] = []
        self._steps_before = np.zeros((2, len(instance_ids)))

    def stepped(self, instance_id: str, durations_ms: Floats, decode_requests: int) -> None:
        """Steps are over."""
        if decode_requests:
            uncounted = self._uncounted[instance_id]
            uncounted.append(durations_ms)
            if len(uncounted) >= _LOT:
                self._count(instance_id)

    @property
    def step_times(self) -> dict[str, StepTimes]:
        """By instance, over the whole run so far."""
        for instance_id in self.instance_ids:
            self._count(instance_id)
        return self._step_times

    def sampled(self, now_s: float, loads: Integers, kv_fill: Floats) -> None:
        """The load of all instances: rows running requests, queued requests, running tokens."""
        times = self.step_times.values()
        counted = np.array([[each.steps for each in times], [each.sum_ms for each in times]])
        steps, sum_ms = counted - self._steps_before
        self._steps_before = counted
        self._times_s.append(now_s)
        self._loads.append(loads)
        self._fills.append(kv_fill)
        self._step_ms.append(np.divide(sum_ms, steps, out=np.zeros_like(sum_ms), where=steps > 0))
        if len(self._times_s) >= self._config.max_samples:
            self.interval_ms *= 2
            for series in (self._times_s, self._loads, self._fills, self._step_ms):
                del series[1::2]

    def _count(self, instance_id: str) -> None:
        uncounted = self._uncounted[instance_id]
        if uncounted:
            self._step_times[instance_id].add(uncounted[0] if len(uncounted) == 1 else np.concatenate(uncounted))
            uncounted.clear()

    def series(self) -> LoadSeries:
        """All samples that were kept."""
        count = len(self.instance_ids)
        loads = np.array(self._loads, dtype=np.int64).reshape(-1, 3, count)
        return LoadSeries(
            times_s=np.array(self._times_s),
            instance_ids=self.instance_ids,
            running_requests=loads[:, 0],
            queued_requests=loads[:, 1],
            running_tokens=loads[:, 2],
            kv_fill=np.array(self._fills, dtype=np.float64).reshape(-1, count),
            step_ms=np.array(self._step_ms, dtype=np.float64).reshape(-1, count),
        )
