"""Each instance is placed on by the costs of its own kind's profile."""

from dataclasses import replace

import msgspec

from controlplane.model.cluster import ClusterTable
from controlplane.model.step_costs import DATASHEET_COSTS, StepCosts
from controlplane.planning.instance_profile import StepCoefficients
from controlplane.policies.simulation import Simulation, SimulationParameters
from controlplane.scheduler.policy_switch import PolicySwitch
from controlplane.scheduler.profile_watch import ProfileWatch
from mesh.runtime import SystemClock, SystemEntropy
from mesh.store.embedded import EmbeddedStore, StoreHost
from services.cli.profiling.profile_file import store_profile
from tests.unit.controlplane.builders import instance, profile, report, request
from tests.unit.controlplane.policies.problems import asked


def costs_of(table: ClusterTable) -> list[StepCosts]:
    snapshot = table.snapshot("m")
    assert snapshot is not None
    return [StepCosts(*column) for column in snapshot.costs.T.tolist()]


async def test_instances_that_differ_have_costs_that_differ() -> None:
    store = EmbeddedStore(StoreHost(SystemClock(), SystemEntropy()))
    watch = ProfileWatch(store, PolicySwitch("simulation", 1.0))
    table = ClusterTable()
    for name, device in (("a", "small"), ("b", "large"), ("c", "small")):
        table.joined(replace(instance(name), device=device))
        report(table, name)
    watch.look(table)
    assert costs_of(table) == [DATASHEET_COSTS] * 3
    for device, token_ms in (("small", 1.0), ("large", 0.25)):
        coefficients = StepCoefficients(fixed_ms=5.0, prefill_token_ms=token_ms)
        of_device = profile(0.5)
        step = msgspec.structs.replace(of_device.step, coefficients=coefficients)
        await store_profile(store, msgspec.structs.replace(of_device, device=device, step=step))
    watch._profiles.records = {
        entry.key: msgspec.json.decode(entry.value, type=type(of_device))
        for entry in (await store.range("/penstock/profiles/")).entries
    }
    watch.look(table)
    assert [costs.prefill_token_ms for costs in costs_of(table)] == [1.0, 0.25, 1.0]
    table.joined(replace(instance("a", incarnation_id="2"), device="large"))
    watch.look(table)
    assert costs_of(table)[0].prefill_token_ms == 0.25, "a new incarnation may be of another kind"
    scores = Simulation(SimulationParameters()).decide(asked(table, request(prompt_tokens=100))).scores
    assert scores[1] == 5 + 0.25 * 100
    given = Simulation(SimulationParameters(fixed_ms=1.0, prefill_token_ms=0.0, attended_pair_ms=0.0))
    assert given.ttft_ms(asked(table, request(prompt_tokens=100))).tolist() == [1.0] * 3, "what is set stands"
