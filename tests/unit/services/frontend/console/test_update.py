"""What viewers are sent."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.console.state import COLUMNS, InstanceRow, State
from services.frontend.console.update import Viewer, change, redacted, whole
from services.frontend.console.view import View
from services.frontend.console.window import Objectives
from tests.unit.services.frontend.console.looks import ended, load, look, worker

_ROWS = st.dictionaries(st.integers(0, 9), st.integers(0, 3), max_size=10)


def state(running: dict[int, int]) -> State:
    workers = [worker(number) for number in sorted(running)]
    loads = [load(running_requests=running[number]) for number in sorted(running)]
    return View(Objectives(1000, 100)).add(look(workers=workers, loads=loads))


@given(_ROWS, _ROWS)
def test_a_viewer_that_takes_in_a_change_has_the_state(before: dict[int, int], after: dict[int, int]) -> None:
    former, latter = state(before), state(after)
    has = {row.instance_id: row for row in whole(1, former, Viewer()).instances}
    update = change(2, former, latter, Viewer())
    for name in update.gone:
        del has[name]
    has |= {row.instance_id: row for row in update.instances}
    assert has == {row.instance_id: row for row in latter.instances}
    unchanged = {number for number in before.keys() & after.keys() if before[number] == after[number]}
    assert len(update.instances) == len(after) - len(unchanged), "no more than what is new"


def test_rows_are_lists_under_the_named_columns() -> None:
    told = msgspec.json.decode(msgspec.json.encode(whole(1, state({0: 2}), Viewer())))
    assert told["columns"] == list(COLUMNS)
    assert dict(zip(told["columns"], told["instances"][0], strict=True))["running"] == 2
    assert msgspec.json.decode(msgspec.json.encode(state({0: 2}).instances[0]), type=InstanceRow).running == 2


def test_a_key_that_is_no_operator_s_sees_its_own_requests_only() -> None:
    requests = [ended(1, owner="a"), ended(2, owner="b")]
    body = View(Objectives(1000, 100)).add(look(requests=requests)).body
    everything = redacted(body, Viewer("ops", may_act=True))
    assert [row.name for row in everything.tenants] == ["a", "b"]
    assert redacted(body, Viewer()) == body, "no keys are asked for"
    own = redacted(body, Viewer("a"))
    assert [row.request_id for row in own.requests] == ["r1"]
    assert [row.name for row in own.tenants] == ["a"]
    assert b"r2" not in msgspec.json.encode(own)
