"""Puts together what pulls prefixes to and from one worker."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from controlplane.protocols.prefix_pull.target import ObstacleChanged, Stopped
from engine_worker.checkpoint_fingerprint import checkpoint_fingerprint
from engine_worker.engine_choice import ENGINES
from engine_worker.engines.prefix import PrefixEngine
from engine_worker.instance import Instance
from engine_worker.kv.addresses import reachable_address
from engine_worker.prefix_pull.metrics import PullMetrics
from engine_worker.prefix_pull.source import HeldPrefixes
from engine_worker.prefix_pull.target import PulledPrefixes
from engine_worker.step_watch import StepWatches
from mesh.membership import Member
from mesh.role import RoleContext
from mesh.tasks import TaskSet
from penstock.v1 import prefix_pull_pb2_grpc


class PrefixPuller:
    """`target` pulls to here, `source` holds for others."""

    def __init__(
        self,
        instance: Instance,
        engine: PrefixEngine,
        context: RoleContext,
        peers: Callable[[], Awaitable[tuple[Member, ...]]],
        steps: StepWatches,
    ) -> None:
        """`peers`: the workers that KV of this one makes sense to, once they are known."""
        self._instance = instance
        self._threads = context.runtime.threads
        self._tasks = TaskSet("prefix pull")
        self._obstacle = ""
        self._known_fingerprint: str | None = None
        metrics, clock, transport = PullMetrics(context.registry), context.runtime.clock, context.runtime.transport
        self.target = PulledPrefixes(instance, engine, metrics, self._tasks, clock, transport, peers, self._fingerprint)
        self.source = HeldPrefixes(
            instance,
            engine,
            metrics,
            self._tasks,
            clock,
            context.runtime.entropy,
            lambda: reachable_address(engine.kv_address, context.bind_host, instance.description.address),
            self._fingerprint,
        )
        steps.observe_always(self.target.speed.computed)
        instance.pulls = self.target
        context.server.add(prefix_pull_pb2_grpc.add_PrefixPullServicer_to_server, self.source, "penstock.v1.PrefixPull")

    def tick(self) -> None:
        """Look around; call it every 50 ms or so."""
        if self._instance.transfer_obstacle != self._obstacle:
            self._obstacle = self._instance.transfer_obstacle
            self.target.handle(ObstacleChanged(self._obstacle))
            self.source.handle(ObstacleChanged(self._obstacle))
        self.target.tick()
        self.source.tick()

    async def stop(self) -> None:
        """End everything that is under way; what waits for a prefix is not submitted any more."""
        self.target.handle(Stopped())
        self.source.handle(Stopped())
        await self._tasks.cancel()

    def validate(self) -> None:
        """Check what must hold between two events. Raises `InvariantBroken`."""
        self.target.validate()
        self.source.manager.validate()

    async def _fingerprint(self) -> str:
        """Of the checkpoint; empty where the engine has no weights, and its answers do not depend on any."""
        about = self._instance.description
        if self._known_fingerprint is None:
            needs_weights = ENGINES.get(about.engine).needs_weights
            self._known_fingerprint = (
                await self._threads.run(checkpoint_fingerprint, Path(about.model_path)) if needs_weights else ""
            )
        return self._known_fingerprint
