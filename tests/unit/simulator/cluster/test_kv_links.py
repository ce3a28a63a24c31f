import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cluster.config import KvLinkConfig
from simulator.cluster.events import EventQueue, Rank
from simulator.cluster.kv_links import KvLinks, Transfer

GIB = 1 << 30
ONE_GIB_PER_S = KvLinkConfig(latency_ms=5.0, bandwidth_gib_per_s=1.0, max_parallel=2)


class Wire:
    """Links between instances, and what came of their transfers."""

    def __init__(self, *links: KvLinkConfig) -> None:
        self.events = EventQueue()
        self.links = KvLinks(self.events)
        self.arrived: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        for number, link in enumerate(links):
            self.links.join(f"i{number}", link)

    def send(self, name: str, source: int, target: int, size_bytes: int = GIB) -> Transfer:
        def failed(_: float, reason: str) -> None:
            assert name not in self.failed
            self.failed[name] = reason

        def arrived(now_ms: float) -> None:
            assert name not in self.arrived
            self.arrived[name] = now_ms

        return self.links.transfer(f"i{source}", f"i{target}", size_bytes, arrived, failed)

    def run(self) -> None:
        while not self.events.is_over:
            self.events.run_next()


def test_one_transfer_takes_its_latency_and_its_bytes() -> None:
    wire = Wire(ONE_GIB_PER_S, ONE_GIB_PER_S)
    wire.send("a", 0, 1)
    wire.run()
    assert wire.arrived == {"a": pytest.approx(1005.0)}


def test_the_slower_end_decides() -> None:
    wire = Wire(ONE_GIB_PER_S, KvLinkConfig(1.0, 0.25))
    wire.send("a", 0, 1)
    wire.run()
    assert wire.arrived == {"a": pytest.approx(4005.0)}


def test_sending_and_receiving_share_a_link() -> None:
    wire = Wire(*[ONE_GIB_PER_S] * 3)
    wire.send("out", 0, 1)
    wire.send("in", 2, 0, GIB // 2)
    wire.run()
    # Half the bandwidth each until the smaller one is through, then all of it.
    assert wire.arrived == {"in": pytest.approx(1005.0), "out": pytest.approx(1505.0)}


def test_beyond_the_cap_transfers_wait_in_order() -> None:
    wire = Wire(*[ONE_GIB_PER_S] * 6)
    for target in (1, 2, 3, 4):
        wire.send(f"to {target}", 0, target)
    wire.send("elsewhere", 4, 5)
    assert wire.links.waiting_transfers() == 2
    wire.run()
    assert wire.arrived["elsewhere"] == pytest.approx(1005.0)
    assert wire.arrived["to 1"] == wire.arrived["to 2"] == pytest.approx(2005.0)
    assert wire.arrived["to 3"] == wire.arrived["to 4"] == pytest.approx(4010.0)


def test_a_death_fails_what_it_sent_received_and_waited_for() -> None:
    wire = Wire(*[ONE_GIB_PER_S] * 4)
    for name, source, target in (("a", 0, 1), ("b", 2, 0), ("waits", 0, 3), ("other", 2, 3)):
        wire.send(name, source, target)
    wire.events.at(500.0, Rank.FAILURE, lambda now_ms: wire.links.leave("i0", now_ms))
    wire.run()
    assert set(wire.failed) == {"a", "b", "waits"}
    assert set(wire.arrived) == {"other"}


def test_a_cancelled_transfer_leaves_its_share_to_others() -> None:
    wire = Wire(*[ONE_GIB_PER_S] * 3)
    first = wire.send("first", 0, 1)
    wire.send("second", 0, 2)
    wire.events.at(505.0, Rank.MESSAGE, lambda _: wire.links.cancel(first))
    wire.run()
    assert wire.arrived == {"second": pytest.approx(1255.0)}
    assert not wire.failed


@given(
    transfers=st.lists(
        st.tuples(st.floats(0, 50), st.integers(0, 3), st.integers(0, 3), st.integers(1, 1 << 26)), max_size=25
    ),
    death_ms=st.none() | st.floats(0, 100),
    cap=st.integers(1, 3),
)
def test_every_transfer_ends_once_and_none_beats_the_link(
    transfers: list[tuple[float, int, int, int]], death_ms: float | None, cap: int
) -> None:
    link = KvLinkConfig(0.5, 1.0, cap)
    wire = Wire(*[link] * 4)
    begun: dict[str, tuple[float, int]] = {}

    def begin(name: str, source: int, target: int, size_bytes: int, now_ms: float) -> None:
        alive = 4 if death_ms is None or now_ms < death_ms else 3
        if source < alive and target < alive and source != target:
            begun[name] = (now_ms, size_bytes)
            wire.send(name, source, target, size_bytes)

    for number, (at_ms, source, target, size_bytes) in enumerate(transfers):
        wire.events.at(
            at_ms,
            Rank.MESSAGE,
            lambda now_ms, args=(f"t{number}", source, target, size_bytes): begin(*args, now_ms),  # type: ignore[misc]
        )
    if death_ms is not None:
        wire.events.at(death_ms, Rank.FAILURE, lambda now_ms: wire.links.leave("i3", now_ms))
    wire.run()
    assert set(wire.arrived) | set(wire.failed) == set(begun)
    assert not set(wire.arrived) & set(wire.failed)
    assert wire.links.waiting_transfers() == 0
    for name, arrived_ms in wire.arrived.items():
        began_ms, size_bytes = begun[name]
        assert arrived_ms - began_ms >= 0.5 + size_bytes / link.bytes_per_ms - 1e-6
