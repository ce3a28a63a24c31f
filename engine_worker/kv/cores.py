"""Block ids of an instance that has several engine cores (data parallelism), each with a KV space of its own.

To its peers such an instance has one address and one space of block ids: `host:5001,5002/5003,5004` are the ports of
the agents of two cores of two ranks each, and the upper bits of a block id say in which core the block is. So what lies
between two engines (offers, rounds, holds) needs to know of no cores. Pure.
"""

from typing import Final

from engine_worker.kv.addresses import split_cores
from mesh.errors import KvTransferRefused

MOST_CORES: Final = 256
_CORE: Final = 1 << 24
"""More blocks than a core has; with `MOST_CORES` of them a block id has 32 bits."""


def ids_of_core(core: int, block_ids: tuple[int, ...]) -> tuple[int, ...]:
    """As peers are told them."""
    assert 0 <= core < MOST_CORES, core
    assert all(0 <= block_id < _CORE for block_id in block_ids), block_ids
    return tuple(core * _CORE + block_id for block_id in block_ids)


def at_core(address: str, block_ids: tuple[int, ...], token: str) -> tuple[str, tuple[int, ...]]:
    """The address of the core that has these blocks, with the token of their export as `PeerAddress.parse` reads it,
    and their ids there. Raises `KvTransferRefused` for blocks of
    several cores, or of one that the address does not have."""
    try:
        addresses = split_cores(address)
    except ValueError as error:
        raise KvTransferRefused(f"{error} of a KV transfer agent") from error
    cores = sorted({block_id // _CORE for block_id in block_ids} or {0})
    if len(cores) > 1 or cores[0] >= len(addresses):
        raise KvTransferRefused(f"blocks of the engine cores {cores} were named together, and {address} has others")
    return f"{token}@{addresses[cores[0]]}", tuple(block_id % _CORE for block_id in block_ids)
