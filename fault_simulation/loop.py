"""An event loop whose time jumps from timer to timer, shared by many simulated processes.

asyncio's own loop on a selector that turns the clock was tried first (it is what most virtual-time loops do): it spends
half its time in the selector and in handles that nobody debugs, and knows of no processes. This one has a deque, a heap
and nothing else; a callback costs about a microsecond.
"""

import asyncio
import contextvars
import heapq
import logging
import sys
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from fault_simulation.node import Finding, Handle, InjectedError, Node, NodeFuture, NodeState, NodeTask, current_node

Result = TypeVar("Result")

MOST_CALLBACKS_AT_ONE_MOMENT: Final = 200_000
"""More than this without time passing is a livelock."""
MOST_CLEAN_UPS: Final = 100


class SimulationStuck(Exception):
    """Nothing can happen any more (deadlock), or things happen for ever while no time passes (livelock)."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """Runs callbacks in the order in which they come due; at one moment, in the order in which they were asked for.

    Every callback belongs to the node that its context names: it waits while that node is paused, and never runs once
    it is dead. Errors that would only be logged (a task that died unheard, a future never looked at) are `findings`.
    """

    def __init__(self) -> None:
        self.world = Node("world")
        """What is not in any simulated process: the harness itself."""
        self.current = self.world
        """Whose callback runs."""
        self.now_s = 0.0
        """Virtual time, for the harness; nodes have `time`."""
        self.callbacks = 0
        """Run so far."""
        self.findings: list[Finding] = []
        self._dead: list[Node] = []
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._numbers = 0
        self._is_running = False
        self._is_closed = False

    # -- what asyncio calls

    def time(self) -> float:
        """The monotonic clock of the node whose callback runs."""
        return self.now_s + self.current.clock_offset_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Run it at this moment, after what is due already."""
        if context is None:
            context = contextvars.copy_context()
        handle = Handle(callback, args, context, context.get(current_node, self.world))
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there are no other threads

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Run it after `delay` seconds."""
        if context is None:
            context = contextvars.copy_context()
        node = context.get(current_node, self.world)
        return self._call_at(self.now_s + delay, Handle(callback, args, context, node))

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        """Run it at `when` on the current node's clock."""
        if context is None:
            context = contextvars.copy_context()
        node = context.get(current_node, self.world)
        return self._call_at(when - self.current.clock_offset_s, Handle(callback, args, context, node))

    def create_future(self) -> NodeFuture:
        """A future of this loop."""
        self._numbers += 1
        return NodeFuture(self._numbers, self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: contextvars.Context | None = None
    ) -> NodeTask:
        """A task of the node that the context names."""
        node = current_node.get(self.world) if context is None else context.get(current_node, self.world)
        self._numbers += 1
        # A name of our own: asyncio counts its default names over the whole process, and so over seeds.
        return NodeTask(coro, self._numbers, node, self, name or f"task {self._numbers}", context)

    def get_debug(self) -> bool:
        """Never: asyncio's debug mode looks at the real clock."""
        return False

    def set_debug(self, enabled: bool) -> None:
        """Does nothing: asyncio's debug mode measures callbacks by the wall clock, which no simulation has."""

    def is_running(self) -> bool:
        """Whether `run` is under way."""
        return self._is_running

    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def close(self) -> None:
        """Run nothing more, hear of no more errors, and end every coroutine where it waits."""
        self._is_closed = True
        former = events._get_running_loop()
        # Clean-up may start tasks. Where no loop runs, asyncio makes one for them and keeps it, and them, for good.
        events._set_running_loop(self)
        ended: set[asyncio.Task[Any]] = set()
        try:
            for _ in range(MOST_CLEAN_UPS):
                # Those that clean-up has started are ended, too, or Python complains of them when they are collected.
                if not (tasks := asyncio.all_tasks(self) - ended):
                    break
                for task in tasks:
                    _end(task.get_coro())
                ended |= tasks
        finally:
            events._set_running_loop(former)
        self._ready.clear()
        self._timers.clear()

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """As `call_exception_handler`."""
        self.call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Where asyncio reports what nobody caught."""
        if self._is_closed:
            return
        task = context.get("task") or context.get("future")
        node = task.node if isinstance(task, NodeTask) else self.current
        error = context.get("exception")
        what = repr(context.get("asyncgen") or "")
        if isinstance(task, asyncio.Task):
            what = f"{task.get_name()} of {getattr(task.get_coro(), '__qualname__', '')}"
        self.report(context.get("message", "unhandled"), f"{what} {_described(error)}".strip(), node)

    # -- for the harness

    def report(self, what: str, detail: str = "", node: Node | None = None) -> None:
        """Add a finding."""
        self.findings.append(Finding((node or self.current).name, round(self.now_s, 6), what, detail))

    def call_in(self, node: Node, delay_s: float, callback: Callable[..., Any], *args: Any) -> Handle:
        """Run a callback in a node after `delay_s`; what it starts belongs to the node."""
        return self._call_at(self.now_s + delay_s, Handle(callback, args, node.context.copy(), node))

    def call_in_at(self, node: Node, at_s: float, callback: Callable[..., Any], *args: Any) -> Handle:
        """The same, at a moment of virtual time."""
        return self._call_at(at_s, Handle(callback, args, node.context.copy(), node))

    def spawn(self, node: Node, work: Coroutine[Any, Any, Any], name: str) -> NodeTask:
        """A task in a node."""
        return self.create_task(work, name=name, context=node.context.copy())

    def pause(self, node: Node) -> None:
        """SIGSTOP: nothing of it runs until `resume`; time goes on."""
        if node.state is NodeState.RUNNING:
            node.state = NodeState.PAUSED

    def resume(self, node: Node) -> None:
        """SIGCONT: all that came due runs now, late."""
        if node.state is NodeState.PAUSED:
            node.state = NodeState.RUNNING
            self._ready.extend(node.held)
            node.held.clear()

    def kill(self, node: Node) -> None:
        """kill -9: not one more line of it runs, no `finally` either."""
        if node.state is NodeState.DEAD:
            return
        node.kept.extend(task for task in asyncio.all_tasks(self) if isinstance(task, NodeTask) and task.node is node)
        node.kept.extend(node.generators)
        node.kept.extend(node.held)
        node.held.clear()
        node.state = NodeState.DEAD
        self._dead.append(node)
        for callback in node.on_death:
            callback()
        node.kept.extend(node.on_death)

    def run(self, main: Coroutine[Any, Any, Result], limit_s: float = 3600.0) -> Result:
        """The result of `main`, run in the world. Raises what it raised, `SimulationStuck`, or TimeoutError when
        virtual time is over."""
        assert not self._is_running, "the loop runs already"
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._begun, finalizer=self._finalise)
        events._set_running_loop(self)
        self._is_running = True
        try:
            task = self.spawn(self.world, main, "main")
            self._run_until(task, limit_s)
            return task.result()  # type: ignore[no-any-return]
        finally:
            self._is_running = False
            self.current = self.world
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    # -- the loop

    def _run_until(self, task: NodeTask, limit_s: float) -> None:
        ready, timers, dead, paused = self._ready, self._timers, NodeState.DEAD, NodeState.PAUSED
        pop, popleft = heapq.heappop, ready.popleft
        at_this_moment = 0
        while not task.done():
            if ready:
                handle = popleft()
            elif timers:
                when_s, _, handle = pop(timers)
                if handle.callback is None:
                    continue
                if when_s > self.now_s:
                    if when_s > limit_s:
                        raise TimeoutError(f"not done after {limit_s:g} virtual seconds:\n{self.describe_tasks()}")
                    self.now_s = when_s
                    at_this_moment = 0
            else:
                raise SimulationStuck(f"deadlock, everybody waits:\n{self.describe_tasks()}")
            callback, node = handle.callback, handle.node
            if callback is None:
                continue
            if node.state is dead:
                node.kept.append(handle)
                continue
            if node.state is paused:
                node.held.append(handle)
                continue
            at_this_moment += 1
            if at_this_moment > MOST_CALLBACKS_AT_ONE_MOMENT:
                raise SimulationStuck(f"livelock at {self.now_s:.6f} s in {node}: {callback}\n{self.describe_tasks()}")
            self.callbacks += 1
            self.current = node
            try:
                handle.context.run(callback, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            # As asyncio does: what a callback raises is reported, and the loop goes on.
            except BaseException as error:  # noqa: BLE001
                self.report("a callback failed", f"{callback}: {_described(error)}", node)

    def describe_tasks(self) -> str:
        """Where every task of a living node waits."""
        tasks = [task for task in asyncio.all_tasks(self) if isinstance(task, NodeTask)]
        lines = []
        for task in sorted(tasks, key=lambda task: (task.node.name, hash(task))):
            if task.node.state is not NodeState.DEAD:
                lines.append(f"  {task.node.name}: {task.get_name()} in {' > '.join(_frames(task.get_coro()))}")
        return "\n".join(lines)

    def _call_at(self, when_s: float, handle: Handle) -> Handle:
        handle.when_s = when_s
        self._numbers += 1
        heapq.heappush(self._timers, (when_s, self._numbers, handle))
        return handle

    def _begun(self, generator: AsyncGenerator[Any, Any]) -> None:
        self.current.generators.add(generator)

    def _finalise(self, generator: AsyncGenerator[Any, Any]) -> None:
        """As asyncio does with an asynchronous generator that nobody refers to: it is closed by a task."""
        if not self._is_closed:
            self.call_soon(self.create_task, generator.aclose())


class FindingsHandler(logging.Handler):
    """Makes a finding of every log record that has a traceback: somebody's last line of defence was needed."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(logging.ERROR)
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging."""
        if record.exc_info and record.exc_info[1] is not None and not isinstance(record.exc_info[1], InjectedError):
            self._loop.report(f"logged an error: {record.getMessage()}", _described(record.exc_info[1]))


def _end(coroutine: Any) -> None:
    """Close a coroutine, as often as its clean-up waits for something; what it raises, nobody is left to hear."""
    for _ in range(MOST_CLEAN_UPS):
        with suppress(BaseException):
            coroutine.close()
        if getattr(coroutine, "cr_frame", None) is None:
            return


def _frames(coroutine: Any) -> list[str]:
    """Where a coroutine waits, from the outermost call inwards."""
    frames = []
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            frames.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return frames


def _described(error: BaseException | None) -> str:
    """An error, and where it came from."""
    if error is None:
        return ""
    trace = error.__traceback__
    where = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        where = f" at {code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}{where}"
