"""Where the requests of a drained instance go, and when."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.coordinator import drain
from engine_worker.coordinator.drain import assign, evacuate
from engine_worker.coordinator.outgoing import MigrationOutcome
from engine_worker.request_table import RequestTable
from mesh.runtime import GrpcTransport
from tests.unit.engine_worker.worker.fake_engine import make_request

TARGETS = ("a", "b", "c")


def test_the_least_loaded_is_filled_first() -> None:
    plan = assign(["1", "2", "3", "4"], {"a": 3, "b": 0, "c": 1}, {})
    assert plan == {"1": "b", "2": "b", "3": "c", "4": "b"}


def test_one_that_refused_is_asked_again_only_when_all_have() -> None:
    assert assign(["1"], {"a": 0, "b": 5}, {"1": frozenset("a")}) == {"1": "b"}
    assert assign(["1"], {"a": 0, "b": 5}, {"1": frozenset("ab")}) == {"1": "a"}


@given(
    loads=st.dictionaries(st.sampled_from(TARGETS), st.integers(0, 20), min_size=1),
    refused=st.dictionaries(st.sampled_from("12345"), st.frozensets(st.sampled_from(TARGETS))),
)
def test_every_request_gets_a_target_that_may_take_it(
    loads: dict[str, int], refused: dict[str, frozenset[str]]
) -> None:
    plan = assign("12345", loads, refused)
    assert set(plan) == set("12345")
    for request_id, target in plan.items():
        unwilling = refused.get(request_id, frozenset())
        assert target not in unwilling or unwilling >= set(loads)


class HandingOver:
    """An instance whose request is being handed over when the drain begins, and the coordinator that does it."""

    def __init__(self) -> None:
        self.table = RequestTable()
        self.table.admit(make_request("r"), stream_id=1, frontend_id="f", now_s=0.0)
        self.orders_of_others = 3
        self.moved_to: list[str] = []

    def peers(self) -> Sequence[Any]:
        return ()

    def is_ordered(self, request_id: str) -> bool:
        """The target refuses in the end: the request stays."""
        self.orders_of_others -= 1
        return self.orders_of_others >= 0

    async def migrate(self, request_id: str, target: str) -> MigrationOutcome:
        self.table.take_out(request_id)
        self.moved_to.append(target)
        return MigrationOutcome(True)


async def test_a_request_whose_hand_over_fails_during_the_drain_is_moved_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def loads(*_: object) -> dict[str, int]:
        return {"b": 0}

    monkeypatch.setattr(drain, "ready_loads", loads)
    monkeypatch.setattr(drain, "PAUSE_S", 0.0)
    both: Any = HandingOver()
    assert await evacuate(both, both, GrpcTransport()) == 1
    assert both.moved_to == ["b"]


async def test_a_drain_goes_on_until_another_instance_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = 0

    async def loads(*_: object) -> dict[str, int]:
        nonlocal passes
        passes += 1
        return {"b": 0} if passes > 20 else {}

    monkeypatch.setattr(drain, "ready_loads", loads)
    monkeypatch.setattr(drain, "PAUSE_S", 0.0)
    both: Any = HandingOver()
    assert await evacuate(both, both, GrpcTransport()) == 1


async def test_a_drain_ends_with_the_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    both: Any = HandingOver()

    async def loads(*_: object) -> dict[str, int]:
        both.table.take_out("r")  # it ends by itself
        return {}

    monkeypatch.setattr(drain, "ready_loads", loads)
    monkeypatch.setattr(drain, "PAUSE_S", 0.0)
    assert await evacuate(both, both, GrpcTransport()) == 0
