"""Blocks of an instance of several engine cores: one address and one space of ids outside, each core's own within."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.kv.addresses import join, join_cores, reachable_address
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.cores import MOST_CORES, at_core, ids_of_core
from mesh.errors import KvTransferRefused

PORTS = st.lists(st.lists(st.integers(1, 65535), min_size=1, max_size=4), min_size=1, max_size=5)
HOSTS = st.sampled_from(["127.0.0.1", "fd00::7", "gpu-1"])


@given(PORTS, HOSTS, st.data())
def test_a_block_is_found_in_its_core(ports: list[list[int]], host: str, data: st.DataObject) -> None:
    addresses = [join(host, *each) for each in ports]
    core = data.draw(st.integers(0, len(ports) - 1))
    block_ids = tuple(data.draw(st.lists(st.integers(0, (1 << 24) - 1), min_size=1)))
    told = ids_of_core(core, block_ids)
    assert all(block_id < 1 << 32 for block_id in told)
    assert at_core(join_cores(addresses), told, "t") == (f"t@{addresses[core]}", block_ids)
    assert PeerAddress.parse(addresses[core]).ranks[0].port == ports[core][0]


def test_an_instance_of_one_core_says_what_it_always_said() -> None:
    assert ids_of_core(0, (3, 5)) == (3, 5)
    assert at_core("127.0.0.1:5001,5002", (3, 5), "t") == ("t@127.0.0.1:5001,5002", (3, 5))
    assert at_core("127.0.0.1:5001", (), "") == ("@127.0.0.1:5001", ())


@pytest.mark.parametrize(
    ("address", "block_ids"),
    [
        ("127.0.0.1:1/2", (*ids_of_core(0, (1,)), *ids_of_core(1, (1,)))),
        ("127.0.0.1:1/2", ids_of_core(2, (1,))),
        ("127.0.0.1:1", ids_of_core(MOST_CORES - 1, (1,))),
        ("127.0.0.1:1/", (1,)),
        ("nowhere", (1,)),
    ],
)
def test_blocks_of_no_core_of_the_peer_are_refused(address: str, block_ids: tuple[int, ...]) -> None:
    with pytest.raises(KvTransferRefused):
        at_core(address, block_ids, "t")


def test_a_peer_that_knows_no_cores_refuses_the_address() -> None:
    with pytest.raises(KvTransferRefused):
        PeerAddress.parse("127.0.0.1:5001/5002")


def test_all_cores_are_reached_by_their_worker_s_host() -> None:
    assert reachable_address("0.0.0.0:1,2/3,4", "127.0.0.1", "gpu-1:9000") == "gpu-1:1,2/3,4"
    assert reachable_address("10.0.0.7:1/3", "127.0.0.1", "gpu-1:9000") == "10.0.0.7:1/3"
