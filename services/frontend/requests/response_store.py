"""Responses that clients may go on with, as long as there is room for them. Pure."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.v1 import frontend_pb2


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
    events: bytes = b""
    """Those that it was streamed as, where it was made in the background: for whoever reads them again."""
    is_running: bool = False
    """It is still being made, at the frontend that said so: this is its state of then."""

    @classmethod
    def of(
        cls, response: bytes, messages: tuple[dict[str, Any], ...], owner: str, events: bytes = b""
    ) -> "StoredResponse":
        """With the size that it has."""
        size_bytes = len(response) + len(msgspec.json.encode(messages)) + len(events)
        return cls(response, messages, owner, size_bytes, events)

    @classmethod
    def from_message(cls, message: frontend_pb2.StoredResponse) -> "StoredResponse":
        """From another frontend. Raises ValueError for what none sends."""
        try:
            messages = msgspec.json.decode(message.messages, type=list[dict[str, Any]])
        except msgspec.MsgspecError as error:
            raise ValueError(f"its messages cannot be read: {error}") from error
        size_bytes = len(message.response) + len(message.messages) + len(message.events)
        return cls(message.response, tuple(messages), message.owner, size_bytes, message.events, message.is_running)

    def to_message(self, response_id: str) -> frontend_pb2.StoredResponse:
        """For another frontend."""
        messages = msgspec.json.encode(self.messages)
        return frontend_pb2.StoredResponse(
            response_id=response_id,
            owner=self.owner,
            response=self.response,
            messages=messages,
            is_running=self.is_running,
            events=self.events,
        )


class ResponseStore:
    """Drops the least recently used ones beyond its bound of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._responses)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._responses

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
