"""Several instances that hand requests to each other: engines as dictionaries, the network as one list."""

from dataclasses import dataclass

from controlplane.protocols.bid_ask import messages, receiver, sender
from controlplane.protocols.bid_ask.limits import BidAskLimits
from controlplane.protocols.bid_ask.receiver import BidAskReceiver, Capacity
from controlplane.protocols.bid_ask.sender import (
    BidAskSender,
    Closed,
    Migrate,
    MigrationEnded,
    PeerLost,
    RequestEnded,
    Tick,
)

LIMITS = BidAskLimits(incoming=2, deals=6, queued=4, starving_after=2)
KV_TOKENS = 400
TO_RECEIVER = (messages.Ask, messages.Award, messages.Begun, messages.Busy, messages.Withdrawn, messages.Done)


@dataclass(slots=True)
class Node:
    """One instance in one of its lives."""

    sender: BidAskSender
    receiver: BidAskReceiver
    requests: dict[str, int]
    """Context tokens by id."""


@dataclass(frozen=True, slots=True)
class Packet:
    """A message under way."""

    source: str
    target: str
    message: messages.Message


@dataclass(frozen=True, slots=True)
class Migration:
    """A transfer that runs."""

    request_id: str
    source: str
    target: str
    target_life: int
    began_ms: float


class Cluster:
    """Every method is one thing that may happen; `check` is what must hold after each."""

    def __init__(self, names: tuple[str, ...] = ("a", "b", "c"), limits: BidAskLimits = LIMITS) -> None:
        self.limits = limits
        self.now_ms = 0.0
        self.lives = dict.fromkeys(names, 0)
        self.nodes = {name: self._node(name) for name in names}
        self.packets: list[Packet] = []
        self.migrations: list[Migration] = []
        self.closed: list[Closed] = []
        self.begun: list[str] = []
        self.made = 0

    def _node(self, name: str) -> Node:
        return Node(BidAskSender(f"{name}{self.lives[name]}", self.limits), BidAskReceiver(self.limits), {})

    def capacity(self, name: str) -> Capacity:
        used = sum(self.nodes[name].requests.values())
        return Capacity(used, KV_TOKENS - used)

    # What the instructions mean.

    def do_sender(self, name: str, instructions: tuple[sender.SenderInstruction, ...]) -> None:
        for instruction in instructions:
            match instruction:
                case sender.Send(target, message):
                    self.packets.append(Packet(name, target, message))
                case Migrate(request_id, target):
                    assert request_id in self.nodes[name].requests, "a request moves that is not there"
                    migration = Migration(request_id, name, target, self.lives[target], self.now_ms)
                    self.migrations.append(migration)
                    self.begun.append(request_id)
                case Closed():
                    self.closed.append(instruction)

    def do_receiver(self, name: str, sends: tuple[receiver.Send, ...]) -> None:
        self.packets += [Packet(name, send.instance_id, send.message) for send in sends]

    # What may happen.

    def new_request(self, name: str, tokens: int) -> str:
        self.made += 1
        request_id = f"r{self.made}"
        self.nodes[name].requests[request_id] = tokens
        return request_id

    def offer(self, name: str, request_id: str, *, to: tuple[str, ...] = ()) -> None:
        node = self.nodes[name]
        others = to or tuple(other for other in self.nodes if other != name)
        self.do_sender(name, node.sender.offer(request_id, node.requests[request_id], others, self.now_ms))

    def arrive(self, index: int = 0, *, keep: bool = False) -> None:
        packet = self.packets[index] if keep else self.packets.pop(index)
        node = self.nodes[packet.target]
        if isinstance(packet.message, TO_RECEIVER):
            capacity = self.capacity(packet.target)
            sends = node.receiver.receive(packet.source, packet.message, capacity, self.now_ms)
            self.do_receiver(packet.target, sends)
        else:
            self.do_sender(packet.target, node.sender.receive(packet.source, packet.message, self.now_ms))

    def pass_time(self, ms: float) -> None:
        self.now_ms += ms
        for index in reversed(range(len(self.migrations))):
            if self.now_ms - self.migrations[index].began_ms >= self.limits.transfer_ms:
                self.end_migration(index, moves=False)
        for name, node in self.nodes.items():
            self.do_sender(name, node.sender.handle(Tick(), self.now_ms))
            self.do_receiver(name, node.receiver.tick(self.capacity(name), self.now_ms))

    def end_migration(self, index: int = 0, *, moves: bool = True) -> None:
        """It moves only if the target is still the one it began with."""
        migration = self.migrations.pop(index)
        moves = moves and self.lives[migration.target] == migration.target_life
        tokens = self.nodes[migration.source].requests
        if moves:
            self.nodes[migration.target].requests[migration.request_id] = tokens.pop(migration.request_id)
        event = MigrationEnded(migration.request_id, moves)
        self.do_sender(migration.source, self.nodes[migration.source].sender.handle(event, self.now_ms))

    def end_request(self, name: str, request_id: str) -> None:
        """It finishes where it runs, unless it is moving."""
        del self.nodes[name].requests[request_id]
        self.do_sender(name, self.nodes[name].sender.handle(RequestEnded(request_id), self.now_ms))

    def is_moving(self, request_id: str) -> bool:
        return any(migration.request_id == request_id for migration in self.migrations)

    def crash(self, name: str) -> None:
        """The process dies and comes back empty; what it sent may still arrive, and everybody hears of its death."""
        self.lives[name] += 1
        self.migrations = [migration for migration in self.migrations if migration.source != name]
        self.nodes[name] = self._node(name)
        for other, node in self.nodes.items():
            if other != name:
                self.do_sender(other, node.sender.handle(PeerLost(name), self.now_ms))
                self.do_receiver(other, node.receiver.lost(name, self.capacity(other), self.now_ms))

    # What must hold at every moment.

    def check(self) -> None:
        running = [migration.request_id for migration in self.migrations]
        assert len(running) == len(set(running)), "a request moves to two receivers"
        for migration in self.migrations:
            promised = self.nodes[migration.source].sender.promised_to(migration.request_id)
            assert promised == migration.target, "a request moves to whom it is not promised"
        for name, node in self.nodes.items():
            outgoing = sum(migration.source == name for migration in self.migrations)
            assert outgoing == node.sender.moving <= self.limits.outgoing
            incoming = sum(m.target == name and m.target_life == self.lives[name] for m in self.migrations)
            assert incoming <= node.receiver.holding <= self.limits.incoming, "more transfers than slots"

    def settle(self) -> None:
        """Let everything arrive and enough time pass: then nothing is promised, and every request is somewhere."""
        requests = sum(len(node.requests) for node in self.nodes.values())
        for _ in range(60):
            while self.packets:
                self.arrive()
            while self.migrations:
                self.end_migration()
            self.pass_time((self.limits.promise_ms + self.limits.transfer_ms) / 40)
            self.check()
        assert requests == sum(len(node.requests) for node in self.nodes.values())
        for name, node in self.nodes.items():
            assert node.sender.load_tokens == 0, f"{name} still offers"
            assert node.receiver.promised_tokens == 0, f"{name} is still promised something"
            assert not node.receiver.senders
