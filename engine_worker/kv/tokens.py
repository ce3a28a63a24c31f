"""By what a transfer agent knows that who asks for blocks was told of them by whoever exports them.

A token is made for each export, by the worker that exports, and reaches the puller in its offer or its hold, over the
gRPC of the mesh. It is never sent over the network of the blocks, which anybody may read: each side shows that it has
it by a keyed hash of what both have just drawn (RFC 2104). So what was shown once opens nothing again, and a puller
knows as well that it has reached the source.
"""

import hmac
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from mesh.errors import KvTransferRefused
from mesh.runtime import Entropy

TOKEN_BYTES: Final = 16
NONCE_BYTES: Final = 16
MAX_EXPORTS: Final = 4096
"""Open at once: more than an instance has requests."""


def new_token(entropy: Entropy) -> str:
    """Of one export."""
    return entropy.token_hex(TOKEN_BYTES)


class Purpose(StrEnum):
    """What a proof is for: none does for another."""

    CONNECT = "connect"
    """The puller, as it connects."""
    ACCEPT = "accept"
    """The source, in answer."""
    PULL = "pull"
    """The puller, of one pull."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """Of one connection: what its two ends have drawn for it."""

    caller_nonce: bytes
    callee_nonce: bytes

    def proof(self, token: str, purpose: Purpose, export_id: str, transfer: int = 0) -> bytes:
        """Shows, on this connection and for this purpose alone, that its sender has the token."""
        claim = msgspec.msgpack.encode((purpose.value, self.caller_nonce, self.callee_nonce, export_id, transfer))
        return hmac.digest(token.encode(), claim, "sha256")


class ExportTokens:
    """The tokens of what is exported now."""

    def __init__(self, entropy: Entropy) -> None:
        self._tokens: dict[str, str] = {}
        self._decoy = new_token(entropy)
        """Stands for that of an unknown export, which then takes as long to refuse as a wrong token."""

    def open(self, export_id: str, token: str) -> None:
        """Raises `KvTransferRefused` for a token that could be guessed, and for one export too many."""
        if len(token) < 2 * TOKEN_BYTES:
            raise KvTransferRefused(f"{export_id!r} is exported without a token of {TOKEN_BYTES} random bytes in hex")
        if export_id not in self._tokens and len(self._tokens) >= MAX_EXPORTS:
            raise KvTransferRefused(f"{MAX_EXPORTS} transfers are exported already, as many as may be")
        self._tokens[export_id] = token

    def close(self, export_id: str) -> None:
        """Its token opens nothing from now on. Unknown ids are ignored."""
        self._tokens.pop(export_id, None)

    def proof(self, challenge: Challenge, purpose: Purpose, export_id: str) -> bytes:
        """That this side has the token."""
        return challenge.proof(self._tokens[export_id], purpose, export_id)

    def is_shown(self, challenge: Challenge, purpose: Purpose, export_id: str, proof: bytes, transfer: int = 0) -> bool:
        """Whether it is what only who has the token of an open export can make."""
        token = self._tokens.get(export_id)
        expected = challenge.proof(token or self._decoy, purpose, export_id, transfer)
        return hmac.compare_digest(expected, proof) and token is not None
