"""A command whose mesh cannot be reached says so instead of waiting for it as a role would."""

import asyncio

import click
import msgspec
import pytest

from mesh.errors import PeerUnavailable, StoreUnavailable
from mesh.leadership import LEADERS_PREFIX
from mesh.leadership_state import LeaderRecord
from mesh.membership import Member
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, SystemClock, SystemEntropy
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from mesh.store.interface import DEFAULT_TIMEOUT_S, Listing
from services.cli import connection
from services.cli.connection import answering_member, mesh_directory, mesh_name

pytestmark = pytest.mark.live


class _SilentAfter(EmbeddedStore):
    """Lists so often, then does not answer any more."""

    def __init__(self, answers: int) -> None:
        super().__init__(StoreHost(SystemClock(), SystemEntropy()))
        self._answers = answers

    async def range(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Listing:
        if self._answers == 0:
            raise StoreUnavailable("no state store at there:1; is it running?")
        self._answers -= 1
        return await super().range(prefix, timeout_s=timeout_s)


async def _members(store: EmbeddedStore) -> int:
    async with asyncio.timeout(20.0), mesh_directory(store) as directory:
        return len(directory.members("worker"))


async def test_a_store_that_answers_lists_the_members() -> None:
    assert await _members(_SilentAfter(answers=2)) == 0


async def test_an_unreachable_store_is_an_error_at_once() -> None:
    with pytest.raises(StoreUnavailable, match="is it running"):
        await _members(_SilentAfter(answers=0))


async def test_a_store_that_goes_away_meanwhile_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "DIRECTORY_DEADLINE_S", 0.01)
    with pytest.raises(StoreUnavailable, match="did not list the members"):
        await _members(_SilentAfter(answers=1))


@pytest.mark.parametrize("name", ["a/b", "..", "", "-x", "a b", "x" * 65])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(click.BadParameter, match="no name of a mesh"):
        mesh_name(click.Context(click.Command("c")), click.Option(["--mesh"]), name)


async def test_a_command_takes_the_leader_or_another_member_that_answers() -> None:
    host = StoreHost(SystemClock(), SystemEntropy())
    store = EmbeddedStore(host)
    server = RpcServer(GrpcTransport())
    await server.start()
    await server.set_serving(True)
    for member_id, address in (("s-0", server.address), ("s-1", server.address), ("s-2", "127.0.0.1:1")):
        member = Member("scheduler", member_id, "1", address, "")
        host.put(member.key, msgspec.json.encode(member))
    host.put(LEADERS_PREFIX + "alive", msgspec.json.encode(LeaderRecord("alive", "s-1", "1", epoch=5)))
    host.put(LEADERS_PREFIX + "dead", msgspec.json.encode(LeaderRecord("dead", "s-2", "1", epoch=5)))
    try:
        async with mesh_directory(store) as directory:
            chosen = {
                duty: (await answering_member(directory, store, "scheduler", duty)).member_id
                for duty in ("alive", "dead", "nobody's")
            }
            with pytest.raises(PeerUnavailable, match="no planner has joined"):
                await answering_member(directory, store, "planner")
    finally:
        await server.stop(0)
        await store.close()
    assert chosen == {"alive": "s-1", "dead": "s-0", "nobody's": "s-0"}
