"""Which process is meant: an instance's id outlives its processes, its incarnation does not."""

from typing import NamedTuple


class Incarnation(NamedTuple):
    """One life of an instance. A restarted instance keeps its id and has a new incarnation.

    Whatever holds only for one process (tokens on their way, KV blocks, a stream) is kept by this pair. It is a tuple,
    not a dataclass, because it is compared and hashed for every token that a frontend receives.
    """

    instance_id: str
    incarnation_id: str
