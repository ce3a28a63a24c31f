"""What the driver uses of Ray, in this process: one cluster whose actors run here, placed by their room.

A test says which nodes there are, and when an actor dies.
"""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class RayActorError(Exception):
    """As Ray's: the actor is dead."""


class ActorUnavailableError(RayActorError):
    """As Ray's: it cannot be reached for now."""


class RayTaskError(Exception):
    """As Ray's: what the actor was asked raised."""


class FakeActor:
    """A handle of one actor."""

    def __init__(self, ray: "FakeRay", make: Callable[[], Any], options: dict[str, Any]) -> None:
        self.options = options
        self.placed, self.died = asyncio.Event(), asyncio.Event()
        self._ray = ray
        self._make = make
        self._made: Any = None
        self._why = ""

    def place(self) -> None:
        if not self.placed.is_set():
            self._made = self._make()
            self.placed.set()

    def die(self, why: str) -> None:
        self._why = why
        self.died.set()
        self._ray.forget(self)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._call(method, arguments))

    async def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        async def answered() -> Any:
            await self.placed.wait()
            return await getattr(self._made, method)(*arguments)

        if self._ray.unavailable:
            self._ray.unavailable -= 1
            raise ActorUnavailableError("its node does not answer")
        call, death = asyncio.create_task(answered()), asyncio.create_task(self.died.wait())
        try:
            await asyncio.wait((call, death), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise RayActorError(f"The actor died.\n\tactor_id: 1\n{self._why}")
            try:
                return call.result()
            except Exception as error:
                raise RayTaskError(f"traceback\n{error}") from error
        finally:
            call.cancel()
            death.cancel()
            await asyncio.gather(call, death, return_exceptions=True)


class FakeRay:
    """Stands for the module `ray`."""

    def __init__(self, make_actor: Callable[[str], Any], nodes: list[dict[str, float]]) -> None:
        """`make_actor`: the object behind the actor of this name; `nodes`: their resources."""
        self.exceptions = SimpleNamespace(
            RayActorError=RayActorError, ActorUnavailableError=ActorUnavailableError, RayTaskError=RayTaskError
        )
        self.util = SimpleNamespace(list_named_actors=lambda: list(self.actors))
        self.actors: dict[str, FakeActor] = {}
        """By name, as long as they live or wait."""
        self.unavailable = 0
        """So many calls to come find no way to their actor."""
        self._make_actor = make_actor
        self._nodes = nodes

    # -- what tests do

    def add_node(self, resources: dict[str, float]) -> None:
        self._nodes.append(resources)
        for actor in self.actors.values():
            self._place(actor)

    # -- what the driver asks

    def remote(self, _class: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda: self._created(options)))

    def get_actor(self, name: str, namespace: str) -> FakeActor:
        found = self.actors.get(name)
        if found is None or found.options["namespace"] != namespace:
            raise ValueError(f"Failed to look up actor with name {name!r}")
        return found

    def kill(self, actor: FakeActor, no_restart: bool) -> None:
        assert no_restart
        actor.die("it was killed by `ray.kill`")

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": resources} for resources in self._nodes]

    def forget(self, actor: FakeActor) -> None:
        self.actors = {name: each for name, each in self.actors.items() if each is not actor}

    def _created(self, options: dict[str, Any]) -> FakeActor:
        name = options["name"]
        assert options["lifetime"] == "detached"
        assert options["max_restarts"] == 0, "who restarts is the supervisor"
        if name not in self.actors:
            self.actors[name] = FakeActor(self, lambda: self._make_actor(name), options)
            self._place(self.actors[name])
        return self.actors[name]

    def _place(self, actor: FakeActor) -> None:
        needs = {"GPU": actor.options["num_gpus"], "CPU": actor.options["num_cpus"]}
        if any(all(node.get(name, 0) >= count for name, count in needs.items()) for node in self._nodes):
            actor.place()
