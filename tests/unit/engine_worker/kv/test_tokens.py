"""What who reaches the port of a transfer agent gets without the token of an export, or with one that is used up."""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.kv import tokens
from engine_worker.kv.agent import KvTransferAgent
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.fabric import KvEndpoint
from engine_worker.kv.layout import KvLayout
from engine_worker.kv.memory import RegionMemory
from engine_worker.kv.messages import (
    CONTROL_BYTES,
    PROTOCOL_VERSION,
    Control,
    Hello,
    Introduction,
    Pull,
    Rejection,
    control_tag,
    decode,
    encode,
)
from engine_worker.kv.plan import Packing
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.tokens import Challenge, ExportTokens, Purpose, new_token
from fault_simulation.kv_fabric import SimulatedKvFabric
from fault_simulation.loop import VirtualLoop
from fault_simulation.network import Network
from fault_simulation.node import Node
from fault_simulation.runtime import WallClock, simulated_runtime
from mesh.errors import KvTransferRefused, ProtocolViolation
from mesh.runtime import SystemEntropy

BLOCKS = 8
TOKEN, OTHER = "a" * 32, "b" * 32
GREETING = struct.Struct("<4sQ")
MESSAGE = Packing(65536, 65536, 65536)
ALL = range(BLOCKS)


class Scene:
    """A source that exports `mine` and `theirs`, a puller, and the network for a rogue of its own."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.network = Network(self.loop, "7")
        self.nodes = {name: Node(name) for name in ("source", "puller", "rogue")}
        self.regions = np.random.default_rng(1).integers(1, 256, (BLOCKS, 64), np.uint8)
        self.pulled = np.zeros((BLOCKS, 64), np.uint8)
        self.source = self._agent("source", self.regions)
        self.puller = self._agent("puller", self.pulled)
        self.address = PeerAddress("", 0)

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            port = await self.loop.spawn(self.nodes["source"], self.source.start(), "source")
            self.address = PeerAddress("source", port, (), TOKEN)
            self.source.export("mine", ALL, TOKEN)
            self.source.export("theirs", ALL, OTHER)
            await self.loop.spawn(self.nodes["puller"], self.puller.start(), "puller")
            await scenario()
            await self.loop.spawn(self.nodes["puller"], self.puller.stop(), "puller ends")
            await self.loop.spawn(self.nodes["source"], self.source.stop(), "source ends")

        self.loop.run(main())
        assert not self.loop.findings

    async def pull(self, peer: PeerAddress, transfer_id: str = "mine") -> None:
        """As the puller, from the source."""
        await self.loop.spawn(self.nodes["puller"], self.puller.pull(peer, transfer_id, ALL, ALL, 5.0), "pull")

    async def rejected(self) -> int:
        """How often the source has said no; it counts who was told so once he has hung up."""
        await asyncio.sleep(1.0)
        return (await self.source.status()).rejected_total

    def fabric(self, name: str) -> SimulatedKvFabric:
        return SimulatedKvFabric(self.network, self.nodes[name], name)

    def _agent(self, name: str, region: np.ndarray) -> KvTransferAgent:
        runtime = simulated_runtime(self.network, self.nodes[name], WallClock(), name)
        memory = RegionMemory([region], model="m", dtype="uint8", block_tokens=4)
        return KvTransferAgent(
            memory,
            KvTransferSettings(),
            runtime.clock,
            runtime.entropy,
            agent_id=name,
            make_fabric=lambda _: self.fabric(name),
        )


class Rogue:
    """Speaks as an agent does, byte by byte, and notes all that it is told."""

    def __init__(self, endpoint: KvEndpoint, key: int = 99) -> None:
        self._endpoint = endpoint
        self._key = key
        self._peer_key = 0
        self.challenge = Challenge(b"", b"")
        self.heard: list[Control] = []

    @classmethod
    async def connected(cls, scene: Scene) -> "Rogue":
        rogue = cls(await scene.fabric("rogue").connect("source", scene.address.port))
        await rogue.greet(is_caller=True)
        return rogue

    async def greet(self, *, is_caller: bool) -> None:
        own = b"n" * tokens.NONCE_BYTES
        self._endpoint.send_stream(np.frombuffer(GREETING.pack(b"PKV2", self._key) + own, np.uint8))
        answer = np.empty(GREETING.size + tokens.NONCE_BYTES, np.uint8)
        await self._endpoint.receive_stream(answer)
        self._peer_key = GREETING.unpack(answer.tobytes()[: GREETING.size])[1]
        theirs = answer.tobytes()[GREETING.size :]
        self.challenge = Challenge(own, theirs) if is_caller else Challenge(theirs, own)

    def say(self, message: Control) -> None:
        self._endpoint.send(np.frombuffer(encode(message), np.uint8), control_tag(self._peer_key))

    async def hear(self) -> Control | None:
        """The next message; None once the connection has ended."""
        frame = np.empty(CONTROL_BYTES, np.uint8)
        try:
            await self._endpoint.receive(frame, control_tag(self._key))
        except ConnectionError:
            return None
        self.heard.append(decode(frame.tobytes()))
        return self.heard[-1]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_with_the_token_blocks_come(scene: Scene) -> None:
    async def scenario() -> None:
        await scene.pull(scene.address)
        assert (scene.pulled == scene.regions).all()
        assert await scene.rejected() == 0

    scene.run(scenario)


@pytest.mark.parametrize(
    ("token", "transfer_id"), [("", "mine"), (OTHER, "mine"), (TOKEN, "theirs"), (TOKEN, "unknown"), ("", "")]
)
def test_without_it_nothing_does(scene: Scene, token: str, transfer_id: str) -> None:
    async def scenario() -> None:
        with pytest.raises(KvTransferRefused, match="no token of a transfer") as caught:
            await scene.pull(replace(scene.address, token=token), transfer_id)
        assert TOKEN not in str(caught.value)
        assert OTHER not in str(caught.value)
        assert not scene.pulled.any()
        assert await scene.rejected() == 1
        await scene.pull(scene.address)  # nothing of it is left in the way

    scene.run(scenario)


def test_a_token_ends_with_its_export(scene: Scene) -> None:
    async def scenario() -> None:
        await scene.source.withdraw("mine")
        with pytest.raises(KvTransferRefused):
            await scene.pull(scene.address)
        scene.source.export("mine", ALL, "c" * 32)
        with pytest.raises(KvTransferRefused):
            await scene.pull(scene.address)
        assert not scene.pulled.any()
        assert await scene.rejected() == 2

    scene.run(scenario)


def test_a_connection_that_was_opened_by_one_token_gives_nothing_of_another_export(scene: Scene) -> None:
    async def scenario() -> None:
        await scene.pull(scene.address)
        scene.pulled[:] = 0
        with pytest.raises(KvTransferRefused, match="no token of 'theirs'"):
            await scene.pull(scene.address, "theirs")
        assert not scene.pulled.any()
        await scene.pull(replace(scene.address, token=OTHER), "theirs")
        assert (scene.pulled == scene.regions).all()

    scene.run(scenario)


def test_a_wrong_token_keeps_nobody_else_from_connecting(scene: Scene) -> None:
    async def scenario() -> None:
        wrong, right = await asyncio.gather(
            scene.pull(replace(scene.address, token=OTHER)), scene.pull(scene.address), return_exceptions=True
        )
        assert isinstance(wrong, KvTransferRefused)
        assert right is None

    scene.run(scenario)


def test_a_stranger_hears_no_more_than_no(scene: Scene) -> None:
    async def scenario() -> None:
        rogue = await Rogue.connected(scene)
        rogue.say(Introduction(PROTOCOL_VERSION, "mine", rogue.challenge.proof("guess", Purpose.CONNECT, "mine")))
        assert isinstance(await rogue.hear(), Rejection)
        rogue.say(Pull(1, "mine", ((0, BLOCKS),), 1, 1000, MESSAGE, False))
        assert await rogue.hear() is None, "and then it is cut off"
        assert len(rogue.heard) == 1
        assert await scene.rejected() == 1

    scene.run(scenario)


@pytest.mark.parametrize(
    "first",
    [
        Pull(1, "mine", ((0, BLOCKS),), 1, 1000, MESSAGE, False),
        Hello(PROTOCOL_VERSION, "rogue", KvLayout("m", "uint8", 4, (64,))),
    ],
)
def test_who_does_not_introduce_itself_hears_nothing_at_all(scene: Scene, first: Control) -> None:
    async def scenario() -> None:
        rogue = await Rogue.connected(scene)
        rogue.say(first)
        assert await rogue.hear() is None
        assert not rogue.heard
        assert await scene.rejected() == 1

    scene.run(scenario)


def test_what_a_puller_has_shown_opens_nothing_again(scene: Scene) -> None:
    async def scenario() -> None:
        honest = await Rogue.connected(scene)
        shown = Introduction(PROTOCOL_VERSION, "mine", honest.challenge.proof(TOKEN, Purpose.CONNECT, "mine"))
        honest.say(shown)
        assert isinstance(await honest.hear(), Hello)
        thief = await Rogue.connected(scene)
        thief.say(shown)
        assert isinstance(await thief.hear(), Rejection)
        assert await thief.hear() is None

    scene.run(scenario)


def test_a_puller_tells_nothing_to_who_only_says_that_it_is_the_source(scene: Scene) -> None:
    async def scenario() -> None:
        met: asyncio.Queue[KvEndpoint] = asyncio.Queue()
        listener = scene.fabric("rogue").listen(0, met.put_nowait)
        pulling = asyncio.ensure_future(scene.pull(PeerAddress("rogue", listener.port, (), TOKEN)))
        rogue = Rogue(await met.get())
        await rogue.greet(is_caller=False)
        assert isinstance(await rogue.hear(), Introduction)
        rogue.say(Hello(PROTOCOL_VERSION, "source", KvLayout("m", "uint8", 4, (64,)), b"guess"))
        with pytest.raises(ProtocolViolation, match="it is not its source"):
            await pulling
        assert await rogue.hear() is None
        assert len(rogue.heard) == 1

    scene.run(scenario)


def test_exports_are_bounded_and_their_tokens_are_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_EXPORTS", 2)
    held = ExportTokens(SystemEntropy())
    for export_id in ("a", "b", "b"):
        held.open(export_id, new_token(SystemEntropy()))
    with pytest.raises(KvTransferRefused, match="as many as may be"):
        held.open("c", TOKEN)
    held.close("a")
    held.open("c", TOKEN)
    with pytest.raises(KvTransferRefused, match="without a token"):
        held.open("c", "short")


def test_a_token_is_in_no_text_but_the_one_for_other_processes() -> None:
    address = PeerAddress("10.0.0.7", 7300, (7302,), TOKEN)
    assert TOKEN not in f"{address} {address!r} {address.ranks}"
    assert PeerAddress.parse(address.with_token) == address
    assert PeerAddress.parse(address.with_token).ranks[1].token == TOKEN
    with pytest.raises(KvTransferRefused) as caught:
        PeerAddress.parse(f"{TOKEN}@nowhere")
    assert TOKEN not in str(caught.value)


shown = st.tuples(
    st.binary(max_size=3), st.binary(max_size=3), st.sampled_from(Purpose), st.sampled_from("ab"), st.integers(0, 2)
)


@given(shown, shown)
def test_a_proof_is_good_for_nothing_else(
    made: tuple[bytes, bytes, Purpose, str, int], asked: tuple[bytes, bytes, Purpose, str, int]
) -> None:
    held = ExportTokens(SystemEntropy())
    for export_id in "ab":
        held.open(export_id, TOKEN)
    caller, callee, purpose, export_id, transfer = made
    proof = Challenge(caller, callee).proof(TOKEN, purpose, export_id, transfer)
    caller, callee, purpose, export_id, transfer = asked
    assert held.is_shown(Challenge(caller, callee), purpose, export_id, proof, transfer) == (made == asked)
