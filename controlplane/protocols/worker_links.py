"""Which links a frontend keeps to workers, and until when. Pure.

    PRESENT --left, or superseded by a later incarnation--> LEAVING --no request any more--> retired
       ^                                                       |
       '--------------------announced again--------------------'

A worker that leaves the mesh gets no new request, and its link stays until its last request has ended there: it may
only have lost its lease, or it drains. A worker that is announced at another address is spoken to there once its
stream has no request, which would be lost with the stream. Time does not matter to any of this.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from controlplane.model.incarnation import Incarnation
from mesh.invariants import invariants


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker is announced."""

    worker: Incarnation


@dataclass(frozen=True, slots=True)
class Left:
    """A worker is announced no longer."""

    worker: Incarnation


@dataclass(frozen=True, slots=True)
class Looked:
    """What there is on the links; some ten times a second."""

    requests: Mapping[Incarnation, int]
    """How many requests of this frontend each worker has; none where it is not named."""
    moved: Collection[Incarnation]
    """Those whose streams go to an address that is no longer theirs."""


Event: TypeAlias = Joined | Left | Looked


@dataclass(frozen=True, slots=True)
class Open:
    """Open a link to a worker, and place requests there."""

    worker: Incarnation


@dataclass(frozen=True, slots=True)
class Return:
    """Place requests on a link again that was to be retired."""

    worker: Incarnation


@dataclass(frozen=True, slots=True)
class Leave:
    """Place no more requests on a link; those that it has go on."""

    worker: Incarnation


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Open the stream of a link anew, at the worker's address of now."""

    worker: Incarnation


@dataclass(frozen=True, slots=True)
class Retire:
    """Close a link for good."""

    worker: Incarnation


Instruction: TypeAlias = Open | Return | Leave | Reconnect | Retire


class LinkState(Enum):
    """What a link is kept for."""

    PRESENT = "present"
    LEAVING = "leaving"
    """For the requests that it has."""


class LinkManager:
    """Of one frontend, one link for each incarnation of a worker."""

    def __init__(self) -> None:
        self._states: dict[Incarnation, LinkState] = {}
        self._present: dict[str, Incarnation] = {}
        """By instance."""

    def handle(self, event: Event) -> tuple[Instruction, ...]:
        """What is to be done about `event`, in order. What is known already returns nothing."""
        return tuple(self._handle(event))

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        present = {worker for worker, state in self._states.items() if state is LinkState.PRESENT}
        assert set(self._present.values()) == present, "who is announced has a link, and no other is used"
        for instance_id, worker in self._present.items():
            assert worker.instance_id == instance_id, "kept by its own id"

    def _handle(self, event: Event) -> Iterator[Instruction]:
        match event:
            case Joined(worker):
                former = self._present.get(worker.instance_id)
                if former == worker:
                    return
                if former is not None:
                    yield self._leave(former)
                is_known = worker in self._states
                self._states[worker] = LinkState.PRESENT
                self._present[worker.instance_id] = worker
                yield Return(worker) if is_known else Open(worker)
            case Left(worker):
                if self._present.get(worker.instance_id) == worker:
                    yield self._leave(worker)
            case Looked(requests, moved):
                for worker, state in list(self._states.items()):
                    if requests.get(worker):
                        continue
                    if state is LinkState.LEAVING:
                        del self._states[worker]
                        yield Retire(worker)
                    elif worker in moved:
                        yield Reconnect(worker)

    def _leave(self, worker: Incarnation) -> Leave:
        del self._present[worker.instance_id]
        self._states[worker] = LinkState.LEAVING
        return Leave(worker)
