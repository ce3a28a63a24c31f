"""Images, recordings and films that clients name: sent once with a `uuid`, and by it alone from then on."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from penstock.v1 import request_pb2


@dataclass(frozen=True, slots=True)
class MediaName:
    """A `uuid` as its client means it."""

    tenant: str
    """The client's: nobody gets another's images by guessing their names."""
    modality: str
    uuid: str


ENTRY_BYTES: Final = 512
"""What one takes besides its content and its name."""


class NamedMedia:
    """What each name stands for: the content that came with it last. Beyond its bound of bytes the least recently used
    ones are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._media: OrderedDict[MediaName, request_pb2.Media] = OrderedDict()
        self.size_bytes = 0
        """Of all that is kept, names included."""

    def keep(self, name: MediaName, media: request_pb2.Media) -> None:
        """One that is larger than the bound is not kept at all."""
        if (earlier := self._media.pop(name, None)) is not None:
            self.size_bytes -= _entry_bytes(name, earlier)
        if _entry_bytes(name, media) > self._max_bytes:
            return
        self._media[name] = media
        self.size_bytes += _entry_bytes(name, media)
        while self.size_bytes > self._max_bytes:
            self.size_bytes -= _entry_bytes(*self._media.popitem(last=False))

    def find(self, name: MediaName) -> request_pb2.Media | None:
        """None where nothing has come under this name, or it is dropped."""
        found = self._media.get(name)
        if found is not None:
            self._media.move_to_end(name)
        return found


def _entry_bytes(name: MediaName, media: request_pb2.Media) -> int:
    return ENTRY_BYTES + len(name.tenant) + len(name.uuid) + len(media.content)
