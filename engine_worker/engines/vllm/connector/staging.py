"""Which staging blocks a migration holds. Pure."""

from mesh.errors import KvTransferRefused

BLOCKS_PER_MIGRATION = 4
"""The last blocks of a request, which are not worth a carrier: pulled into staging memory, copied when it is
activated. One more than a round of the migration protocol leaves to the final message, and the partly filled one."""
STAGING_BLOCKS = 8 * BLOCKS_PER_MIGRATION


def staging_ids(engine_blocks: int, staging_blocks: int) -> range:
    """Ids of the staging blocks behind the engine's. One id between the two belongs to nobody, so that no run of
    consecutive ids spans both."""
    return range(engine_blocks + 1, engine_blocks + 1 + staging_blocks)


class StagingTable:
    """Changed on one thread only; `of` may be called from any."""

    def __init__(self, block_ids: range) -> None:
        self._free = list(block_ids)
        self._held: dict[str, list[int]] = {}
        self._filled: dict[str, tuple[int, ...]] = {}

    @property
    def holders(self) -> tuple[str, ...]:
        """Migrations that hold blocks."""
        return tuple(self._held)

    def of(self, migration_id: str) -> tuple[int, ...]:
        """The blocks that are filled, in order."""
        return self._filled.get(migration_id, ())

    def take(self, migration_id: str, keep: int, count: int) -> tuple[int, ...]:
        """Blocks for `count` more, behind the first `keep`. Raises `KvTransferRefused` if there are not enough."""
        held = self._held.setdefault(migration_id, [])
        self._free.extend(held[keep:])
        del held[keep:]
        self._filled[migration_id] = tuple(held)
        if count > len(self._free):
            raise KvTransferRefused(f"{len(self._free)} staging blocks are free and {count} are needed")
        taken = [self._free.pop() for _ in range(count)]
        held.extend(taken)
        return tuple(taken)

    def filled(self, migration_id: str) -> None:
        """The blocks that the migration took hold their content now."""
        self._filled[migration_id] = tuple(self._held[migration_id])

    def free(self, migration_id: str) -> None:
        """Give all blocks of a migration back; unknown ids are ignored."""
        self._filled.pop(migration_id, None)
        self._free.extend(self._held.pop(migration_id, ()))
