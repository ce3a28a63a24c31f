"""What the instance asks of whoever pulls prefixes for it."""

from collections.abc import Callable
from typing import Protocol

from controlplane.model.pull_totals import PullTotals
from controlplane.model.request import EngineRequest, PrefixSource


class PrefixPulls(Protocol):
    """Keeps requests back while the cached prefixes that they begin with are pulled."""

    def __len__(self) -> int:
        """Requests that are kept back."""

    @property
    def totals(self) -> PullTotals:
        """Of all pulls to here."""

    def brings(self, request: EngineRequest) -> bool:
        """Whether what the request's prompt begins with is being pulled for another one. Computed at once the request
        would find none of it."""

    def begin(self, request: EngineRequest, source: PrefixSource | None, submit: Callable[[], None]) -> None:
        """`submit` is called once, when the prefix is here or not waited for any longer; unless the request is
        withdrawn. No source: what is being pulled for another one is waited for."""

    def withdraw(self, request_id: str) -> bool:
        """Whether the request was kept back; it is not any more."""
