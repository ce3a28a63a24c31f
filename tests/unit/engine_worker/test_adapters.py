"""What an engine keeps of LoRA adapters, and how they are told apart."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.adapter import Adapter
from engine_worker.adapters import (
    CONFIG_FILE,
    REFUSED_FOR_S,
    AdapterCache,
    adapter_digest,
    check_digest,
    parse_modules,
)
from mesh.errors import AdapterNotFound, AdapterUnavailable, ConfigurationError


def write(directory: Path, weights: bytes, config: str = "{}") -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(config)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return str(directory)


def adapter(digest: str) -> Adapter:
    return Adapter(f"name of {digest}", digest, f"/{digest}")


def test_copies_have_one_digest_and_what_was_trained_on_another(tmp_path: Path) -> None:
    digest = adapter_digest(write(tmp_path / "a", b"one"))
    assert len(digest) == 32
    assert adapter_digest(write(tmp_path / "b", b"one")) == digest
    (tmp_path / "b" / "README.md").write_text("of no weight")
    assert adapter_digest(str(tmp_path / "b")) == digest
    assert adapter_digest(write(tmp_path / "c", b"two")) != digest
    assert adapter_digest(write(tmp_path / "d", b"one", '{"r": 8}')) != digest


def test_what_is_no_adapter_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(AdapterNotFound, match=r"it has no adapter_model\.safetensors"):
        adapter_digest(str(tmp_path / "nowhere"))
    write(tmp_path / "a", b"one")
    (tmp_path / "a" / CONFIG_FILE).unlink()
    with pytest.raises(AdapterNotFound, match=r"it has no adapter_config\.json"):
        adapter_digest(str(tmp_path / "a"))


def test_other_files_under_the_same_name_are_refused_aloud() -> None:
    assert check_digest(Adapter("poet", "", "/p"), "11").digest == "11"
    assert check_digest(Adapter("poet", "11", "/p"), "11").digest == "11"
    with pytest.raises(AdapterUnavailable, match=r"'poet' has other files here .* checksum 22, and 11 is wanted"):
        check_digest(Adapter("poet", "11", "/p"), "22")


def test_modules_are_given_by_name_and_path() -> None:
    assert parse_modules("") == ()
    assert parse_modules("a=/x, b=/y=z") == (Adapter("a", "", "/x"), Adapter("b", "", "/y=z"))
    for wrong in ("a", "=x", "a=", "a=/x,", "a=/x,a=/y"):
        with pytest.raises(ConfigurationError):
            parse_modules(wrong)


def test_an_engine_without_slots_takes_no_adapter() -> None:
    cache = AdapterCache(0, 0)
    cache.begin("plain", None, 0.0)
    with pytest.raises(AdapterUnavailable, match="enable_lora=true"):
        cache.begin("r", adapter("a"), 0.0)


def test_what_could_not_be_loaded_is_refused_for_a_while() -> None:
    cache = AdapterCache(1, 2)
    cache.refused("a", "its rank is too high", 5.0)
    assert cache.load(5.0 + REFUSED_FOR_S - 0.1).refused == ("a",)
    with pytest.raises(AdapterUnavailable, match="its rank is too high"):
        cache.begin("r", adapter("a"), 5.0)
    assert cache.load(5.0 + REFUSED_FOR_S).refused == ()
    cache.begin("r", adapter("a"), 5.0 + REFUSED_FOR_S)
    cache.refused("b", "gone", 20.0)
    cache.loaded(adapter("b"), cache.next_number())
    assert cache.load(20.0).refused == (), "an operator has had it loaded"


class Engine:
    """Does with the cache what an engine does."""

    def __init__(self, slots: int, capacity: int) -> None:
        self.cache = AdapterCache(slots, capacity)
        self.inside: dict[int, str] = {}
        """What the engine has loaded, by number."""
        self.running: dict[str, str] = {}

    def submit(self, request_id: str, digest: str) -> None:
        if request_id in self.running:
            return
        try:
            self.cache.begin(request_id, adapter(digest), 0.0)
            if self.cache.number(digest) is None:
                victim = self.cache.victim()
                if victim is not None:
                    assert self.inside.pop(victim) not in self.running.values(), "somebody uses it"
                    self.cache.dropped(victim)
                number = self.cache.next_number()
                self.inside[number] = digest
                self.cache.loaded(adapter(digest), number)
        except AdapterUnavailable:
            assert digest not in self.running.values()
            assert len(set(self.running.values())) >= self.cache._capacity, "there was room"
            self.cache.end(request_id)
        else:
            self.running[request_id] = digest

    def end(self, request_id: str) -> None:
        self.cache.end(request_id)
        self.running.pop(request_id, None)

    def unload(self, digest: str) -> None:
        number = self.cache.unused(digest)
        assert number is None or digest not in self.running.values()
        if number is not None:
            del self.inside[number]
            self.cache.dropped(number)


@given(
    st.integers(1, 2),
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from("sseeu"), st.sampled_from("123456"), st.sampled_from("abcdef"))),
)
def test_what_requests_use_stays_loaded_and_the_room_is_kept(
    slots: int, capacity: int, events: list[tuple[str, str, str]]
) -> None:
    engine = Engine(slots, capacity)
    for kind, request_id, digest in events:
        match kind:
            case "s":
                engine.submit(request_id, digest)
            case "e":
                engine.end(request_id)
            case _:
                engine.unload(digest)
        engine.cache.validate()
        load = engine.cache.load(0.0)
        assert set(load.in_use) == set(engine.running.values()) <= set(engine.inside.values())
        assert set(load.in_use) | set(load.idle) == set(engine.inside.values())
        assert not set(load.in_use) & set(load.idle)


def test_the_adapter_whose_last_request_is_longest_ago_makes_room() -> None:
    engine = Engine(1, 2)
    for request_id, digest in (("1", "a"), ("2", "b"), ("3", "a")):
        engine.submit(request_id, digest)
        engine.end(request_id)
    engine.submit("4", "c")
    assert set(engine.inside.values()) == {"a", "c"}
