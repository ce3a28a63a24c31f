"""A simulated network: connections as TCP has them, between nodes, over links that are slow, cut or both.

What is sent arrives in order, once, after a latency that is drawn for each frame. While a direction is cut its frames
are kept by the sender's kernel and arrive after the cut is healed, unless the connection was given up meanwhile: by the
keep-alive of whoever uses it, as nobody else will. The kernels of all machines live as long as the simulation: a
process that is killed has its connections reset, and whoever sends to one that is gone is told so if the way is open.
"""

import random
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import xxhash

from fault_simulation.loop import VirtualLoop
from fault_simulation.node import Handle, Node, NodeState

SHORTEST_LATENCY_S: Final = 0.0001
LONGEST_LATENCY_S: Final = 0.0015
BANDWIDTH_BYTES_PER_S: Final = 1.25e9
RETRANSMISSION_S: Final = 3.0
"""Longest time between the end of a cut and the kernel's next try: its pauses double while nothing is answered."""
FIRST_PORT: Final = 20_000

_ARRIVAL: Final = struct.Struct("<dI")


class Receiver(Protocol):
    """Who uses one end of a connection. Called in the node of that end."""

    def received(self, frame: Any) -> None:
        """What the other end sent."""

    def lost(self, reason: str) -> None:
        """The connection ended, by the other end or by its node's death. Called once, and not after `close`."""


class Endpoint:
    """One end of a connection."""

    __slots__ = ("_held", "_last_s", "_network", "is_open", "node", "peer", "receiver")

    def __init__(self, network: "Network", node: Node) -> None:
        self._network = network
        self.node = node
        self.peer: Endpoint = self
        self.receiver: Receiver | None = None
        self.is_open = True
        """This end has neither closed it nor heard that it ended."""
        self._held: deque[tuple[Any, int]] = deque()
        """Sent from here while the way was cut."""
        self._last_s = 0.0
        """When the last frame sent from here arrives."""

    def send(self, frame: Any, size_bytes: int = 64) -> None:
        """Send a frame; nothing happens on a connection that has ended."""
        if self.is_open:
            self._transmit(frame, size_bytes)

    def close(self) -> None:
        """End it. What was sent before arrives before the other end hears of it."""
        if self.is_open:
            self._transmit(_End("the peer closed the connection"), 64)
            self.is_open = False
            self._network.forget(self)

    def reset(self, reason: str) -> None:
        """End it at once, as the kernel does for a process that died: not sent again if the way is cut."""
        if not self.is_open:
            return
        self.is_open = False
        self._network.forget(self)
        self._held.clear()
        if self._network.is_open(self.node, self.peer.node):
            self._deliver(_End(reason), 64)

    def flush(self) -> None:
        """The way is open again."""
        held, self._held = self._held, deque()
        for frame, size_bytes in held:
            self._transmit(frame, size_bytes)

    def delay(self, delay_s: float) -> None:
        """Nothing more arrives before that."""
        self._last_s = max(self._last_s, self._network.loop.now_s + delay_s)

    @property
    def has_held(self) -> bool:
        """Whether frames wait for the way to open."""
        return bool(self._held)

    def _transmit(self, frame: Any, size_bytes: int) -> None:
        if self._held or not self._network.is_open(self.node, self.peer.node):
            self._held.append((frame, size_bytes))
        else:
            self._deliver(frame, size_bytes)

    def _deliver(self, frame: Any, size_bytes: int) -> None:
        network, peer = self._network, self.peer
        at_s = network.loop.now_s + network.latency_s(self.node, peer.node) + size_bytes / BANDWIDTH_BYTES_PER_S
        if at_s <= self._last_s:
            at_s = self._last_s + 1e-9
        self._last_s = at_s
        if peer.node.state is NodeState.DEAD or not peer.is_open:
            if not isinstance(frame, _End):
                network.loop.call_in_at(network.loop.world, at_s, peer._nobody_there)
            return
        network.loop.call_in_at(peer.node, at_s, peer._arrived, frame)

    def _arrived(self, frame: Any) -> None:
        if not self.is_open or self.receiver is None:
            self._nobody_there()
            return
        self._network.witness(self, frame)
        if isinstance(frame, _End):
            self.is_open = False
            self._network.forget(self)
            self.receiver.lost(frame.reason)
        else:
            self.receiver.received(frame)

    def _nobody_there(self) -> None:
        """The kernel answers for a process that has gone."""
        if self.peer.is_open and self._network.is_open(self.node, self.peer.node):
            self._deliver(_End("the connection was reset by the peer"), 64)


class _End:
    """The last frame of a connection."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Listener:
    """A port that is open."""

    def __init__(self, network: "Network", node: Node, address: tuple[str, int]) -> None:
        self.node = node
        self.address = address
        self.accept: Callable[[Endpoint], None] | None = None
        """Called in the listener's node for each new connection; it sets the receiver. Before that is set, and once
        the port is closed, connections are refused."""
        self._network = network

    @property
    def is_open(self) -> bool:
        """Whether connections are taken."""
        return self.accept is not None and self.node.state is not NodeState.DEAD

    def close(self) -> None:
        """Refuse connections from now on; those that stand go on."""
        self.accept = None
        self._network.unlisten(self)


class Dialling:
    """A connection that is being made. `cancel` gives it up."""

    def __init__(
        self,
        network: "Network",
        node: Node,
        address: tuple[str, int],
        on_done: Callable[[Endpoint | None, str], None],
    ) -> None:
        self.node = node
        self.address = address
        self._network = network
        self._on_done: Callable[[Endpoint | None, str], None] | None = on_done
        self._timer: Handle | None = None

    def cancel(self) -> None:
        """Nothing more is heard of it."""
        self._on_done = None
        self._network.dialling.pop(self, None)

    def try_now(self) -> None:
        """Send the SYN."""
        network = self._network
        if self._on_done is None:
            return
        host = network.hosts.get(self.address[0])
        if host is None:
            self._later("no route to host")
            return
        if not network.is_way_open(self.node.name, host) or not network.is_way_open(host, self.node.name):
            network.dialling[self] = None  # dropped on the way; sent again when the way is open
            return
        network.dialling.pop(self, None)
        listener = network.listeners.get(self.address)
        if listener is None or not listener.is_open:
            self._later("connection refused")
            return
        ours, theirs = network.make_connection(self.node, listener.node)
        accepted_s = network.loop.now_s + network.latency_s(self.node, listener.node)
        done_s = accepted_s + network.latency_s(listener.node, self.node)
        theirs.delay(done_s - network.loop.now_s)  # nothing comes back before the dialler knows its connection
        network.loop.call_in_at(listener.node, accepted_s, _accept, listener, theirs)
        network.loop.call_in_at(self.node, done_s, self._done, ours, "")

    def _later(self, failure: str) -> None:
        self._network.loop.call_in(self.node, 2 * LONGEST_LATENCY_S, self._done, None, failure)

    def _done(self, endpoint: Endpoint | None, failure: str) -> None:
        if self._on_done is None:
            if endpoint is not None:
                endpoint.close()
            return
        on_done, self._on_done = self._on_done, None
        on_done(endpoint, failure)


def _accept(listener: Listener, endpoint: Endpoint) -> None:
    if listener.accept is None:
        endpoint.reset("connection refused")
    else:
        listener.accept(endpoint)


class Network:
    """All links, ports and connections. Faults go by the names of nodes, which outlive restarts."""

    def __init__(self, loop: VirtualLoop, seed: str) -> None:
        """Each link draws for itself, so that what happens on one does not disturb the others."""
        self.loop = loop
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.hosts: dict[str, str] = {}
        """Names of nodes by the hosts that they are at."""
        self.dialling: dict[Dialling, None] = {}
        self.on_frame: Callable[[Node, Node, Any, Endpoint], None] | None = None
        """For telling a story: sees every frame as it is delivered."""
        self._digest = xxhash.xxh3_64()
        self._seed = seed
        self._links: dict[tuple[str, str], random.Random] = {}
        self._cuts: dict[tuple[str, str], float] = {}
        """Cut directions, and since when."""
        self._slow_s: dict[tuple[str, str], float] = {}
        self._endpoints: dict[Endpoint, None] = {}
        self._next_port = FIRST_PORT

    # -- for nodes

    def listen(self, node: Node, host: str, port: int) -> Listener:
        """A port of a node; 0 takes a free one. Raises OSError if it is taken. Set its `accept`."""
        if port == 0:
            self._next_port += 1
            port = self._next_port
        address = (host, port)
        taken = self.listeners.get(address)
        if taken is not None and taken.node.state is not NodeState.DEAD:
            raise OSError(98, f"{host}:{port} is in use by {taken.node.name}")
        self.hosts[host] = node.name
        listener = self.listeners[address] = Listener(self, node, address)
        return listener

    def unlisten(self, listener: Listener) -> None:
        """Forget a port."""
        if self.listeners.get(listener.address) is listener:
            del self.listeners[listener.address]

    def dial(self, node: Node, host: str, port: int, on_done: Callable[[Endpoint | None, str], None]) -> Dialling:
        """Connect from `node`. `on_done` gets the endpoint, or None and why not; never called while SYNs are lost."""
        dialling = Dialling(self, node, (host, port), on_done)
        dialling.try_now()
        return dialling

    def make_connection(self, dialler: Node, listener: Node) -> tuple[Endpoint, Endpoint]:
        """Both ends."""
        ours, theirs = Endpoint(self, dialler), Endpoint(self, listener)
        ours.peer, theirs.peer = theirs, ours
        self._endpoints[ours] = self._endpoints[theirs] = None
        return ours, theirs

    def forget(self, endpoint: Endpoint) -> None:
        """An end that is closed needs no flushing, unless its last frames still wait."""
        if not endpoint.has_held:
            self._endpoints.pop(endpoint, None)

    def latency_s(self, sender: Node, receiver: Node) -> float:
        """Drawn for one frame."""
        link = (sender.name, receiver.name)
        rng = self._links.get(link) or self._rng(*link)
        latency_s = SHORTEST_LATENCY_S + (LONGEST_LATENCY_S - SHORTEST_LATENCY_S) * rng.random()
        if self._slow_s:
            latency_s += self._slow_s.get(link, 0.0)
        return latency_s

    def is_open(self, sender: Node, receiver: Node) -> bool:
        """Whether frames get from one node to the other."""
        return not self._cuts or (sender.name, receiver.name) not in self._cuts

    def is_way_open(self, sender: str, receiver: str) -> bool:
        """The same by names."""
        return (sender, receiver) not in self._cuts

    @property
    def digest(self) -> str:
        """Of every frame that has arrived: what, when, where, and in which order."""
        return self._digest.hexdigest()

    def witness(self, endpoint: Endpoint, frame: Any) -> None:
        """A frame arrives."""
        update = self._digest.update
        update(_ARRIVAL.pack(self.loop.now_s, len(frame) if isinstance(frame, tuple) else 0))
        update(endpoint.node.name.encode())
        if isinstance(frame, tuple):
            for part in frame:
                if isinstance(part, bytes):
                    update(part)
                elif isinstance(part, str):
                    update(part.encode())
        if self.on_frame is not None:
            self.on_frame(endpoint.peer.node, endpoint.node, frame, endpoint)

    def _rng(self, sender: str, receiver: str) -> random.Random:
        """Of one direction of one link."""
        link = (sender, receiver)
        if link not in self._links:
            self._links[link] = random.Random(f"{self._seed}/{sender}/{receiver}")
        return self._links[link]

    # -- faults

    def died(self, node: Node) -> None:
        """A node was killed: its ports close and its connections are reset, as far as the network lets that through."""
        for listener in [listener for listener in self.listeners.values() if listener.node is node]:
            self.unlisten(listener)
        for dialling in [dialling for dialling in self.dialling if dialling.node is node]:
            dialling.cancel()
        for endpoint in [endpoint for endpoint in self._endpoints if endpoint.node is node]:
            node.kept.append(endpoint)
            endpoint.reset("the connection was reset by the peer")

    def cut(self, sender: str, receiver: str) -> None:
        """Nothing gets from one node to the other any more; the other direction is not touched."""
        self._cuts.setdefault((sender, receiver), self.loop.now_s)

    def heal(self, sender: str, receiver: str) -> None:
        """What waited is sent, after the kernel's next try."""
        since_s = self._cuts.pop((sender, receiver), None)
        if since_s is None:
            return
        rng = self._rng(sender, receiver)
        for endpoint in list(self._endpoints):
            if endpoint.node.name == sender and endpoint.peer.node.name == receiver and endpoint.has_held:
                endpoint.delay(rng.uniform(0.0, min(self.loop.now_s - since_s, RETRANSMISSION_S)))
                endpoint.flush()
                if not endpoint.is_open:
                    self.forget(endpoint)
        for dialling in list(self.dialling):
            pause_s = rng.uniform(0.0, min(self.loop.now_s - since_s, RETRANSMISSION_S))
            self.loop.call_in(dialling.node, pause_s, dialling.try_now)

    def heal_all(self) -> None:
        """Open every way, at full speed."""
        for sender, receiver in list(self._cuts):
            self.heal(sender, receiver)
        self._slow_s.clear()

    def slow(self, sender: str, receiver: str, latency_s: float) -> None:
        """Add to the latency of one direction; 0 takes it back."""
        if latency_s > 0:
            self._slow_s[(sender, receiver)] = latency_s
        else:
            self._slow_s.pop((sender, receiver), None)
