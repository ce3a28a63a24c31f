"""Where an instance gets the KV of a prompt's leading blocks from when it is their turn, besides its prefix cache."""

from collections.abc import Sequence
from typing import Protocol


class Fetcher(Protocol):
    """Asked by the instance's scheduler; brings blocks from the host's memory."""

    def promised(self, request_id: str, block_hashes: Sequence[int]) -> int:
        """How many leading blocks could be brought now, for what the instance says of its load."""

    def fetch(self, request_id: str, block_hashes: Sequence[int], cached_blocks: int) -> int:
        """There is room for the request. Begin to bring it as many leading blocks as is answered, if that is more than
        the `cached_blocks` that it has; it waits until `SimulatedInstance.fetched` says how many have come."""
