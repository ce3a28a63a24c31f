"""Where an agent listens, and where it says that peers reach it."""

from pathlib import Path

import pytest

from engine_worker.kv.addresses import join, loopback_obstacle, numeric_host, reachable_address, split, ucx_network
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.devices import device_addresses, rdma_devices
from mesh.errors import ConfigurationError, KvTransferRefused

MACHINE = {"lo": ("127.0.0.1", "::1"), "eth0": ("10.0.0.7", "fd00::7"), "eth1": ("10.1.0.7",)}
CARDS = ("mlx5_0:1", "mlx5_1:1")


def test_a_local_mesh_keeps_to_the_loopback() -> None:
    wanted = {"NET_DEVICES": "lo", "TCP_AF_PRIO": "inet,inet6"}
    assert ucx_network("127.0.0.1", 0, MACHINE, CARDS, {}) == wanted
    assert ucx_network("::1", 0, MACHINE, CARDS, {})["TCP_AF_PRIO"] == "inet6,inet"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.0.0.7", "10.9.9.9", "0.0.0.0", "::"])
def test_other_addresses_than_those_of_the_loopback_alone_are_no_obstacle(host: str) -> None:
    assert loopback_obstacle(host, MACHINE) == ""


def test_an_address_that_only_the_kernel_takes_for_the_loopbacks_is_warned_of() -> None:
    assert "use 127.0.0.1 (--kv-host)" in loopback_obstacle("127.0.0.2", MACHINE)
    assert loopback_obstacle("127.0.0.2", {"lo": ("127.0.0.1", "127.0.0.2")}) == ""


def test_an_address_is_that_of_its_device_and_rdma_stays_on() -> None:
    wanted = {"TCP_PORT_RANGE": "7301-7301", "TCP_AF_PRIO": "inet,inet6", "NET_DEVICES": "eth1,mlx5_0:1,mlx5_1:1"}
    assert ucx_network("10.1.0.7", 7300, MACHINE, CARDS, {}) == wanted
    assert ucx_network("fd00::7", 0, MACHINE, (), {}) == {"TCP_AF_PRIO": "inet6,inet", "NET_DEVICES": "eth0"}


def test_all_addresses_leave_the_devices_to_ucx() -> None:
    assert ucx_network("0.0.0.0", 7300, MACHINE, CARDS, {}) == {"TCP_PORT_RANGE": "7301-7301"}
    assert ucx_network("::", 0, MACHINE, CARDS, {}) == {}


def test_what_the_operator_sets_wins() -> None:
    environ = {"UCX_NET_DEVICES": "eth0", "UCX_TCP_PORT_RANGE": "9000-9100"}
    assert ucx_network("10.1.0.7", 7300, MACHINE, CARDS, environ) == {"TCP_AF_PRIO": "inet,inet6"}


def test_an_address_of_another_machine_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"10\.9\.9\.9.*10\.1\.0\.7 \(eth1\)"):
        ucx_network("10.9.9.9", 0, MACHINE, (), {})


@pytest.mark.parametrize(
    ("kv_address", "bind_host", "worker", "reached"),
    [
        ("0.0.0.0:7300", "0.0.0.0", "10.0.0.7:7200", "10.0.0.7:7300"),
        ("[::]:7300", "[::]", "[fd00::7]:7200", "[fd00::7]:7300"),
        ("127.0.0.1:7300", "127.0.0.1", "127.0.0.1:7200", "127.0.0.1:7300"),
        ("10.0.0.7:7300", "10.0.0.7", "worker-1.example:7200", "worker-1.example:7300"),
        ("10.1.0.7:7300", "0.0.0.0", "10.0.0.7:7200", "10.1.0.7:7300"),
    ],
)
def test_peers_come_where_the_agent_listens(kv_address: str, bind_host: str, worker: str, reached: str) -> None:
    assert reachable_address(kv_address, bind_host, worker) == reached


def test_addresses_are_read_as_they_are_written() -> None:
    assert split(join("fd00::7", 7300)) == ("fd00::7", 7300)
    assert split(join("[fd00::7]", 7300)) == ("fd00::7", 7300)
    assert str(PeerAddress.parse("[fd00::7]:7300")) == "[fd00::7]:7300"
    with pytest.raises(KvTransferRefused, match="is no host:port"):
        PeerAddress.parse("10.0.0.7")


def test_an_instance_of_several_ranks_has_a_port_for_each() -> None:
    address = reachable_address("0.0.0.0:7300,7302", "0.0.0.0", "[fd00::7]:7200")
    assert address == "[fd00::7]:7300,7302" == str(PeerAddress.parse(address))
    assert PeerAddress.parse(address).ranks == (PeerAddress("fd00::7", 7300), PeerAddress("fd00::7", 7302))
    for wrong in ("a:1,", "a:,1", "a:1,b", "a:"):
        with pytest.raises(KvTransferRefused, match="is no host:port"):
            PeerAddress.parse(wrong)
    with pytest.raises(ValueError, match="is no host:port"):
        split(address)


def test_names_become_addresses_of_ipv4_first() -> None:
    assert numeric_host("localhost") == "127.0.0.1"
    assert numeric_host("[::1]") == "::1"


def test_this_machine_has_a_loopback() -> None:
    assert "127.0.0.1" in device_addresses()["lo"]


def test_ports_of_rdma_cards_have_ucx_names(tmp_path: Path) -> None:
    for card in ("mlx5_1", "mlx5_0"):
        (tmp_path / card / "ports" / "1").mkdir(parents=True)
    assert rdma_devices(tmp_path) == CARDS
    assert rdma_devices(tmp_path / "none") == ()
