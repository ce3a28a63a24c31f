"""What a frontend knows of models follows what their workers announce."""

from pathlib import Path

from mesh.membership import ChangeKind, Member, MemberChange
from mesh.runtime import SystemThreads
from services.frontend.requests.models import ModelCatalogue
from tests.still_clock import StillClock


def worker(name: str, model_path: Path, block_tokens: int) -> Member:
    facts = {"block_tokens": str(block_tokens), "max_model_len_tokens": "4096"}
    return Member("worker", name, "1", "127.0.0.1:1", "", {"model": "demo", "model_path": str(model_path), **facts})


async def settled(catalogue: ModelCatalogue) -> int:
    """The block size, once nothing is being loaded."""
    for loading in list(catalogue._loading.values()):
        await loading
    model = await catalogue.find("demo")
    assert model is not None
    return model.block_tokens


async def test_a_model_whose_workers_all_come_back_otherwise_is_learnt_anew(model_path: Path) -> None:
    clock = StillClock(unix_at_s=1.0)
    catalogue = ModelCatalogue(1000, clock, SystemThreads())

    def changed(kind: ChangeKind, member: Member) -> None:
        catalogue.on_change(MemberChange(kind, member))

    former, other = worker("a", model_path, 16), worker("b", model_path, 16)
    changed(ChangeKind.JOINED, former)
    changed(ChangeKind.JOINED, other)
    assert await settled(catalogue) == 16
    clock.unix_at_s = 2.0
    changed(ChangeKind.LEFT, former)
    changed(ChangeKind.JOINED, worker("a", model_path, 32))
    assert await settled(catalogue) == 16, "as long as there is one of these"
    changed(ChangeKind.LEFT, other)
    assert await settled(catalogue) == 32, "hashes of other blocks would be found in no prefix cache"
    model = catalogue.get("demo")
    assert model is not None
    assert model.created_unix_s == 1
    await catalogue.stop()
