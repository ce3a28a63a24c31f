"""A planner that is restarted goes on from what was kept: the same replicas, no step down, no to and fro."""

import random
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from math import pi, sin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.planning.autoscale.events import (
    Adopted,
    Keep,
    Leave,
    Led,
    Observed,
    PolicySet,
    Recalled,
    Scale,
    Seen,
    Tick,
)
from controlplane.planning.autoscale.forecast import KEPT_BUCKETS, RateForecaster
from controlplane.planning.autoscale.history import (
    HISTORIES_BYTES,
    AutoscaleHistory,
    decode_history,
    encode_history,
    packed_rates,
)
from controlplane.planning.autoscale.manager import AutoscaleManager
from mesh.errors import ConfigurationError
from mesh.store.limits import MAX_VALUE_BYTES
from tests.examples import examples

INTERVAL_S = 512.0
"""A power of two: rates of up to 2,048 whole requests are exact in half precision."""
POLICY = AutoscalePolicy(
    "m", ttft_ms=1000, maximum=64, cold_start_s=960, capacity_per_s=0.25, interval_s=INTERVAL_S, settle_s=5120
)
DAY = round(86_400 / INTERVAL_S)


@dataclass
class Planner:
    """A manager whose scales are carried out at once and whose history is kept, both as the state store would."""

    policy: AutoscalePolicy = POLICY
    now_s: float = 1e6
    serving: int = 1
    counts: list[int] = field(default_factory=list)
    kept: bytes = b""
    kept_at_s: float = 0.0

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.manager = AutoscaleManager()
        self.manager.handle(PolicySet("m", self.policy), self.now_s)
        self.manager.handle(Led(True), self.now_s)

    def handle(self, event: Observed | Seen | Tick | Leave) -> None:
        for each in self.manager.handle(event, self.now_s):
            if isinstance(each, Scale):
                self.serving = each.replicas
            elif isinstance(each, Keep):
                self.kept, self.kept_at_s = encode_history(each.history), self.now_s
        self.manager.validate()

    def interval(self, arrivals: int) -> None:
        self.now_s += self.policy.interval_s
        self.handle(Seen("m", {f"m-{number}": 1 for number in range(self.serving)}))
        self.handle(Observed("m", arrivals, arrivals, arrivals))
        self.handle(Tick())
        self.counts.append(self.serving)

    def restart(self, *, away: int = 0, recalls: bool = True, says_goodbye: bool = True) -> None:
        """`away`: intervals without a planner."""
        if says_goodbye:
            self.handle(Leave())
        self.now_s += away * self.policy.interval_s
        self.counts += [self.serving] * away
        self._start()
        self.manager.handle(Adopted("m", self.serving), self.now_s)
        if recalls and self.kept:
            self.manager.handle(Recalled(decode_history(self.kept), self.now_s - self.kept_at_s), self.now_s)
        self.manager.validate()


def _load(days: float, seed: int) -> list[int]:
    """Requests of each interval of days that repeat, with noise. Few enough for `INTERVAL_S`."""
    rng = random.Random(seed)
    load = [
        max(0, round(INTERVAL_S * (2 + 1.5 * sin(2 * pi * place / DAY)) + rng.gauss(0, 20)))
        for place in range(round(days * DAY))
    ]
    assert max(load) <= 2048
    return load


def _changes(counts: list[int]) -> int:
    return sum(before != after for before, after in pairwise(counts))


@given(st.integers(0, 10**6), st.integers(DAY, 2 * DAY - 60))
@settings(max_examples=examples(8), deadline=None)
def test_a_planner_that_leaves_in_order_is_not_missed(seed: int, at: int) -> None:
    load = _load(2.0, seed)[: at + 60]
    restarted, other = Planner(), Planner()
    for place, arrivals in enumerate(load):
        if place == at:
            restarted.restart()
        restarted.interval(arrivals)
        other.interval(arrivals)
    assert restarted.counts == other.counts


@given(st.integers(0, 10**6), st.integers(DAY, 2 * DAY - 60), st.integers(0, 20))
@settings(max_examples=examples(8), deadline=None)
def test_a_planner_that_is_killed_neither_drops_replicas_nor_goes_to_and_fro(seed: int, at: int, away: int) -> None:
    """Whatever it lost, up to three hours away and at any time of the day: within two replicas of one that stayed."""
    load = _load(2.0, seed)[: at + 60]
    restarted, other = Planner(), Planner()
    for place, arrivals in enumerate(load):
        if place == at:
            restarted.restart(away=away, says_goodbye=False)
        if not at <= place < at + away:
            restarted.interval(arrivals)
        other.interval(arrivals)
    back = at + away
    short = [mine - theirs for mine, theirs in zip(restarted.counts[back:], other.counts[back:], strict=True)]
    assert min(short) >= -2
    assert max(short[round(POLICY.settle_s / INTERVAL_S) + 1 :], default=0) <= 2
    assert _changes(restarted.counts[back:]) <= _changes(other.counts[back:]) + 3


def test_without_its_history_a_planner_would_flap() -> None:
    """What the history is for: the same restart without it needs a third more, and takes it back."""
    load = _load(2.0, 1)
    remembers, forgets = Planner(), Planner()
    for place, arrivals in enumerate(load[: DAY + 100]):
        if place == DAY + 60:
            remembers.restart()
            forgets.restart(recalls=False)
        remembers.interval(arrivals)
        forgets.interval(arrivals)
    after = slice(DAY + 60, None)
    assert max(forgets.counts[after]) >= max(remembers.counts[after]) + 3


def test_a_scale_that_stands_is_kept_for_the_settling_time_even_without_a_history() -> None:
    here = Planner()
    here.serving = 20
    here.restart(says_goodbye=False)
    settles = round(POLICY.settle_s / INTERVAL_S)
    for _ in range(settles):
        here.interval(512)
    assert here.counts == [20] * settles
    here.interval(512)
    assert here.serving < 20


def test_a_time_that_nobody_observed_does_not_hide_what_comes_now() -> None:
    forecaster = RateForecaster(60, 3)
    for _ in range(200):
        forecaster.add(2.0)
    forecaster.skip(30)
    forecaster.validate()
    forecaster.add(8.0)
    assert forecaster.forecast(0.9).expected_per_s == pytest.approx(8.0)
    assert forecaster.buckets == 231


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=1200), st.integers(1, 6))
@settings(max_examples=examples(30), deadline=None)
def test_what_is_recalled_foresees_what_was_added(rates: list[float], ahead: int) -> None:
    added, recalled = RateForecaster(60, ahead), RateForecaster(60, ahead)
    for rate in rates:
        added.add(rate)
    recalled.recall(rates)
    for rate in rates[:20]:
        assert recalled.forecast(0.9) == added.forecast(0.9)
        added.add(rate)
        recalled.add(rate)


def test_one_that_has_observed_itself_knows_better() -> None:
    here = Planner()
    for _ in range(10):
        here.interval(2048)
    here.handle(Leave())
    before = here.manager.status("m")
    here.manager.handle(Recalled(decode_history(here.kept), 0.0), here.now_s)
    here.interval(2048)
    after = here.manager.status("m")
    assert before is not None
    assert after is not None
    assert after.history_s == before.history_s + INTERVAL_S


HISTORIES = st.builds(
    AutoscaleHistory,
    st.text(min_size=1, max_size=20),
    st.floats(0.1, 1e4),
    st.lists(st.floats(0, 6e4), max_size=300).map(packed_rates),
    st.floats(0.6, 1.5),
    st.floats(0, 10),
    st.sampled_from([11.0, float("inf")]),
    st.floats(0, 1e6),
    st.sampled_from([(), ((300.0, 7), (60.0, 3))]),
    st.none() | st.floats(0.1, 1e3),
    st.floats(0, 2e9),
    st.integers(0, 2**53),
)


@given(HISTORIES)
def test_what_is_written_is_read(history: AutoscaleHistory) -> None:
    assert decode_history(encode_history(history)) == history


@given(HISTORIES, st.data())
def test_a_damaged_history_is_refused(history: AutoscaleHistory, data: st.DataObject) -> None:
    whole = encode_history(history)
    place = data.draw(st.integers(0, len(whole) - 1))
    flipped = whole[:place] + bytes([whole[place] ^ (1 << data.draw(st.integers(0, 7)))]) + whole[place + 1 :]
    for damaged in (flipped, whole[:place], b""):
        with pytest.raises(ConfigurationError):
            decode_history(damaged)


@pytest.mark.parametrize(
    "wrong",
    [
        {"margin": float("nan")},
        {"interval_s": 0.0},
        {"kept_per_s": 2.0, "broken_per_s": 1.0},
        {"rates": b"\x00"},
        {"rates": packed_rates([1.0]) * (KEPT_BUCKETS + 1)},
        {"rates": b"\x00\x7c"},
        {"needs": ((60.0, 3), (300.0, 2))},
        {"needs": ((300.0, 3), (60.0, 4))},
    ],
)
def test_what_no_autoscaler_writes_is_refused(wrong: dict[str, object]) -> None:
    sound = AutoscaleHistory("m", 60.0, packed_rates([1.0, 2.0]), 1.0, 0.0, float("inf"), 0.0)
    assert sound.checked() is sound
    with pytest.raises(ConfigurationError):
        decode_history(encode_history(msgspec.structs.replace(sound, **wrong)))


def test_another_version_and_a_bomb_are_refused() -> None:
    sound = encode_history(AutoscaleHistory("m", 60.0, b"", 1.0, 0.0, 1.0, 0.0))
    with pytest.raises(ConfigurationError, match="version 9"):
        decode_history(sound.replace(b" 1 ", b" 9 ", 1))
    body = zlib.compress(bytes(64 << 20))
    with pytest.raises(ConfigurationError, match="cut off, or has more"):
        decode_history(b"penstock autoscale history 1 %08x\n" % zlib.crc32(body) + body)


def test_what_is_kept_is_bounded_for_one_model_and_for_all() -> None:
    rng = random.Random(3)
    for models in (1, 200):
        manager = AutoscaleManager()
        manager.handle(Led(True), 0.0)
        names = [f"m{number}" for number in range(models)]
        for name in names:
            manager.handle(PolicySet(name, msgspec.structs.replace(POLICY, model=name, interval_s=10)), 0.0)
        rates = packed_rates([rng.uniform(0, 100) for _ in range(KEPT_BUCKETS)])
        manager.handle(Recalled(AutoscaleHistory(names[0], 10, rates, 1.0, 0.0, 1.0, 0.0), 0.0), 0.0)
        (kept,) = (each for each in manager.handle(Leave(), 1.0) if isinstance(each, Keep))
        size = len(encode_history(kept.history))
        assert size < MAX_VALUE_BYTES
        assert size * models < 1.1 * HISTORIES_BYTES
        assert len(kept.history.rates) > 0.9 * min(len(rates), HISTORIES_BYTES / models)
