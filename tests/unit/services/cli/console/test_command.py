"""`penstock replay`: every kind of recording opens, several of them side by side."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from fault_simulation.timeline import Kill, Request, Timeline, Topology
from mesh.errors import ConfigurationError
from services.cli.console.command import command
from services.cli.console.output import write_console
from services.frontend.console.asset_files import asset_files
from services.frontend.console.recorded import Moments, encode_run, recording
from services.frontend.console.single_page import recording_of, single_page
from services.frontend.console.view import View
from services.frontend.console.window import Objectives
from tests.unit.services.cli.console.recorded_page import recorded
from tests.unit.services.frontend.console.looks import look


def page(path: Path, *names: str, first_s: float = 0.0) -> Path:
    """A console that was written of a live mesh."""
    view, moments = View(Objectives(1000.0, 100.0)), Moments()
    for second in range(3):
        state = view.add(look(seconds=first_s + second))
        moments.add(state, state.body.at_unix_ms)
    write_console(path, "t", [encode_run(name, moments, {}, {}, 7) for name in names], is_simulated=False)
    return path


def test_two_recordings_stand_side_by_side_from_the_same_time_on(tmp_path: Path) -> None:
    first, second = page(tmp_path / "a.html", "mesh"), page(tmp_path / "b.html", "mesh", first_s=500.0)
    both = tmp_path / "both.html"
    result = CliRunner().invoke(command, [str(first), str(second), "--console", str(both)])
    assert result.exit_code == 0, result.output
    assert "mesh, 7 requests" in result.output
    document = recorded(both)
    assert [run["name"] for run in document["runs"]] == ["a: mesh", "b: mesh"]
    times = [[update["body"]["at_unix_ms"] for update in run["updates"]] for run in document["runs"]]
    assert times == [[0, 1000, 2000]] * 2
    assert document["is_simulated"]


def test_one_recording_stays_as_it_is(tmp_path: Path) -> None:
    first, again = page(tmp_path / "a.html", "left", "right"), tmp_path / "again.html"
    assert CliRunner().invoke(command, [str(first), "--console", str(again)]).exit_code == 0
    assert recorded(again)["runs"] == recorded(first)["runs"]
    assert not recorded(again)["is_simulated"]


def test_names_that_are_alike_can_be_told_apart(tmp_path: Path) -> None:
    one = str(page(tmp_path / "a.html", "mesh", "mesh"))
    result = CliRunner().invoke(command, [one, one, "--json"])
    assert result.output.count('"name"') == 4
    assert [f'"a: mesh{end}"' in result.output for end in ("", " (2)", " (3)", " (4)")] == [True] * 4


@pytest.mark.slow
def test_a_timeline_of_fuzz_shows_what_was_broken_and_what_the_mesh_did(tmp_path: Path) -> None:
    body = {"model": "model", "prompt": "tell me", "max_tokens": 40, "stream": True}
    requests = tuple(Request(number, 5.0 + number, "/v1/completions", body) for number in range(6))
    saved, shown = tmp_path / "seed_3.json", tmp_path / "seed_3.html"
    saved.write_text(Timeline(3, Topology(), requests, (Kill(7.0, ("worker-1",), 2.0),)).to_json())
    result = CliRunner().invoke(command, [str(saved), "--console", str(shown)])
    assert result.exit_code == 0, result.output
    (run,) = recorded(shown)["runs"]
    assert run["facts"]["violations"] == "none"
    assert int(run["requests"]) >= len(requests)
    assert run["stories"]
    last = run["updates"][-1]["body"]
    assert "broken from outside: kill names=worker-1, for_s=2.0" in [event["what"] for event in last["events"]]
    assert any(update["body"]["faults"] for update in run["updates"])
    assert last["models"][0]["requests"] >= len(requests)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no recording"),
        (b'{"timestamp": 0, "input_length": 3}\n', "penstock simulate --trace"),
        (b"<!doctype html><p>", "holds no recording"),
        (b'<!doctype html>\n<script type="application/gzip" id="recording">AAAA</script>', "damaged"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    error = CliRunner().invoke(command, [str(path)]).exception
    assert isinstance(error, ConfigurationError)
    assert says in str(error)


def test_a_page_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    whole = single_page(asset_files(), recording("t", [b"{}" * 10_000], is_simulated=True))
    before, mark, rest = whole.partition(b'id="recording">')
    packed, _, after = rest.partition(b"</script>")
    with pytest.raises(ValueError, match="cut off"):
        recording_of(before + mark + packed[: len(packed) // 8 * 4] + b"</script>" + after)
