"""Tickets: who may open a stream on the socket of frames, as the gRPC server has found out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mesh.identity.identity import Identity, the_identity

VALID_S: Final = 10.0
MAX_TICKETS: Final = 4096
"""Given and not used. The oldest are forgotten beyond that, and their callers use gRPC."""
SECRET_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a ticket was given."""

    names: tuple[bytes, ...]
    """In its certificate; empty where nobody has one."""
    peer: str
    """Its address, as gRPC writes it."""

    @property
    def identity(self) -> Identity | None:
        """By those names; None if they are no member's."""
        return the_identity(name.decode(errors="replace") for name in self.names)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Of one stream."""

    caller: Caller
    proof: bytes
    expires_s: float


class Tickets:
    """Those that were given and not used yet."""

    def __init__(self, clock: Callable[[], float], secret: Callable[[int], str]) -> None:
        """`secret` makes so many unpredictable bytes, as hexadecimal digits."""
        self._clock = clock
        self._secret = secret
        self._tickets: dict[bytes, Ticket] = {}

    def give(self, caller: Caller) -> tuple[bytes, bytes]:
        """A ticket, and the proof that goes with it."""
        while len(self._tickets) >= MAX_TICKETS:
            del self._tickets[next(iter(self._tickets))]
        ticket, proof = self._secret(SECRET_BYTES).encode(), self._secret(SECRET_BYTES).encode()
        self._tickets[ticket] = Ticket(caller, proof, self._clock() + VALID_S)
        return ticket, proof

    def use(self, ticket: bytes) -> Ticket | None:
        """What it stands for, once; None if it was never given, is used or has expired."""
        found = self._tickets.pop(ticket, None)
        return None if found is None or found.expires_s < self._clock() else found
