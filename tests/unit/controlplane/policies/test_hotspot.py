"""The two-phase hotspot detector: equation 2 by hand, the second phase, and a hotspot that LMetric alone feeds."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.instance import LoadReport
from controlplane.policies.hotspot_detector import SLICES, ClassSighting, HotspotDetector, SlidingCount
from controlplane.policies.interface import Policy
from controlplane.policies.place import place
from controlplane.policies.registry import create_policy
from tests.unit.controlplane.builders import cache, cluster, report, request

ON_ONE_OF_FOUR = ClassSighting(class_hash=1, holders=1, others=3, lower_on_holders=True)


@given(st.lists(st.floats(0, 500), min_size=1), st.floats(0, 700))
def test_a_sliding_count_knows_the_last_window_to_a_slice(times: list[float], later_s: float) -> None:
    count, now_s = SlidingCount(60.0), max(times) + later_s
    for time_s in sorted(times):
        count.add(time_s)
        count.validate()
    oldest = now_s // 5 - SLICES
    assert count.total(now_s) == sum(time_s // 5 > oldest for time_s in times)


def test_the_first_phase_alarms_beyond_equation_2() -> None:
    # |M| / |M-bar| = 1/3: a quarter of the requests is benign, so nothing is counted in a row.
    detector = HotspotDetector(60.0, 8, 60.0)
    for _ in range(30):
        for _ in range(3):
            detector.missed(0.0)
        seen, alarm = detector.seen(0.0, ON_ONE_OF_FOUR)
        assert not alarm
        assert seen.lower_in_a_row == 0
    assert detector.seen(0.0, ON_ONE_OF_FOUR)[0].lower_in_a_row == 1, "31 of 121 are more than a quarter"


def test_the_more_hold_a_prefix_the_more_requests_are_benign() -> None:
    """|M| / |M-bar| = 1: half of the requests."""
    detector = HotspotDetector(60.0, 8, 60.0)
    on_two = ClassSighting(class_hash=1, holders=2, others=2, lower_on_holders=True)
    for _ in range(3):
        detector.missed(0.0)
    assert [detector.seen(0.0, on_two)[0].lower_in_a_row for _ in range(4)] == [0, 0, 0, 1]


def test_the_second_phase_waits_for_more_than_twice_m_in_a_row() -> None:
    detector = HotspotDetector(60.0, 8, 60.0)
    on_two = ClassSighting(class_hash=1, holders=2, others=2, lower_on_holders=True)
    elsewhere = ClassSighting(class_hash=1, holders=2, others=2, lower_on_holders=False)
    alarms = [detector.seen(0.0, sighting)[1] for sighting in (*[on_two] * 4, elsewhere, *[on_two] * 5)]
    assert alarms == [False] * 9 + [True]


def test_the_filter_ends_when_equation_2_has_held_for_long_enough() -> None:
    detector = HotspotDetector(60.0, 8, 60.0)
    hot, _ = detector.seen(0.0, ON_ONE_OF_FOUR)
    detector.filter_out(hot, frozenset({"a"}))

    def seen_among(others: int, now_s: float) -> frozenset[str]:
        for _ in range(others):
            detector.missed(now_s)
        return detector.seen(now_s, ON_ONE_OF_FOUR)[0].filtered_ids

    assert seen_among(9, 10.0) == {"a"}, "benign from here"
    assert seen_among(9, 69.9) == {"a"}
    assert seen_among(9, 70.0) == frozenset()
    detector.validate()


def test_a_relapse_starts_the_wait_again() -> None:
    detector = HotspotDetector(60.0, 8, 60.0)
    hot, _ = detector.seen(0.0, ON_ONE_OF_FOUR)
    detector.filter_out(hot, frozenset({"a"}))
    for now_s, others in ((10.0, 9), (100.0, 0), (110.0, 9), (165.0, 9)):
        for _ in range(others):
            detector.missed(now_s)
        detector.validate()
        assert detector.seen(now_s, ON_ONE_OF_FOUR)[0].filtered_ids == {"a"}


def test_memory_is_bounded_and_the_frequent_class_stays() -> None:
    detector = HotspotDetector(60.0, 4, 60.0)
    for number in range(1000):
        detector.seen(number / 100, ClassSighting(class_hash=number + 10, holders=1, others=3, lower_on_holders=True))
        frequent, _ = detector.seen(number / 100, ON_ONE_OF_FOUR)
        assert len(detector) <= 8
        detector.validate()
    assert frequent.requests.total(10.0) == 1000


def test_the_classes_that_are_tracked_are_those_with_the_most_cached_tokens() -> None:
    """A long document that one request in ten asks about, beside short system prompts that many share."""
    detector = HotspotDetector(60.0, 4, 60.0)
    document = ClassSighting(class_hash=1, holders=1, others=3, lower_on_holders=True, hit_tokens=12_000)
    for number in range(1000):
        short = ClassSighting(class_hash=10 + number % 100, holders=1, others=3, lower_on_holders=True, hit_tokens=64)
        detector.seen(number / 100, short)
        if number % 100 == 0:
            tracked, _ = detector.seen(number / 100, document)
    assert tracked.requests.total(10.0) == 10
    detector.validate()


HOT_PREFIX = tuple(range(1, 51))


def served(policy: Policy, hot_of_ten: int, requests: int = 200) -> Counter[str]:
    """Requests per instance; those of a prefix of 800 tokens, cached on a alone at first, run on for good.

    Others' batches stay at 5, as if their requests ended; prefill is done at once.
    """
    table = cluster("a", "b", "c", "d")
    cache(table, "a", *HOT_PREFIX)
    running = dict.fromkeys("abcd", 5)
    hot_on: Counter[str] = Counter()
    for number in range(requests):
        hot = number % 10 >= 10 - hot_of_ten
        wanted = request(
            f"r{number}", prompt_tokens=816, blocks=HOT_PREFIX if hot else (10_000 + number,), now_s=number / 10
        )
        chosen = place(table, policy, wanted).instance.instance_id
        table.ended(f"r{number}")
        if hot:
            hot_on[chosen] += 1
            running[chosen] += 1
            cache(table, chosen, *HOT_PREFIX)
        for instance_id in "abcd":
            report(table, instance_id, LoadReport(running_requests=running[instance_id]))
    return hot_on


@pytest.mark.slow
@pytest.mark.parametrize(("hot_of_ten", "instances"), [(4, 2), (6, 3), (8, 4), (10, 4)])
def test_the_detector_spreads_a_hotspot_over_as_many_as_equation_2_asks_for(hot_of_ten: int, instances: int) -> None:
    # 16 x BS on a is less than 816 x 5 elsewhere up to a batch of 255.
    requests = 20 * hot_of_ten
    assert served(create_policy("lmetric"), hot_of_ten) == {"a": requests}
    spread = served(create_policy("lmetric_hotspot"), hot_of_ten)
    assert len(spread) == instances
    assert max(spread.values()) - min(spread.values()) <= 1, spread


def test_a_benign_class_is_left_to_lmetric() -> None:
    alone = served(create_policy("lmetric"), hot_of_ten=2)
    assert served(create_policy("lmetric_hotspot"), hot_of_ten=2) == alone


def test_a_class_goes_on_to_holders_that_are_not_busier_than_the_others() -> None:
    table, policy = cluster("a", "b"), create_policy("lmetric_hotspot")
    cache(table, "a", *HOT_PREFIX)
    report(table, "b", LoadReport(running_requests=5))
    for number in range(20):
        assert place(table, policy, request(f"r{number}", 816, HOT_PREFIX)).instance.instance_id == "a"
        report(table, "a", LoadReport(running_requests=4), admitted=(f"r{number}",))


def test_a_single_instance_keeps_its_hotspot() -> None:
    table, policy = cluster("a"), create_policy("lmetric_hotspot")
    cache(table, "a", *HOT_PREFIX)
    for number in range(20):
        assert place(table, policy, request(f"r{number}", blocks=HOT_PREFIX)).instance.instance_id == "a"


def test_where_only_filtered_instances_are_left_they_serve() -> None:
    table, policy = cluster("a", "b"), create_policy("lmetric_hotspot")
    cache(table, "a", *HOT_PREFIX)
    report(table, "b", LoadReport(running_requests=1))
    chosen = [place(table, policy, request(f"r{n}", 816, HOT_PREFIX)).instance.instance_id for n in range(5)]
    assert chosen == ["a", "a", "a", "a", "b"], "three in a row once it is busier than the other"
    last = place(table, policy, request("r", 816, HOT_PREFIX, excluded=frozenset({"b"})))
    assert last.instance.instance_id == "a"


def test_as_many_classes_are_kept_as_may_be_and_the_next_new_one_leaves_the_most_frequent() -> None:
    detector = HotspotDetector(60.0, 4, 60.0)

    def see(class_hash: int) -> None:
        detector.seen(0.0, ClassSighting(class_hash=class_hash, holders=1, others=3, lower_on_holders=False))

    for class_hash in range(8):
        see(class_hash)
    see(7)
    see(7)
    assert len(detector) == 8, "a known one makes no room"
    see(8)
    assert len(detector) == 5
    assert detector.seen(0.0, ON_SEVEN)[0].requests.total(0.0) == 4, "its count goes on"


ON_SEVEN = ClassSighting(class_hash=7, holders=1, others=3, lower_on_holders=False)


def test_an_alarm_that_was_acted_on_is_counted_anew() -> None:
    detector = HotspotDetector(60.0, 8, 60.0)
    alarms = []
    for _ in range(6):
        hot, alarm = detector.seen(0.0, ON_ONE_OF_FOUR)
        alarms.append(alarm)
        if alarm:
            detector.filter_out(hot, frozenset({"a"}))
    assert alarms == [False, False, True, False, False, True]
