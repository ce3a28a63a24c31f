"""What a store file keeps, and what becomes of a damaged one."""

import errno
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.errors import StoreError
from mesh.runtime import SystemClock, SystemEntropy
from mesh.store.disk import SystemDisk
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from mesh.store.interface import KeyValue, WatchEvent
from mesh.store.journal import Journal
from tests.examples import examples


def put(key: str, value: bytes, revision: int, lease: str = "") -> WatchEvent:
    return WatchEvent("put", key, value, revision, lease)


def delete(key: str, revision: int) -> WatchEvent:
    return WatchEvent("delete", key, b"", revision)


def write(path: Path, *revisions: list[WatchEvent]) -> None:
    journal = Journal(path, SystemDisk())
    for events in revisions:
        journal.record(events)
    journal.close()


def read(path: Path) -> tuple[int, dict[str, KeyValue]]:
    journal = Journal(path, SystemDisk())
    journal.close()
    return journal.revision, journal.entries


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "state.journal"


def test_keys_keep_their_values_and_revisions(path: Path) -> None:
    write(path, [put("a", b"\x00\xff", 3)], [put("b", b"", 5)], [put("a", b"new", 6)])
    expected = (6, {"a": KeyValue("a", b"new", 6), "b": KeyValue("b", b"", 5)})
    assert read(path) == expected
    assert read(path) == expected


def test_the_revision_of_a_delete_is_not_given_out_again(path: Path) -> None:
    write(path, [put("a", b"", 3), put("b", b"", 3)], [delete("a", 9), delete("b", 9)])
    assert read(path) == (9, {})


def test_what_hangs_on_a_lease_is_left_out(path: Path) -> None:
    write(path, [put("a", b"", 3, "lease")], [put("b", b"", 4)], [put("b", b"", 5, "lease")], [delete("a", 6)])
    assert read(path) == (5, {})


def test_a_torn_last_line_is_dropped(path: Path) -> None:
    write(path, [put("a", b"kept", 3)])
    whole = path.read_bytes()
    write(path, [put("a", b"torn", 4)])
    torn = path.read_bytes()[:-1]
    for length in range(len(whole), len(torn) + 1):
        path.write_bytes(torn[:length])
        assert read(path) == (3, {"a": KeyValue("a", b"kept", 3)})


def test_a_journal_is_written_on_after_a_torn_line(path: Path) -> None:
    write(path, [put("a", b"kept", 3)])
    path.write_bytes(path.read_bytes() + b'{"revision":4,"pu')
    write(path, [put("b", b"", 4)])
    assert read(path) == (4, {"a": KeyValue("a", b"kept", 3), "b": KeyValue("b", b"", 4)})


def test_damage_in_the_middle_is_refused_and_the_file_left_alone(path: Path) -> None:
    write(path, [put("a", b"", 3)], [put("b", b"", 4)])
    damaged = path.read_bytes().replace(b'"a"', b'"a')
    path.write_bytes(damaged)
    with pytest.raises(StoreError, match="is damaged"):
        Journal(path, SystemDisk())
    assert path.read_bytes() == damaged


def test_a_file_has_one_owner(path: Path) -> None:
    journal = Journal(path, SystemDisk())
    with pytest.raises(StoreError, match="another process holds"):
        Journal(path, SystemDisk())
    journal.close()
    Journal(path, SystemDisk()).close()


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot open the store file"):
        Journal(tmp_path / "file" / "state.journal", SystemDisk())


def test_a_journal_does_not_grow_without_end(path: Path) -> None:
    journal = Journal(path, SystemDisk())
    for revision in range(1, 300):
        journal.record([put("a", bytes(20_000), revision)])
    assert path.stat().st_size < 2 << 20
    journal.close()
    assert read(path) == (299, {"a": KeyValue("a", bytes(20_000), 299)})


def test_a_failed_write_changes_nothing_and_the_next_one_succeeds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, SystemDisk())
    journal.record([put("a", b"1", 3)])
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", _full_disk)
        with pytest.raises(StoreError, match="nothing was changed"):
            journal.record([put("a", b"2", 4)])
    assert journal.entries == {"a": KeyValue("a", b"1", 3)}
    journal.record([put("b", b"3", 4)])
    journal.close()
    assert read(path) == (4, {"a": KeyValue("a", b"1", 3), "b": KeyValue("b", b"3", 4)})


def test_a_rewrite_that_fails_loses_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, SystemDisk())
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", _full_disk)
        for revision in range(1, 100):
            journal.record([put("a", bytes(20_000), revision)])
        grown_bytes = path.stat().st_size
    for revision in range(100, 200):
        journal.record([put("a", bytes(20_000), revision)])
    assert path.stat().st_size < grown_bytes
    journal.close()
    assert read(path) == (199, {"a": KeyValue("a", bytes(20_000), 199)})


def test_revisions_of_keys_with_a_lease_are_not_given_out_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor those that a full disk lets pass, since some were reserved before."""
    journal = Journal(path, SystemDisk())
    journal.reserve(7)
    journal.record([put("a", b"", 8, "lease")])
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", _full_disk)
        for revision in range(9, 8000):
            journal.record([put("a", b"", revision, "lease")])
        with pytest.raises(StoreError, match="nothing was changed"):
            journal.record([put("a", b"", 10_008, "lease")])
    journal.close()
    again = Journal(path, SystemDisk())
    assert again.reserved_revision >= 10_007
    again.close()


async def test_a_store_whose_clock_is_set_back_counts_on(path: Path) -> None:
    first = StoreHost(SystemClock(), SystemEntropy(), path)
    incarnation_id = first.grant_lease(60.0)
    newest = [first.put(f"{number}", b"", incarnation_id) for number in range(5)][-1]
    first.close()
    second = StoreHost(SystemClock(), SystemEntropy(), path, start_revision=1)
    assert second.revision > newest
    second.close()


def _full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "disk full")


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.binary(max_size=5))), max_size=8))
def test_reopening_restores_any_sequence(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[str, bytes | None]]
) -> None:
    path = tmp_path_factory.mktemp("journal") / "state"
    expected: dict[str, bytes] = {}
    for revision, (key, value) in enumerate(writes, start=2):
        write(path, [delete(key, revision) if value is None else put(key, value, revision)])
        expected.pop(key, None)
        if value is not None:
            expected[key] = value
    assert {key: entry.value for key, entry in read(path)[1].items()} == expected


@pytest.mark.live
async def test_a_store_comes_back_ahead_of_its_former_self(path: Path) -> None:
    store = EmbeddedStore(StoreHost(SystemClock(), SystemEntropy(), path))
    revision = await store.put("kept", b"1")
    lease = await store.grant_lease(60.0)
    for _ in range(10):
        leased = await store.put("leased", b"", lease=lease)
    await store.close()
    store = EmbeddedStore(StoreHost(SystemClock(), SystemEntropy(), path, start_revision=1))
    listing = await store.range("")
    assert listing.entries == (KeyValue("kept", b"1", revision),)
    assert await store.compare_and_swap("kept", revision, b"2") is not None
    await store.close()
    store = EmbeddedStore(StoreHost(SystemClock(), SystemEntropy(), path))
    assert (await store.range("")).revision > leased
    await store.close()
