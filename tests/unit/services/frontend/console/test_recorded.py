"""Recordings for the console: bounded, and with nothing lost between the moments that are kept."""

from base64 import b64decode
from gzip import decompress
from hashlib import sha256
from itertools import pairwise
from re import DOTALL, MULTILINE, findall, search

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.console import recorded, single_page
from services.frontend.console.asset_files import asset_files
from services.frontend.console.recorded import Moments, encode_run, first_interval_ms, recording
from services.frontend.console.state import State
from services.frontend.console.view import View
from services.frontend.console.window import Objectives
from tests.unit.services.frontend.console.looks import ended, load, look, worker


def states(count: int, workers: int = 3) -> list[State]:
    """One a second; loads change, and instances come and go."""
    view = View(Objectives(1000.0, 100.0))
    found = []
    for number in range(count):
        alive = [worker(each) for each in range(workers) if (each + number) % 4]
        loads = [load(running_requests=(number + int(each.member_id[1:])) % 7) for each in alive]
        found.append(view.add(look(seconds=number, workers=alive, loads=loads, requests=[ended(number + 1)])))
    return found


KNOWN = states(90)


def decoded(encoded: bytes) -> list[tuple[int, list[list[object]]]]:
    """The time of each moment, and its instances, as a page puts them together."""
    run = msgspec.json.decode(encoded)
    rows: dict[object, list[object]] = {}
    moments = []
    for update in run["updates"]:
        for name in update["gone"]:
            del rows[name]
        rows.update({row[0]: row for row in update["instances"]})
        moments.append((update["body"]["at_unix_ms"], [rows[name] for name in sorted(rows, key=str)]))
    return moments


@given(count=st.integers(1, 90), max_moments=st.integers(2, 40))
def test_what_is_kept_is_as_it_was_and_evenly_spaced(count: int, max_moments: int) -> None:
    all_states = KNOWN[:count]
    moments = Moments(max_moments=max_moments)
    for number, state in enumerate(all_states):
        if moments.is_due(1000 * number):
            moments.add(state, 1000 * number)
    assert len(moments.states) <= max_moments
    shown = decoded(encode_run("p", moments, {}, {}, count))
    by_time = {state.body.at_unix_ms: state for state in all_states}
    for at, rows in shown:
        assert rows == list(msgspec.to_builtins(by_time[at].instances))
    distances = {later - earlier for (earlier, _), (later, _) in pairwise(shown)}
    assert shown[0][0] == all_states[0].body.at_unix_ms
    assert len(distances) <= 1 or max(distances) <= moments.interval_ms


def test_many_instances_are_shown_at_fewer_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MAX_INSTANCE_ROWS", 90)
    moments = Moments()
    for number, state in enumerate(KNOWN):
        if moments.is_due(1000 * number):
            moments.add(state, 1000 * number)
    assert sum(len(state.instances) for state in moments.states) <= 90
    assert moments.interval_ms > 1000


def test_a_file_has_at_most_so_many_bytes() -> None:
    moments = Moments()
    for number, state in enumerate(KNOWN):
        moments.add(state, 1000 * number)
    whole = encode_run("p", moments, {}, {}, 90)
    half = encode_run("p", moments, {}, {}, 90, len(whole) // 2)
    assert len(half) <= len(whole) // 2
    assert msgspec.json.decode(half)["interval_s"] == 2.0


@pytest.mark.parametrize(("arrivals_s", "interval_ms"), [(0.0, 100.0), (30.0, 150.0), (3600.0, 1000.0)])
def test_short_runs_are_looked_at_more_often(arrivals_s: float, interval_ms: float) -> None:
    assert first_interval_ms(arrivals_s) == interval_ms


def test_the_page_holds_the_recording_and_lets_nothing_else_run() -> None:
    document = recording(
        "</script><b>t", [encode_run("p", Moments(states=list(KNOWN[:2])), {}, {}, 2)], is_simulated=True
    )
    page = single_page.single_page(asset_files(), document).decode()
    packed = search(r'id="recording">([^<]*)</script>', page)
    assert packed is not None
    assert decompress(b64decode(packed[1])) == document
    scripts = findall(r"<script>(.*?)</script>", page, DOTALL)
    policy = search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    digests = findall(r"'sha256-([^']*)'", policy[1].partition("style-src")[0])
    assert [b64decode(each) for each in digests] == [sha256(script.encode()).digest() for script in scripts]
    assert "connect-src" not in policy[1]
    assert policy[1].startswith("default-src 'none'")
    assert findall(r'(?:src|href)="(?!#|data:)([^"]*)"', page.partition('id="recording"')[0]) == []


def test_every_module_of_the_page_stands_behind_what_it_imports() -> None:
    assets = asset_files()
    before: dict[str, set[str]] = {}
    for name in single_page._MODULES:
        source = assets[f"{name}.js"].decode()
        imports = findall(r"^import (.*)$", source, MULTILINE)
        parsed = single_page._IMPORT.findall(source)
        assert len(imports) == len(parsed), f"{name}.js imports in a way that the bundle does not know"
        for names, module in parsed:
            assert {each.strip() for each in names.split(",")} <= before[module], f"{name}.js"
        exports = findall(r"^export ", source, MULTILINE)
        before[name] = set(single_page._EXPORT.findall(source))
        assert len(exports) == len(before[name]), f"{name}.js exports in a way that the bundle does not know"
