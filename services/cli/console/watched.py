"""A mesh that is looked at now and then, recorded: a live one by `penstock top`, a simulated one by `penstock fuzz`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final

import msgspec

from penstock.v1 import frontend_pb2
from services.cli.console.longest_stories import LongestStories
from services.frontend.console.collector import Look, Unanswered
from services.frontend.console.recorded import ANYBODY, MAX_RECORDING_BYTES, Moments, encode_run
from services.frontend.console.state import EventRow, State
from services.frontend.console.stories import Stories
from services.frontend.console.view import MAX_EVENTS

ASKED_AT_A_LOOK: Final = 8
"""Stories, each of which takes a call to every frontend and scheduler."""


@dataclass(slots=True)
class MeshRecorder:
    """Keeps what a console showed, and the stories of the requests that took longest."""

    known_events: Sequence[EventRow] = ()
    """That happen to the mesh from outside of it: shown from their times on. Oldest first."""
    moments: Moments = field(default_factory=Moments)
    ended: int = 0
    """Requests."""
    _stories: LongestStories = field(default_factory=LongestStories)
    _policies: dict[str, None] = field(default_factory=dict)
    """In the order in which they came into force."""

    async def add(self, look: Look, state: State, stories: Stories) -> None:
        """A look, and what the console makes of it. Looks come in the order of their times."""
        at = look.at_unix_ms
        if state.body.policy is not None:
            self._policies[state.body.policy.name] = None
        if self.moments.is_due(at):
            self.moments.add(self._with_known_events(state), at)
        ended = list(_ended(look))
        self.ended += len(ended)
        for request in nlargest(ASKED_AT_A_LOOK, ended, key=lambda request: request.ended_ms):
            if self._stories.has_room_for(request.ended_ms):
                story = await stories.find(request.request_id, ANYBODY)
                if story is not None:
                    self._stories.add(request.ended_ms, story)

    def encode(self, name: str, facts: Mapping[str, str], max_bytes: int = MAX_RECORDING_BYTES) -> bytes:
        """The recorded run as JSON; there must have been a look."""
        assert self.moments.states, "somebody has looked"
        everything = {"policies": ", ".join(self._policies), "requests ended": f"{self.ended:,}", **facts}
        return encode_run(name, self.moments, everything, self._stories.by_id(), self.ended, max_bytes)

    def _with_known_events(self, state: State) -> State:
        body = state.body
        known = [event for event in self.known_events if event.at_unix_ms <= body.at_unix_ms]
        if not known:
            return state
        events = sorted((*known, *body.events), key=lambda event: -event.at_unix_ms)[:MAX_EVENTS]
        return msgspec.structs.replace(state, body=msgspec.structs.replace(body, events=tuple(events)))


def _ended(look: Look) -> Iterator[frontend_pb2.EndedRequest]:
    return (
        request for answer in look.ended.values() if not isinstance(answer, Unanswered) for request in answer.requests
    )
