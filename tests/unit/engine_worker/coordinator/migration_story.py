"""A story of requests that move, told to whatever shell of the migration managers listens."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

from controlplane.model.incarnation import Incarnation
from controlplane.model.request import EngineRequest, SamplingParams
from controlplane.protocols.migration import messages

BLOCK_TOKENS = 16
STEP_MS = 10.0
TICK_MS = 50.0
PULL_MS = 4.0
END_MS = 9_000.0
OWN = Incarnation("a", "a.1")
PROMPT = tuple(range(100))
CHUNK_TOKENS = 40


@dataclass
class Request:
    """A request on instance "a": computed by chunks, then a token each step."""

    name: str
    output_tokens: int
    computed_tokens: int = 0
    emitted_tokens: int = 0
    is_paused: bool = False

    @property
    def full_blocks(self) -> int:
        return self.kv_tokens // BLOCK_TOKENS

    @property
    def kv_tokens(self) -> int:
        return self.computed_tokens + max(0, self.emitted_tokens - 1)


@dataclass
class World:
    """What happens when, for both shells alike."""

    now_ms: float = 0.0
    requests: dict[str, Request] = field(default_factory=dict)
    peers: dict[str, Incarnation] = field(
        default_factory=lambda: {name: Incarnation(name, f"{name}.1") for name in "bcd"}
    )
    offered: set[str] = field(default_factory=set)
    """Migrations that targets have heard of."""
    _heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=count)

    def at(self, ms: float, act: Callable[[], None]) -> None:
        heappush(self._heap, (ms, next(self._numbers), act))

    async def run(self) -> None:
        while self._heap and self._heap[0][0] <= END_MS:
            self.now_ms, _, act = heappop(self._heap)
            act()
            for _ in range(10):  # what tasks do about it takes no time
                await asyncio.sleep(0)

    def step(self) -> tuple[list[str], list[str]]:
        """All go on by one step. Returns who has begun to decode and who has ended."""
        began, ended = [], []
        for request in list(self.requests.values()):
            if request.is_paused:
                continue
            if request.computed_tokens < len(PROMPT):
                request.computed_tokens = min(len(PROMPT), request.computed_tokens + CHUNK_TOKENS)
                if request.computed_tokens < len(PROMPT):
                    continue
                began.append(request.name)
            request.emitted_tokens += 1
            if request.emitted_tokens >= request.output_tokens:
                ended.append(request.name)
                del self.requests[request.name]
        return began, ended

    def hear(self, target_: str, message: messages.ToTarget, answer: Callable[[messages.ToSource], None]) -> None:
        """The targets: "b" takes all, "c" refuses at first and fails to commit, "d" never commits."""
        migration_id = message.migration_id
        self.offered.add(migration_id)
        said: messages.ToSource | None = None
        match message:
            case messages.Offer():
                refuses = target_ == "c" and len(self.offered) % 3 != 0
                said = messages.Refuse(migration_id, "full") if refuses else messages.Accept(migration_id)
            case messages.Round():
                said = messages.Pulled(migration_id, message.number)
            case messages.FinalMessage():
                ends = {"b": messages.Committed(migration_id), "c": messages.Failed(migration_id, "torn")}
                said = ends.get(target_)
            case messages.Abort():
                said = messages.Failed(migration_id, "dropped") if migration_id[-1] in "02468" else None
        if said is not None:
            final = said
            self.at(self.now_ms + PULL_MS, lambda: answer(final))


class Story:
    """What is done to a shell. Each of the two says how."""

    def __init__(self, world: World) -> None:
        self.world = world

    def admit(self, name: str, output_tokens: int, transfer_to: str | None) -> None:
        raise NotImplementedError

    def order(self, name: str, target_: str) -> None:
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        raise NotImplementedError

    def lose(self, peer: str) -> None:
        raise NotImplementedError

    def receive(self, message: messages.ToTarget) -> None:
        """From instance "d"."""
        raise NotImplementedError

    async def tell(self) -> None:
        world = self.world
        for number in range(9):  # more than there are slots
            transfer_to = {3: "b", 4: "", 5: "c", 7: "c"}.get(number)
            world.at(5 + 7.0 * number, lambda n=number, t=transfer_to: self.admit(f"r{n}", 60 + 9 * n, t))  # type: ignore[misc]
        for number in range(9):
            world.at(90 + 3.0 * number, lambda n=number: self.order(f"r{n}", "bcd"[n % 3]))  # type: ignore[misc]
        world.at(400, lambda: self.order("r6", "nowhere"))
        world.at(405, lambda: self.order("unknown", "b"))
        for number in range(10, 16):
            world.at(1000, lambda n=number: self.admit(f"r{n}", 150, None))  # type: ignore[misc]
            world.at(1200, lambda n=number: self.order(f"r{n}", "d" if n % 2 else "c"))  # type: ignore[misc]
        world.at(1101, lambda: self.admit("short", 10, None))
        world.at(1205, lambda: self.order("short", "b"))
        world.at(1230, lambda: self.lose("c"))
        offer = messages.Offer("d.1-1", EngineRequest("x1", PROMPT, SamplingParams(max_tokens=50)), 1, "f")
        world.at(2000, lambda: self.receive(offer))
        world.at(2010, lambda: self.receive(messages.Round("d.1-1", 1, 0, 4)))
        world.at(2012, lambda: self.receive(messages.Round("d.1-1", 1, 0, 4)))
        world.at(2030, lambda: self.receive(messages.FinalMessage("d.1-1", tuple(range(30)), 129, 4, 5)))
        world.at(2060, lambda: self.receive(messages.FinalMessage("d.1-1", tuple(range(30)), 129, 4, 5)))
        world.at(2070, lambda: self.receive(messages.Abort("d.1-7", "who?")))
        second = replace(offer, migration_id="d.1-2", request=replace(offer.request, request_id="x2"))
        world.at(2100, lambda: self.receive(second))
        world.at(2110, lambda: self.receive(messages.Round("d.1-2", 1, 0, 4)))
        world.at(3500, lambda: self.lose("d"))
        self.every(STEP_MS, self.step)
        self.every(TICK_MS, self.tick)
        await world.run()

    def every(self, interval_ms: float, act: Callable[[], None]) -> None:
        def again() -> None:
            act()
            self.world.at(self.world.now_ms + interval_ms, again)

        self.world.at(interval_ms, again)
