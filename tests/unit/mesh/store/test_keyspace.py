"""The key space against a model that remembers everything."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mesh.errors import LeaseLost, StoreCompacted, StoreError
from mesh.store.interface import KeyValue, WatchEvent
from mesh.store.keyspace import KeySpace
from tests.examples import examples

KEYS = st.sampled_from(["a", "a/1", "a/2", "ab", "b"])
PREFIXES = st.sampled_from(["", "a", "a/", "b", "c"])
TTL_S = 10.0


class KeySpaceAgainstModel(RuleBasedStateMachine):
    """The model keeps a copy of all keys for every revision, and every event."""

    def __init__(self) -> None:
        super().__init__()
        self.space = KeySpace(history_changes=20)
        self.now_s = 0.0
        self.past: list[dict[str, KeyValue]] = [{}, {}]
        self.events: list[WatchEvent] = []
        self.leases: dict[str, float] = {}
        self.granted = 0

    @property
    def present(self) -> dict[str, KeyValue]:
        return self.past[-1]

    def write(self, key: str, value: bytes, lease: str) -> None:
        revision = len(self.past)
        self.past.append(self.present | {key: KeyValue(key, value, revision, lease)})
        self.events.append(WatchEvent("put", key, value, revision, lease))

    def remove(self, keys: list[str]) -> None:
        if keys:
            revision = len(self.past)
            self.events += [WatchEvent("delete", key, b"", revision) for key in sorted(keys)]
            self.past.append({key: entry for key, entry in self.present.items() if key not in keys})

    def hanging_on(self, lease: str) -> list[str]:
        return [key for key, entry in self.present.items() if entry.incarnation_id == lease]

    @rule(key=KEYS, value=st.binary(max_size=3), data=st.data())
    def put(self, key: str, value: bytes, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(["", *self.leases]))
        self.write(key, value, lease)
        assert self.space.put(key, value, lease) == len(self.past) - 1

    @rule(key=KEYS, data=st.data())
    def swap(self, key: str, data: st.DataObject) -> None:
        actual = self.present[key].mod_revision if key in self.present else 0
        expected = data.draw(st.sampled_from([0, actual, len(self.past) - 1]))
        revision = self.space.compare_and_swap(key, expected, b"swapped")
        if expected == actual:
            self.write(key, b"swapped", "")
            assert revision == len(self.past) - 1
        else:
            assert revision is None

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        assert self.space.delete(key) == (key in self.present)
        self.remove([key] if key in self.present else [])

    @rule(prefix=PREFIXES)
    def delete_prefix(self, prefix: str) -> None:
        keys = [key for key in self.present if key.startswith(prefix)]
        assert self.space.delete_prefix(prefix) == len(keys)
        self.remove(keys)

    @rule()
    def grant(self) -> None:
        self.granted += 1
        self.leases[f"lease{self.granted}"] = self.now_s + TTL_S
        self.space.grant_lease(f"lease{self.granted}", TTL_S, self.now_s)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def refresh(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        self.leases[lease] = self.now_s + TTL_S
        assert self.space.refresh_lease(lease, self.now_s)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.leases)))
        self.remove(self.hanging_on(lease))
        del self.leases[lease]
        self.space.revoke_lease(lease)
        assert not self.space.refresh_lease(lease, self.now_s)
        with pytest.raises(LeaseLost):
            self.space.put("a", b"", lease)

    @rule(seconds=st.floats(0.0, 15.0))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for expires_at_s, lease in sorted((at_s, lease) for lease, at_s in self.leases.items()):
            if expires_at_s <= self.now_s:
                self.remove(self.hanging_on(lease))
                del self.leases[lease]
        self.space.expire_leases(self.now_s)
        assert self.space.next_expiry_s() == min(self.leases.values(), default=None)

    @rule(back=st.integers(0, 5))
    def compact(self, back: int) -> None:
        revision = max(1, len(self.past) - 1 - back)
        self.space.compact(revision)
        with pytest.raises(StoreCompacted):
            self.space.events("", revision)

    @invariant()
    def the_present_agrees(self) -> None:
        for prefix in ("", "a", "a/", "b"):
            revision, entries = self.space.range(prefix)
            assert revision == len(self.past) - 1
            assert list(entries) == [self.present[key] for key in sorted(self.present) if key.startswith(prefix)]

    @invariant()
    def what_is_kept_of_the_past_agrees(self) -> None:
        for revision in range(1, len(self.past)):
            try:
                listing = self.space.range("a", revision)
                events, following = self.space.events("a", revision + 1)
            except StoreCompacted:
                assert revision < len(self.past) - 1
                continue
            past = self.past[revision]
            assert list(listing.entries) == [past[key] for key in sorted(past) if key.startswith("a")]
            later = (event for event in self.events if event.mod_revision > revision)
            assert list(events) == [event for event in later if event.key.startswith("a")]
            assert following == len(self.past)

    @invariant()
    def history_is_bounded(self) -> None:
        assert len(self.space._history._changes) <= 20


TestKeySpaceAgainstModel = KeySpaceAgainstModel.TestCase
TestKeySpaceAgainstModel.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


def test_a_write_that_cannot_be_made_durable_changes_nothing() -> None:
    def refuse(events: list[WatchEvent]) -> None:
        raise StoreError("disk full")

    space = KeySpace(7, [KeyValue("a", b"1", 5)], before_commit=refuse)
    for write in (lambda: space.put("a", b"2"), lambda: space.delete("a"), lambda: space.delete_prefix("")):
        with pytest.raises(StoreError, match="disk full"):
            write()
    assert space.range("") == (7, (KeyValue("a", b"1", 5),))
    assert space.events("", 8) == ((), 8)


def test_batches_hold_whole_revisions() -> None:
    space = KeySpace()
    for number in range(1000):
        space.put(f"{number:04}", b"")
    space.delete_prefix("")
    events, following = space.events("", 2)
    assert len(events) == 256
    batches = [len(events)]
    while following <= space.revision:
        events, following = space.events("", following)
        batches.append(len(events))
    assert batches == [256, 256, 256, 232 + 1000]
    assert {event.mod_revision for event in events if event.kind == "delete"} == {space.revision}


def test_batches_are_bounded_in_bytes() -> None:
    space = KeySpace()
    for _ in range(5):
        space.put("a", bytes(1 << 20))
    events, following = space.events("", 2)
    assert (len(events), following) == (1, 3)


def test_history_is_bounded_in_bytes() -> None:
    space = KeySpace(history_bytes=10_000)
    for _ in range(100):
        space.put("a", bytes(1000))
    with pytest.raises(StoreCompacted):
        space.events("", 50)
    assert space.events("", 101)[0][0].mod_revision == 101


def test_a_full_store_refuses_growth_but_not_shrinking() -> None:
    space = KeySpace()
    for number in range(31):
        space.put(f"large{number}", bytes(1 << 20))
    with pytest.raises(StoreError, match="full"):
        space.put("one too many", bytes(1 << 20))
    space.put("large0", b"")
    space.put("one too many", bytes(1 << 20))


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
def test_leases_of_absurd_length_are_refused(ttl_s: float) -> None:
    with pytest.raises(StoreError, match="a lease lives"):
        KeySpace().grant_lease("one", ttl_s, 0.0)
