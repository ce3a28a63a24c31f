"""Which requests are to leave an instance (CascadeInfer, sections 3.2 and 4.4)."""

from collections.abc import Iterable, Sequence

from controlplane.model.running_request import RunningRequest


def outgrown(running: Iterable[RunningRequest], boundary_tokens: float) -> list[RunningRequest]:
    """Requests that have grown beyond the instance's range, the longest first."""
    beyond = [request for request in running if request.context_tokens > boundary_tokens]
    return sorted(beyond, key=lambda request: -request.context_tokens)


def excess_tokens(own_tokens: int, peers_tokens: Sequence[int], overload_share: float) -> float:
    """Load above the stage's mean, of an instance that is more than `overload_share` over it; otherwise 0."""
    mean = (own_tokens + sum(peers_tokens)) / (1 + len(peers_tokens))
    return own_tokens - mean if own_tokens > (1 + overload_share) * mean else 0.0


def relieving(running: Iterable[RunningRequest], excess: float) -> list[RunningRequest]:
    """Requests whose contexts together come closest to the excess without exceeding it, taking the longest first.

    The paper does not say which requests leave; the tokens to be moved are the same, and so the fewest requests move.
    """
    chosen: list[RunningRequest] = []
    for request in sorted(running, key=lambda request: -request.context_tokens):
        if request.context_tokens <= excess:
            chosen.append(request)
            excess -= request.context_tokens
    return chosen
