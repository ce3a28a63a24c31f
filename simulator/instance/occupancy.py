"""How full an instance is."""

from typing import NamedTuple


class Occupancy(NamedTuple):
    """The requests of an instance and the memory that they hold; fields as in `LoadReport`."""

    running_requests: int
    queued_requests: int
    running_tokens: int
    kv_blocks_used: int
