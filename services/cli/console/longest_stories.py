"""Stories of the requests that took longest, of which a recording has room for some."""

import heapq
from dataclasses import dataclass, field
from typing import Final

from services.frontend.console.requests import Story

MAX_STORIES: Final = 500


@dataclass(slots=True)
class LongestStories:
    """At most `MAX_STORIES` of them."""

    _heap: list[tuple[float, int, Story]] = field(default_factory=list)
    """The shortest first."""
    _added: int = 0

    def has_room_for(self, took_ms: float) -> bool:
        """Whether the story of a request that took so long would be kept."""
        return len(self._heap) < MAX_STORIES or took_ms > self._heap[0][0]

    def add(self, took_ms: float, story: Story) -> None:
        """Keep it in place of a shorter one, where there is room for it."""
        if not self.has_room_for(took_ms):
            return
        self._added += 1
        entry = (took_ms, self._added, story)
        if len(self._heap) < MAX_STORIES:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heapreplace(self._heap, entry)

    def by_id(self) -> dict[str, Story]:
        """The longest first."""
        return {story.request_id: story for _, _, story in sorted(self._heap, key=lambda entry: -entry[0])}
