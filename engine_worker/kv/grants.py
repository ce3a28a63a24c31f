"""Which blocks another process may touch, and under which id."""

from collections.abc import Iterable, Sequence

from mesh.errors import KvTransferRefused


class BlockGrants:
    """Blocks by the id of the transfer that they were opened for."""

    def __init__(self, verb: str) -> None:
        """`verb` for messages: "exported" or "reserved"."""
        self._verb = verb
        self._blocks: dict[str, set[int]] = {}

    @property
    def ids(self) -> tuple[str, ...]:
        """All transfers that blocks are open for."""
        return tuple(self._blocks)

    @property
    def blocks(self) -> int:
        """Open blocks, counted once per transfer."""
        return sum(map(len, self._blocks.values()))

    def open(self, transfer_id: str, block_ids: Iterable[int]) -> None:
        """Open these blocks, besides those that are open already."""
        self._blocks.setdefault(transfer_id, set()).update(block_ids)

    def close(self, transfer_id: str) -> None:
        """Close all blocks of a transfer; unknown ids are ignored."""
        self._blocks.pop(transfer_id, None)

    def refusal(self, transfer_id: str, block_ids: Sequence[int]) -> str:
        """Why a transfer may not touch these blocks; empty if it may."""
        opened = self._blocks.get(transfer_id)
        if opened is None:
            return f"nothing is {self._verb} under {transfer_id!r}"
        closed = sorted(set(block_ids) - opened)
        if closed:
            return f"blocks {closed[:5]} ({len(closed)} in all) are not {self._verb} under {transfer_id!r}"
        return ""

    def check(self, transfer_id: str, block_ids: Sequence[int]) -> None:
        """Raises `KvTransferRefused` where `refusal` has a reason."""
        reason = self.refusal(transfer_id, block_ids)
        if reason:
            raise KvTransferRefused(reason)
