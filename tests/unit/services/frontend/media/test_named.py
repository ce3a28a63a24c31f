"""Images that their clients name by a `uuid`."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.media import media_hash
from penstock.v1 import request_pb2
from services.frontend.media.named import ENTRY_BYTES, MediaName, NamedMedia

CAT, DOG = b"a cat", b"a dog, larger"


def image(content: bytes) -> request_pb2.Media:
    return request_pb2.Media(modality="image", content=content, media_hash=media_hash("image", content))


def named(uuid: str, tenant: str = "", modality: str = "image") -> MediaName:
    return MediaName(tenant, modality, uuid)


def test_a_name_stands_for_what_came_with_it_last() -> None:
    kept = NamedMedia(10_000)
    kept.keep(named("pet"), image(CAT))
    assert kept.find(named("pet")) == image(CAT)
    kept.keep(named("pet"), image(DOG))
    assert kept.find(named("pet")) == image(DOG)
    assert kept.size_bytes == ENTRY_BYTES + len("pet") + len(DOG)


def test_nobody_gets_what_another_one_has_named() -> None:
    kept = NamedMedia(10_000)
    kept.keep(named("pet", "ada"), image(CAT))
    assert kept.find(named("pet", "bob")) is kept.find(named("pet")) is None
    assert kept.find(named("pet", "ada", "audio")) is None


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 900), st.booleans()), max_size=40))
def test_those_that_were_not_used_for_longest_go_first(steps: list[tuple[str, int, bool]]) -> None:
    kept, model, bound = NamedMedia(3_000), dict[str, int](), 3_000
    for uuid, size, is_kept in steps:
        if is_kept:
            kept.keep(named(uuid), image(bytes(size)))
            model.pop(uuid, None)
            model[uuid] = size
            while sum(ENTRY_BYTES + 1 + each for each in model.values()) > bound:
                del model[next(iter(model))]
        elif kept.find(named(uuid)) is not None:
            model[uuid] = model.pop(uuid)
        assert kept.size_bytes == sum(ENTRY_BYTES + 1 + each for each in model.values())
    for uuid in "abcde":
        found = kept.find(named(uuid))
        assert (found and len(found.content)) == model.get(uuid)


def test_one_that_is_larger_than_all_room_is_not_kept_and_drops_nothing() -> None:
    kept = NamedMedia(ENTRY_BYTES + 10)
    kept.keep(named("a"), image(CAT))
    kept.keep(named("b"), image(bytes(11)))
    assert kept.find(named("a")) is not None
    assert kept.find(named("b")) is None
    kept.keep(named("a"), image(bytes(11)))
    assert kept.find(named("a")) is None, "what it stood for before is not what its client means now"
    assert kept.size_bytes == 0


def test_without_room_nothing_is_kept() -> None:
    kept = NamedMedia(0)
    kept.keep(named("a"), image(CAT))
    assert kept.find(named("a")) is None
