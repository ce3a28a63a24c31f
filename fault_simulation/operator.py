"""Somebody who operates the mesh from a machine of their own, with what the commands of `penstock` are made of."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from fault_simulation.machines import Machines
from fault_simulation.node import Node, NodeTask
from fault_simulation.runtime import WallClock, simulated_runtime
from mesh.errors import PenstockError
from mesh.membership import Directory, Member
from mesh.runtime import Runtime
from mesh.store import open_store
from mesh.store.interface import StateStore
from services.cli.connection import CALL_DEADLINE_S, answering_member, call, mesh_directory

ACTION_DEADLINE_S: Final = 300.0
"""After which an operator presses Ctrl-C."""


class Action(Protocol):
    """Something that an operator does: a frozen value with a sentence for its `str`."""

    async def carry_out(self, operator: "Operator") -> str:
        """Do it; what came of it, in words. Raises PenstockError where the mesh refuses or cannot."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an action."""

    action: Action
    began_s: float
    ended_s: float
    done: bool
    """Otherwise it was refused, or could not be done now; the mesh is to be no worse for it."""
    what: str

    def __str__(self) -> str:
        verdict = "" if self.done else "not done: "
        return f"{self.began_s:.3f} to {self.ended_s:.3f} operator: {self.action}: {verdict}{self.what}"


class Operator:
    """Carries out actions, several at once if asked to."""

    def __init__(self, machines: Machines, store_url: str, bring_back: Callable[[str], Awaitable[None]]) -> None:
        """`bring_back` starts a process again that has ended, by the name of its machine."""
        self.machines = machines
        self.bring_back = bring_back
        self.node = Node("operator")
        self.runtime: Runtime = simulated_runtime(machines.network, self.node, WallClock(), f"{machines.seed}/operator")
        self.outcomes: list[Outcome] = []
        """In the order in which they came."""
        self._store_url = store_url

    def begin(self, action: Action) -> NodeTask:
        """Carry it out on the operator's machine; the task's result is its `Outcome`."""
        return self.machines.loop.spawn(self.node, self._carry_out(action), f"operator: {action}")

    async def perform(self, action: Action) -> Outcome:
        """Begin it and wait for what comes of it."""
        outcome = await self.begin(action)
        assert isinstance(outcome, Outcome)
        return outcome

    # -- for actions

    @asynccontextmanager
    async def mesh(self) -> AsyncIterator[tuple[StateStore, Directory]]:
        """The state store and the members, as every command opens them. Raises StoreUnavailable."""
        store = open_store(self._store_url, self.runtime)
        try:
            async with mesh_directory(store) as directory:
                yield store, directory
        finally:
            await store.close()

    async def call(
        self,
        member: Member,
        stub_class: Callable[[Any], Any],
        method: str,
        request: Any,
        deadline_s: float = CALL_DEADLINE_S,
    ) -> Any:
        """One call to a member. Raises RpcError."""
        return await call(member, stub_class, method, request, deadline_s, self.runtime.transport)

    async def ask(self, role: str, duty: str, stub_class: Callable[[Any], Any], method: str, request: Any) -> Any:
        """One call to the leader of a duty, or to any member of the role that answers. Raises PenstockError."""
        async with self.mesh() as (store, directory):
            member = await answering_member(directory, store, role, duty, self.runtime.transport)
            return await self.call(member, stub_class, method, request)

    async def _carry_out(self, action: Action) -> Outcome:
        loop = self.machines.loop
        began_s = loop.now_s
        try:
            async with asyncio.timeout(ACTION_DEADLINE_S):
                done, what = True, await action.carry_out(self)
        except (PenstockError, TimeoutError) as error:
            done, what = False, f"{type(error).__name__}: {error}"
        outcome = Outcome(action, began_s, loop.now_s, done, what)
        self.outcomes.append(outcome)
        return outcome
