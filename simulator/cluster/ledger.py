"""The requests of a simulation from arrival to end: each ends exactly once, and one instance at a time owns it."""

from dataclasses import dataclass, field, replace

from controlplane.model.incarnation import Incarnation
from controlplane.model.placement import Placement
from controlplane.protocols.ownership import Ownership
from controlplane.protocols.recovery import RecoveryManager
from mesh.errors import IllegalTransition
from simulator.instance.counted_request import CountedRequest
from simulator.report.outcome import RequestOutcome


@dataclass(slots=True)
class OpenRequest:
    """A request that has arrived and has not ended."""

    index: int
    """Its place in the trace."""
    arrival_s: float
    request: CountedRequest
    """As it would be submitted now: tokens emitted before a failure or a migration included."""
    recovery: RecoveryManager
    """Where it is to go."""
    ownership: Ownership = field(default_factory=Ownership)
    """Whose tokens count, as at the frontend."""
    instance_id: str = ""
    """The instance that it was on last; empty before the first."""
    placement: Placement | None = None
    """What was chosen for it last; None once an instance has it."""
    brought_tokens: int = 0
    """Generated tokens that it had when its owner got it."""
    came_from: str = ""
    """The instance that it moved from to its owner; empty: none, it was placed there."""
    first_token_s: float | None = None
    cached_tokens: int = 0

    @property
    def owner(self) -> Incarnation | None:
        """Who has it now; None between two placements."""
        return self.ownership.owner

    @property
    def epoch(self) -> int:
        """One more with each migration, two more with each recovery."""
        return self.ownership.epoch


class Ledger:
    """Open requests, and the outcomes of those that ended."""

    def __init__(self) -> None:
        self.open: dict[str, OpenRequest] = {}
        self._outcomes: dict[int, RequestOutcome] = {}

    @property
    def ended(self) -> int:
        """How many requests have ended."""
        return len(self._outcomes)

    def outcomes(self) -> list[RequestOutcome]:
        """In the order of the trace. Raises `IllegalTransition` while requests are open."""
        if self.open:
            raise IllegalTransition(f"{len(self.open)} requests have not ended, {next(iter(self.open))} among them")
        return [self._outcomes[index] for index in sorted(self._outcomes)]

    def outcome(self, index: int) -> RequestOutcome:
        """Of the request at a place of the trace that has ended."""
        return self._outcomes[index]

    def arrived(self, entry: OpenRequest) -> None:
        """Note a new request. Raises `IllegalTransition` if it has arrived before."""
        request_id = entry.request.request_id
        if request_id in self.open or entry.index in self._outcomes:
            raise IllegalTransition(f"request {request_id} has arrived before")
        self.open[request_id] = entry

    def placed(self, request_id: str, owner: Incarnation) -> None:
        """It was given to an instance, under its present epoch."""
        entry = self.open[request_id]
        entry.ownership.place(owner)
        entry.instance_id, entry.came_from = owner.instance_id, ""
        entry.brought_tokens = entry.request.emitted_tokens

    def handed_off(self, request_id: str, owner: Incarnation, epoch: int, emitted_tokens: int) -> bool:
        """An instance says that a request has moved to it; False if a recovery has overtaken that, or the end."""
        entry = self.open.get(request_id)
        if entry is None or not entry.ownership.claim(owner, epoch):
            return False
        entry.brought_tokens, entry.came_from = emitted_tokens, entry.instance_id
        entry.instance_id = owner.instance_id
        return True

    def taken_back(self, request_id: str, emitted_tokens: int) -> OpenRequest:
        """Its owner is lost or gives it up, with so many tokens emitted in all."""
        entry = self.open[request_id]
        entry.ownership.take_back()
        entry.request = replace(entry.request, emitted_tokens=emitted_tokens)
        return entry

    def started(self, request_id: str, cached_tokens: int, now_s: float) -> bool:
        """A token came out after prefill; the first time it counts (True), not after a failure."""
        entry = self.open[request_id]
        if entry.first_token_s is not None:
            return False
        entry.first_token_s = now_s
        entry.cached_tokens = cached_tokens
        return True

    def finished(self, request_id: str, owner: Incarnation, now_s: float) -> None:
        """All its tokens are out. Raises `IllegalTransition` unless the owner says so."""
        entry = self.open.get(request_id)
        if entry is not None and entry.owner != owner:
            raise IllegalTransition(f"request {request_id} ends on {owner}, but {entry.owner} owns it")
        self._close(request_id, now_s, "")

    def failed(self, request_id: str, now_s: float, error: str) -> None:
        """Close a request that nobody will serve, with the reason for its outcome."""
        self._close(request_id, now_s, error)

    def _close(self, request_id: str, now_s: float, error: str) -> None:
        entry = self.open.pop(request_id, None)
        if entry is None:
            raise IllegalTransition(f"request {request_id} ends, but it is not open: it never came or ended before")
        request = entry.request
        self._outcomes[entry.index] = RequestOutcome(
            arrival_s=entry.arrival_s,
            finished_s=now_s,
            first_token_s=entry.first_token_s,
            last_token_s=None if error else now_s,
            input_tokens=request.prompt_tokens,
            output_tokens=request.emitted_tokens if error else request.output_tokens,
            cached_tokens=entry.cached_tokens,
            instance_id=entry.instance_id,
            error=error,
        )
