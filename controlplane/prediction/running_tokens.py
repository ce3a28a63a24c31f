"""How many tokens an instance may have in its running batch within a TPOT (Arrow, section 5.3: Max Running Tokens)."""

from collections.abc import Sequence

import msgspec
import numpy as np

from mesh.errors import ConfigurationError


class DecodePoint(msgspec.Struct, frozen=True):
    """One measurement of a profile: a step that decodes a batch whose contexts have so many tokens in all."""

    running_tokens: int
    step_ms: float


def max_running_tokens(points: Sequence[DecodePoint], tpot_ms: float, kv_tokens: int) -> int:
    """Tokens that the KV cache holds, or fewer where a step with more would take longer than `tpot_ms`.

    Between the points of the profile the time is taken to be linear, and beyond the last one too. 0 where not even
    the smallest batch keeps to the TPOT. Raises `ConfigurationError` for fewer than two different batches.
    """
    if len({point.running_tokens for point in points}) < 2:
        raise ConfigurationError("a profile of decode steps needs at least two different numbers of running tokens")
    ordered = sorted(points, key=lambda point: point.running_tokens)
    tokens = np.array([point.running_tokens for point in ordered], np.float64)
    # Measured times waver; a batch is only as good as all smaller ones.
    times_ms = np.maximum.accumulate(np.array([point.step_ms for point in ordered], np.float64))
    if times_ms[0] > tpot_ms:
        return 0
    if times_ms[-1] <= tpot_ms:
        return min(kv_tokens, _beyond(tokens, times_ms, tpot_ms, kv_tokens))
    first_above = int(np.argmax(times_ms > tpot_ms))
    share = (tpot_ms - times_ms[first_above - 1]) / (times_ms[first_above] - times_ms[first_above - 1])
    return min(kv_tokens, int(tokens[first_above - 1] + share * (tokens[first_above] - tokens[first_above - 1])))


def _beyond(tokens: np.ndarray, times_ms: np.ndarray, tpot_ms: float, kv_tokens: int) -> int:
    rise_ms = (times_ms[-1] - times_ms[0]) / (tokens[-1] - tokens[0])
    return kv_tokens if rise_ms <= 0 else int(tokens[-1] + (tpot_ms - times_ms[-1]) / rise_ms)
