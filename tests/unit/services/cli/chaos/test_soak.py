"""A soak's faults follow from its seed, and its memory is judged by role."""

from itertools import islice
from pathlib import Path

import pytest

from services.cli.chaos.memory import MIB, WARM_S, MemoryOfRole, MemorySamples, grown
from services.cli.chaos.schedule import HANG_S, PAUSE_S, scheduled_faults, survivable_faults
from services.cli.chaos.soak import SoakReport, log_bugs_in


def test_the_same_seed_gives_the_same_faults_and_each_comes_once_a_round() -> None:
    faults = survivable_faults({"worker": 3, "frontend": 2})
    first = list(islice(scheduled_faults(7, faults), 3 * len(faults)))
    assert first == list(islice(scheduled_faults(7, faults), 3 * len(faults)))
    assert first != list(islice(scheduled_faults(8, faults), 3 * len(faults)))
    rounds = [first[start : start + len(faults)] for start in range(0, len(first), len(faults))]
    assert all(sorted(blow.fault for blow in each) == sorted(faults) for each in rounds)
    assert all(PAUSE_S[0] <= blow.pause_s <= PAUSE_S[1] and HANG_S[0] <= blow.hold_s <= HANG_S[1] for blow in first)


def test_nobody_is_broken_who_is_the_last() -> None:
    assert not {"kill", "hang", "restart"} & set(survivable_faults({"worker": 1, "frontend": 2}))
    assert "kill-frontend" not in survivable_faults({"worker": 2, "frontend": 1})
    assert "drain" not in survivable_faults({"worker": 9, "frontend": 9}), "who is drained stays away"


def sampled(lives: list[tuple[float, float, float]], growth_bytes_per_s: float) -> MemorySamples:
    """Processes of one role, each from when to when and with how much at its birth."""
    samples = MemorySamples()
    for number, (born_s, died_s, first_bytes) in enumerate(lives):
        for at_s in range(int(born_s), int(died_s), 2):
            resident = first_bytes + growth_bytes_per_s * (at_s - born_s)
            samples.add(at_s, "worker", f"life {number}", int(resident))
    return samples


def test_a_process_that_grows_is_told_of() -> None:
    memory = sampled([(0, 900, 100 * MIB)], growth_bytes_per_s=0.05 * MIB).by_role(0, 900)
    assert memory["worker"].growth == pytest.approx(0.25, abs=0.05)
    assert "the memory of worker grew by" in grown(memory)[0]


def test_one_that_is_flat_is_not() -> None:
    memory = sampled([(0, 900, 100 * MIB)], growth_bytes_per_s=0.001 * MIB).by_role(0, 900)
    assert memory["worker"].first_mib == pytest.approx(100, abs=1)
    assert not grown(memory)


def test_a_restart_hides_no_growth_and_is_none_itself() -> None:
    # It is small at its birth, in the last third, and as large as before when it is warm.
    samples = sampled([(0, 700, 100 * MIB)], 0.0)
    for at_s in range(700, 900, 2):
        samples.add(at_s, "worker", "second", int(40 * MIB if at_s < 700 + WARM_S else 120 * MIB))
    memory = samples.by_role(0, 900)
    assert memory["worker"].growth == pytest.approx(0.2)
    assert memory["worker"].lives == 2


def test_a_role_without_warm_processes_is_judged_by_young_ones() -> None:
    memory = sampled([(0, 10, MIB), (10, 20, MIB), (20, 30, 2 * MIB)], 0.0).by_role(0, 30)
    assert memory["worker"].growth == 1.0


def test_a_role_that_was_not_there_at_both_ends_is_left_out() -> None:
    assert sampled([(0, 100, MIB)], 0.0).by_role(0, 900) == {}


def test_a_log_that_tells_of_a_bug_is_a_flaw(tmp_path: Path) -> None:
    (tmp_path / "frontend.log").write_text('{"message": "all is well"}\n{"message": "Task was destroyed but"}\n')
    (tmp_path / "worker.log").write_text("RuntimeError: generator is already running\n")
    found = log_bugs_in(tmp_path)
    assert found == (
        'frontend.log: {"message": "Task was destroyed but"}',
        "worker.log: RuntimeError: generator is already running",
    )


def report(**changes: object) -> SoakReport:
    values: dict[str, object] = {
        **dict.fromkeys(("failed", "lost", "duplicated", "wrong", "unfit", "resumed", "seed"), 0),
        **dict.fromkeys(("streams", "new_requests"), 9),
        **dict.fromkeys(("duration_s", "gap_ms_max", "wait_ms_max"), 1.0),
        **dict.fromkeys(("unhealed", "log_bugs"), ()),
        "faults": {},
        "memory_growth": {},
        "memory": {},
        "engine": "simulated",
    }
    return SoakReport(**{**values, **changes})  # type: ignore[arg-type]


def test_a_soak_without_a_flaw() -> None:
    steady, growing = MemoryOfRole(10.0, 10.4, 0.04, 1), MemoryOfRole(10.0, 10.6, 0.06, 1)
    assert report(memory={"worker": steady}).passed
    assert not report(memory={"worker": growing}).passed
    assert not any(report(**{count: 1}).passed for count in ("failed", "lost", "duplicated", "wrong"))
    assert not report(unhealed=("after kill: w does not serve",)).passed
    assert not report(log_bugs=("frontend.log: task died",)).passed
