"""What a broken object says of itself."""

from collections import deque
from dataclasses import dataclass, field

import pytest

from mesh.errors import InvariantBroken
from mesh.invariants import invariants


class Till:
    """A till whose total may be wrong."""

    def __init__(self) -> None:
        self._total = 0
        self._sales = deque[int]()

    def sell(self, amount: int) -> None:
        self._sales.append(amount)
        self._total += amount

    @invariants
    def validate(self) -> None:
        """The total is that of the sales."""
        assert self._total == sum(self._sales), f"{sum(self._sales)} were sold"


@dataclass(slots=True)
class Drawer:
    """Slots have no dictionary."""

    open_since_s: float = 2.5
    tills: list[Till] = field(default_factory=list)

    @invariants
    def validate(self) -> None:
        for till in self.tills:
            till.validate()
        assert self.open_since_s < 1.0, "a drawer is not left open"


def test_a_broken_object_names_its_kind_what_is_wrong_and_all_its_fields() -> None:
    till = Till()
    till.sell(3)
    till.validate()
    till._total = 4
    with pytest.raises(InvariantBroken, match=r"(?s)^Till: 3 were sold.*; sales=deque\(\[3\]\), total=4$"):
        till.validate()


def test_slots_are_told_and_long_fields_are_cut() -> None:
    with pytest.raises(
        InvariantBroken, match=r"(?s)^Drawer: a drawer is not left open.*; open_since_s=2.5, tills=\[\]$"
    ):
        Drawer().validate()
    crowd = Drawer(tills=[Till() for _ in range(1000)])
    with pytest.raises(InvariantBroken) as broken:
        crowd.validate()
    assert len(str(broken.value)) < 6000


def test_what_is_inside_speaks_for_itself() -> None:
    till = Till()
    till._total = 1
    with pytest.raises(InvariantBroken, match=r"^Till: 0 were sold"):
        Drawer(tills=[till]).validate()
