"""What the instance asks of whoever pulls prefixes for it."""

from collections.abc import Callable
from typing import Protocol

from controlplane.model.pull_totals import PullTotals
from controlplane.model.request import EngineRequest, PrefixSource
from controlplane.protocols.prefix_pull.target import PullFollowed, PullOrdered


class PrefixPulls(Protocol):
    """Keeps requests back while the cached prefixes that they begin with are pulled."""

    def __len__(self) -> int:
        """Requests that are kept back."""

    @property
    def totals(self) -> PullTotals:
        """Of all pulls to here."""

    def awaited(self, request: EngineRequest, source: PrefixSource | None) -> PullOrdered | PullFollowed | None:
        """What the request is to wait for: a pull from the source or, without one, another request's pull that brings
        what its prompt begins with, for computed at once it would find none of it. None: nothing."""

    def begin(self, request: EngineRequest, awaited: PullOrdered | PullFollowed, submit: Callable[[], None]) -> None:
        """`submit` is called once, when the prefix is here or not waited for any longer; unless the request is
        withdrawn."""

    def withdraw(self, request_id: str) -> bool:
        """Whether the request was kept back; it is not any more."""
