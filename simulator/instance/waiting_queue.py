"""Requests that wait for admission, in the order in which they will be admitted."""

from heapq import heappop, heappush

from simulator.instance.sequence import Sequence, SequenceState


class WaitingQueue:
    """First requests that hold imported KV (their memory is paid for), then by priority, then by arrival.

    A preempted request keeps its arrival and so goes before what came later. Withdrawn requests stay in the
    heap until they reach its head, or until they are the majority; they are told by their state.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[bool, int, int, Sequence]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        """Add a request in state WAITING."""
        heappush(self._heap, (not sequence.blocks, sequence.priority, sequence.arrival, sequence))
        self._length += 1

    def head(self) -> Sequence | None:
        """The next request to admit."""
        heap = self._heap
        while heap and heap[0][3].state is not SequenceState.WAITING:
            heappop(heap)
        return heap[0][3] if heap else None

    def pop(self) -> Sequence:
        """Take the head out; call while it is still WAITING."""
        self._length -= 1
        return heappop(self._heap)[3]

    def withdraw(self) -> None:
        """Count one request less, whose state is WAITING no more."""
        self._length -= 1
        if len(self._heap) > 2 * self._length + 64:
            self._heap = sorted(entry for entry in self._heap if entry[3].state is SequenceState.WAITING)

    def sequences(self) -> list[Sequence]:
        """All waiting requests, in no particular order."""
        return [entry[3] for entry in self._heap if entry[3].state is SequenceState.WAITING]
