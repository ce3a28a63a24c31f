"""One explanation from what several schedulers know."""

from typing import Any

import pytest

from mesh.errors import PeerUnavailable, RpcError
from services.cli.explain import indicator_names, merged, pull_line

UNKNOWN = RpcError("scheduler s answered NOT_FOUND: no placement of request 'r' is known here")


def answer(chosen: str, placed_unix_ms: int, *ordered_unix_ms: int) -> dict[str, Any]:
    moves = [{"ordered_unix_ms": str(ms)} for ms in ordered_unix_ms]
    return {"request_id": "r", "chosen_instance_id": chosen, "placed_unix_ms": str(placed_unix_ms), "moves": moves}


def test_the_last_placement_counts_and_everybodys_moves() -> None:
    found = merged("r", {"a": answer("x", 900, 50), "b": answer("y", 1000), "c": answer("", 0, 20), "d": UNKNOWN})
    assert (found["chosen_instance_id"], found["scheduler"]) == ("y", "b")
    assert [move["ordered_unix_ms"] for move in found["moves"]] == ["20", "50"]


def test_a_request_that_nobody_placed_is_an_error_that_says_what_they_said() -> None:
    with pytest.raises(PeerUnavailable, match="no scheduler knows the placement of request 'r': scheduler s answered"):
        merged("r", {"a": UNKNOWN, "b": answer("", 0, 20)})


def test_columns_stand_in_the_same_order_however_they_come() -> None:
    first, second = {"wait_ms": 1, "decode_ms": 2}, {"decode_ms": 3, "prefill_ms": 4, "wait_ms": 5}
    names = ["decode_ms", "prefill_ms", "wait_ms"]
    assert indicator_names([{"indicators": first}, {"indicators": second}]) == names
    assert indicator_names([{"indicators": second}, {"indicators": first}]) == names


def test_a_pulled_prefix_has_a_line_that_says_what_it_saves() -> None:
    pull = {"instance_id": "w0", "tokens": 2944, "pull_ms": 12.04, "compute_ms": 140.2}
    assert pull_line(pull) == "pulls 2,944 tokens from w0: 12 ms instead of 140 ms"
    comes = pull_line({**pull, "comes_ms": 310.7})
    assert comes == "pulls 2,944 tokens from w0 once it has computed them, in some 311 ms: 12 ms instead of 140 ms"
