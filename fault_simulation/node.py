"""One life of one simulated process, and what was found wrong in it."""

import asyncio
import contextvars
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


class NodeState(Enum):
    """RUNNING <-> PAUSED (SIGSTOP, SIGCONT); either -> DEAD (kill -9), for good: a restart is another node."""

    RUNNING = auto()
    PAUSED = auto()
    DEAD = auto()


class Handle:
    """A callback that the loop will run. The parts of `asyncio.TimerHandle` that asyncio and its users call."""

    __slots__ = ("args", "callback", "context", "node", "when_s")

    def __init__(
        self,
        callback: Callable[..., Any] | None,
        args: tuple[Any, ...],
        context: contextvars.Context,
        node: "Node",
        when_s: float = 0.0,
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.node = node
        self.when_s = when_s

    def cancel(self) -> None:
        """It will not run."""
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        """Whether it was cancelled (or has run)."""
        return self.callback is None

    def when(self) -> float:
        """The moment it is due, on the clock of its node."""
        return self.when_s + self.node.clock_offset_s


class Node:
    """A process. Whatever runs in it runs in a context that names it."""

    __slots__ = ("__weakref__", "clock_offset_s", "context", "generators", "held", "kept", "name", "on_death", "state")

    def __init__(self, name: str, clock_offset_s: float = 0.0) -> None:
        """`clock_offset_s`: its monotonic clock is the loop's virtual time plus this."""
        self.name = name
        self.clock_offset_s = clock_offset_s
        self.state = NodeState.RUNNING
        self.held: deque[Handle] = deque()
        """What came due while it was paused, in order."""
        self.kept: list[object] = []
        """All that a dead process had under way. Were it collected, the clean-up of its coroutines would run, which no
        killed process does."""
        self.generators: weakref.WeakSet[AsyncGenerator[Any, Any]] = weakref.WeakSet()
        """Asynchronous generators that were begun here."""
        self.on_death: list[Callable[[], None]] = []
        self.context = contextvars.Context()
        self.context.run(current_node.set, self)

    def __repr__(self) -> str:
        return f"<Node {self.name} {self.state.name.lower()}>"


current_node: contextvars.ContextVar[Node] = contextvars.ContextVar("current_node")


class NodeTask(asyncio.Task[Any]):
    """A task that knows its process.

    Tasks and futures hash by number: sets of them, which `asyncio.wait` returns, are iterated by hash, and by address
    they would come in another order in each run.
    """

    __slots__ = ("_number", "node")

    def __init__(
        self,
        work: Any,
        number: int,
        node: Node,
        loop: asyncio.AbstractEventLoop,
        name: str | None,
        context: contextvars.Context | None,
    ) -> None:
        # Before the rest: asyncio puts the task into a set while it makes it.
        self._number = number
        self.node = node
        super().__init__(work, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._number


class NodeFuture(asyncio.Future[Any]):
    """A future that hashes by number, as tasks do."""

    __slots__ = ("_number",)

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class InjectedError(Exception):
    """Raised on purpose. That somebody logs it with a traceback is no finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not happen, whatever the faults."""

    node: str
    at_s: float
    what: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.at_s:.3f} {self.node}: {self.what}{f' ({self.detail})' if self.detail else ''}"
