"""What is sent to a viewer: the whole state at first, then what has changed of it. Pure."""

from collections.abc import Sequence

import msgspec

from services.frontend.console.state import COLUMNS, POINT_COLUMNS, Body, InstanceRow, Point, State


class Viewer(msgspec.Struct, frozen=True):
    """For whom the console is shown."""

    owner: str = ""
    """Name of its API key; empty: keys are not asked for here."""
    may_act: bool = False
    """It has an operator's key."""

    @property
    def sees_all(self) -> bool:
        """Other people's requests, too."""
        return self.may_act or not self.owner


class Update(msgspec.Struct, frozen=True):
    """One message to a viewer."""

    number: int
    """Ascending by one from look to look."""
    is_whole: bool
    """Everything; otherwise `instances` and `series` hold only what is new since the number before."""
    body: Body
    instances: Sequence[InstanceRow]
    gone: Sequence[str]
    series: Sequence[Point]
    viewer: Viewer
    columns: Sequence[str] = ()
    """What the entries of an instance's list are; in whole updates, as `point_columns`."""
    point_columns: Sequence[str] = ()


def whole(number: int, state: State, viewer: Viewer) -> Update:
    """All that this viewer may see, as the first update of a stream and the next that must not lack anything."""
    body = redacted(state.body, viewer)
    return Update(number, True, body, state.instances, (), state.series, viewer, COLUMNS, POINT_COLUMNS)


def change(number: int, before: State, now: State, viewer: Viewer) -> Update:
    """What is new since `before`, which the viewer has."""
    former = {row.instance_id: row for row in before.instances}
    present = {row.instance_id for row in now.instances}
    changed = [row for row in now.instances if former.get(row.instance_id) != row]
    gone = sorted(former.keys() - present)
    return Update(number, False, redacted(now.body, viewer), changed, gone, now.series[-1:], viewer)


def redacted(body: Body, viewer: Viewer) -> Body:
    """Without what names other people's requests, unless the viewer is an operator or keys are not asked for."""
    if viewer.sees_all:
        return body
    requests = tuple(row for row in body.requests if row.owner == viewer.owner)
    own = {row.request_id for row in requests}
    return msgspec.structs.replace(
        body,
        tenants=tuple(row for row in body.tenants if row.name == viewer.owner),
        requests=requests,
        placements=tuple(row for row in body.placements if row.request_id in own),
        moves=tuple(row for row in body.moves if row.request_id in own),
    )
