"""Responses that clients may go on with, as long as there is room for them. Pure."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response and the conversation up to its end."""

    response: bytes
    """As it was sent, or would have been, whole."""
    messages: tuple[dict[str, Any], ...]
    """As chat messages, without instructions."""
    owner: str
    """Name of the API key; only its bearer sees the response."""
    size_bytes: int


class ResponseStore:
    """Drops the least recently used ones beyond its bound of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def size_bytes(self) -> int:
        """Of all that is kept."""
        return self._size_bytes

    def keep(self, response_id: str, response: StoredResponse) -> None:
        """One that is larger than the store is not kept at all."""
        self.drop(response_id, response.owner)
        if response.size_bytes > self._max_bytes:
            return
        self._responses[response_id] = response
        self._size_bytes += response.size_bytes
        while self._size_bytes > self._max_bytes:
            _, oldest = self._responses.popitem(last=False)
            self._size_bytes -= oldest.size_bytes

    def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """One of this owner's."""
        found = self._responses.get(response_id)
        if found is None or found.owner != owner:
            return None
        self._responses.move_to_end(response_id)
        return found

    def drop(self, response_id: str, owner: str) -> bool:
        """Whether there was one of this owner's."""
        found = self._responses.get(response_id)
        if found is None or found.owner != owner:
            return False
        del self._responses[response_id]
        self._size_bytes -= found.size_bytes
        return True
