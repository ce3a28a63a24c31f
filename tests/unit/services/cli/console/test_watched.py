"""What is kept of a mesh that is looked at."""

import asyncio
from typing import Any, cast

import msgspec

from services.cli.console.longest_stories import MAX_STORIES, LongestStories
from services.cli.console.watched import ASKED_AT_A_LOOK, MeshRecorder
from services.frontend.console.recorded import from_zero
from services.frontend.console.requests import Story, story
from services.frontend.console.state import EventRow
from services.frontend.console.stories import Stories
from services.frontend.console.view import View
from services.frontend.console.window import Objectives
from tests.unit.services.frontend.console.looks import START_UNIX_MS, ended, load, look


class Teller:
    """Knows every request."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def find(self, request_id: str, viewer: object) -> Story | None:
        self.asked.append(request_id)
        return story(request_id, {"f": ended(1, request_id=request_id)}, {}, {}, (), (), 0)


def watched(looks: int, requests_each: int, recorder: MeshRecorder) -> tuple[dict[str, Any], Teller]:
    """A look a second; later requests take longer."""
    view, teller = View(Objectives(1000.0, 100.0)), Teller()

    async def watch() -> None:
        for second in range(looks):
            numbers = range(second * requests_each, (second + 1) * requests_each)
            requests = [ended(number + 1, ended_ms=200.0 + number) for number in numbers]
            seen = look(seconds=second, loads=[load(running_requests=second), load()], requests=requests)
            await recorder.add(seen, view.add(seen), cast(Stories, teller))

    asyncio.run(watch())
    run: dict[str, Any] = msgspec.json.decode(from_zero(recorder.encode("mesh", {"more": "yes"}), "renamed"))
    return run, teller


def test_every_moment_is_kept_and_begins_at_zero() -> None:
    known = [EventRow(START_UNIX_MS + 1500, "broken", is_bad=True)]
    run, _ = watched(4, 2, MeshRecorder(known))
    assert [update["body"]["at_unix_ms"] for update in run["updates"]] == [0, 1000, 2000, 3000]
    at = run["updates"][0]["point_columns"].index("at_unix_ms")
    assert [update["series"][-1][at] for update in run["updates"]] == [0, 1000, 2000, 3000]
    events = [[event["what"] for event in update["body"]["events"]] for update in run["updates"]]
    assert ["broken" in each for each in events] == [False, False, True, True]
    assert run["updates"][-1]["body"]["events"][0]["at_unix_ms"] == 1500
    assert run["name"] == "renamed"
    assert run["facts"] == {"policies": "penstock", "requests ended": "8", "more": "yes"}
    assert len(run["stories"]) == 8


def test_of_many_requests_the_longest_are_asked_for() -> None:
    _, teller = watched(2, 20, MeshRecorder())
    assert len(teller.asked) == 2 * ASKED_AT_A_LOOK
    assert teller.asked[0] == "r20"


def test_the_longest_stories_stay() -> None:
    stories = LongestStories()
    for number in range(MAX_STORIES + 10):
        told = story(f"r{number}", {"f": ended(1)}, {}, {}, (), (), 0)
        assert told is not None
        stories.add(float(number), told)
    assert list(stories.by_id())[:1] == [f"r{MAX_STORIES + 9}"]
    assert len(stories.by_id()) == MAX_STORIES
    assert not stories.has_room_for(9.0)
