"""A timeline of `penstock fuzz`, recorded: somebody with a machine of their own looks at the mesh while it breaks."""

from contextlib import suppress
from typing import Final

from fault_simulation.node import Node
from fault_simulation.nodes import STORE_URL
from fault_simulation.run import Outcome, build, run_timeline
from fault_simulation.runtime import START_UNIX_S, WallClock, simulated_runtime
from fault_simulation.story import fault_in_words
from fault_simulation.timeline import Timeline
from mesh.errors import PenstockError
from mesh.runtime import Runtime
from mesh.store import open_store
from services.cli.connection import mesh_directory
from services.cli.console.watched import MeshRecorder
from services.cli.simulation.plan import DEFAULT_TPOT_MS, DEFAULT_TTFT_MS
from services.frontend.console.collector import Collector
from services.frontend.console.recorded import Moments, from_zero
from services.frontend.console.state import EventRow
from services.frontend.console.stories import Stories
from services.frontend.console.view import View
from services.frontend.console.window import Objectives

INTERVAL_S: Final = 0.5
"""Between two looks: what is broken is mended within seconds."""


def record_timeline(timeline: Timeline) -> tuple[Outcome, bytes]:
    """What became of it while it was watched, and the recorded run as JSON.

    Whoever looks sends messages too, so that a race that hangs on the order of a few of them may end otherwise than it
    does unwatched.
    """
    mesh = build(timeline)
    known = [
        EventRow(int(1000 * (START_UNIX_S + fault.at_s)), f"broken from outside: {fault_in_words(fault)}", is_bad=True)
        for fault in timeline.faults
    ] + [
        EventRow(int(1000 * (START_UNIX_S + each.at_s)), f"an operator begins: {each.action}")
        for each in timeline.operations
    ]
    known.sort(key=lambda event: event.at_unix_ms)
    recorder = MeshRecorder(known, Moments(1000 * INTERVAL_S))
    viewer = Node("viewer")
    runtime = simulated_runtime(mesh.network, viewer, WallClock(), f"{timeline.seed}/viewer")
    mesh.loop.spawn(viewer, _watch(runtime, recorder), "viewer")
    outcome = run_timeline(timeline, mesh)
    facts = {
        "virtual time": f"{outcome.virtual_s:,.0f} s",
        "faults": f"{len(timeline.faults):,}",
        "violations": "; ".join(map(str, outcome.violations)) or "none",
    }
    return outcome, from_zero(recorder.encode(f"seed {timeline.seed}", facts))


async def _watch(runtime: Runtime, recorder: MeshRecorder) -> None:
    """Until the simulation ends."""
    view, clock = View(Objectives(DEFAULT_TTFT_MS, DEFAULT_TPOT_MS)), runtime.clock
    while True:
        store = open_store(STORE_URL, runtime)
        # The store may not be there yet, or be gone; looks go on without it as soon as the members are known.
        with suppress(PenstockError):
            async with mesh_directory(store) as directory:
                collector = Collector(directory, store, runtime.transport, clock)
                stories = Stories(collector, clock)
                while True:
                    look = await collector.look()
                    await recorder.add(look, view.add(look), stories)
                    await clock.sleep(INTERVAL_S)
        await store.close()
        await clock.sleep(INTERVAL_S)
