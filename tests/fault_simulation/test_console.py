"""Somebody watches the console of every frontend while the mesh breaks."""

from collections.abc import Mapping

import msgspec
import pytest

from fault_simulation.run import run_seed
from mesh.role import RoleContext
from services.frontend.console.feed import ConsoleFeed
from services.frontend.console.update import Viewer
from services.frontend.errors import ApiError
from services.frontend.role import FrontendRole


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 11])
def test_who_watches_sees_the_mesh_and_changes_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    numbers: list[int] = []
    start = FrontendRole.start

    async def watch(feed: ConsoleFeed) -> None:
        try:
            async for update in feed.updates(Viewer()):
                numbers.append(msgspec.json.decode(update)["number"])
        except ApiError:
            return  # it stops

    async def start_and_watch(role: FrontendRole, context: RoleContext) -> Mapping[str, str]:
        attributes = await start(role, context)
        assert role.console is not None
        role._tasks.spawn(watch(role.console.feed), name="viewer")
        return attributes

    monkeypatch.setattr(FrontendRole, "start", start_and_watch)
    outcome = run_seed(seed)
    assert outcome.violations == ()
    assert len(numbers) > 10
    assert "a look at the mesh failed by a bug" not in caplog.text
