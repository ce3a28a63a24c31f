"""A recording in a browser: the slider, the player, two runs side by side, and a thousand instances."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from controlplane.policies.registry import create_policy
from services.cli.console.output import write_console
from services.cli.console.simulated import SimulationRecorder
from services.frontend.console.window import Objectives
from simulator.cluster.config import ClusterConfig, Failure
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.traces.request import TraceRequest
from tests.console.browser import Page, chromium

pytestmark = pytest.mark.browser
VIEWS = ("compare", "overview", "instances", "requests", "placement", "cascades", "autoscale")
SLOW_MS = 30_000
MOST_FRAME_MS = 50.0


def record(path: Path, policies: Sequence[str], instances: int, requests: int, every_s: float) -> str:
    """Where the file is, as a browser writes it."""
    trace = [TraceRequest(every_s * number, 300 + number % 90, 80) for number in range(requests)]
    config = ClusterConfig(instances, InstanceConfig(), failures=(Failure(1, trace[-1].arrival_s / 2, 2.0),))
    runs = []
    for name in policies:
        policy = create_policy(name)
        recorder = SimulationRecorder.of(name, policy, "off", Objectives(1000.0, 100.0), trace[-1].arrival_s)
        ClusterSimulation(trace, config, LinearCost(), policy, [recorder]).run()
        runs.append(recorder.recorder.encode({"requests": f"{requests}", "policy": name}))
    write_console(path, "made-up.jsonl", runs, is_simulated=True)
    return path.as_uri()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    chromium()
    return record(
        tmp_path_factory.mktemp("replay") / "two.html", ("penstock", "least_loaded", "round_robin"), 4, 300, 0.05
    )


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Page]:
    opened = Page.of_recording(browser, url)
    opened.tab.set_default_timeout(SLOW_MS)
    yield opened
    opened.close()


def shown_time(page: Page) -> str:
    text: str = page.tab.locator(".player output").inner_text()
    return text.partition(" of ")[0]


def to_middle(page: Page) -> None:
    """The slider as a hand would leave it."""
    page.tab.get_by_role("slider", name="Moment").evaluate("""(slider) => {
        slider.value = (Number(slider.min) + Number(slider.max)) / 2;
        slider.dispatchEvent(new Event("input"));
    }""")


def test_the_slider_shows_any_moment_and_the_way_back(page: Page) -> None:
    tab = page.show("overview")
    tiles = tab.get_by_role("region", name="Run by penstock").locator(".tiles")
    first = tiles.inner_text()
    to_middle(page)
    middle = tiles.inner_text()
    assert middle != first
    tab.get_by_role("slider", name="Moment").press("End")
    assert tiles.inner_text() not in (first, middle)
    assert "00:00:1" in shown_time(page)
    to_middle(page)
    assert tiles.inner_text() == middle
    tab.get_by_role("slider", name="Moment").press("Home")
    assert (tiles.inner_text(), shown_time(page)) == (first, "00:00:00.0")


def test_it_plays_pauses_and_steps_by_keyboard(page: Page) -> None:
    tab = page.show("instances")
    tab.get_by_label("Speed").select_option("50 ×")
    tab.locator("#content").focus()
    tab.keyboard.press("Space")
    tab.get_by_role("button", name="Pause").wait_for()
    tab.get_by_role("button", name="Play").wait_for()  # the end was reached
    assert shown_time(page) == tab.locator(".player output").inner_text().partition(" of ")[2]
    tab.keyboard.press("Home")
    slider = tab.get_by_role("slider", name="Moment")
    before = slider.input_value()
    tab.keyboard.press("ArrowRight")
    assert float(slider.input_value()) > float(before)
    tab.keyboard.press("ArrowLeft")
    assert slider.input_value() == before
    tab.get_by_label("Speed").select_option("1 ×")
    tab.get_by_role("button", name="Play").click()
    tab.get_by_role("button", name="Pause").click()
    tab.get_by_role("button", name="Play").wait_for()


def test_two_policies_stand_side_by_side(page: Page) -> None:
    tab = page.show("placement")
    to_middle(page)
    left, right = (tab.get_by_role("region", name=f"Run by {name}") for name in ("penstock", "least_loaded"))
    assert {"wait_ms", "prefill_ms", "decode_ms"} <= set(left.get_by_role("columnheader").all_inner_texts())
    assert "running_requests" in right.get_by_role("columnheader").all_inner_texts()
    tab.get_by_label("Right").select_option("round_robin")
    tab.get_by_role("region", name="Run by round_robin").wait_for()
    right.wait_for(state="detached")
    tab.get_by_label("Right").select_option("nothing")
    tab.get_by_role("region", name="Run by round_robin").wait_for(state="detached")
    assert tab.locator(".pane").count() == 1


def test_the_comparison_has_both_courses_and_the_whole_runs(page: Page) -> None:
    tab = page.show("compare")
    to_middle(page)
    now = tab.get_by_role("table", name="Numbers at this moment")
    assert now.get_by_role("columnheader").all_inner_texts() == ["penstock", "least_loaded"]
    now.get_by_role("row", name=re.compile("^TTFT p95, .* ms .* ms$")).wait_for()
    assert tab.locator(".plot canvas").count() == 6
    whole = tab.get_by_role("table", name="Numbers of the whole runs")
    assert whole.get_by_role("row", name="requests 300 300").count() == 1


def test_a_request_has_its_story_in_both_runs(page: Page) -> None:
    tab = page.show("requests")
    to_middle(page)
    tab.locator("#content tbody a").first.click()
    for name in ("penstock", "least_loaded"):
        story = tab.get_by_role("region", name=f"Run by {name}").get_by_role("region", name="Story of a request")
        story.get_by_role("row", name=re.compile("^placement ")).wait_for()
        story.get_by_role("row", name=re.compile(" chosen$")).wait_for()


def test_nothing_can_be_done_in_a_recording_and_nothing_is_asked(page: Page) -> None:
    asked: list[str] = []
    page.tab.on("request", lambda request: asked.append(request.url))
    for view in VIEWS:
        tab = page.show(view)
        to_middle(page)
        buttons = tab.locator("#content button:not(th button)")
        assert set(buttons.all_inner_texts()) <= {"Show"}, view
    assert asked == []
    assert page.tab.get_by_role("link", name="Playground").count() == 0


def test_deaths_are_loud_at_their_moment(page: Page) -> None:
    tab = page.show("overview")
    tab.get_by_role("slider", name="Moment").press("End")
    pane = tab.get_by_role("region", name="Run by penstock")
    pane.get_by_role("row", name=re.compile("worker instance-1 has left")).wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_any_view(browser: Any, url: str, scheme: str) -> None:
    page = Page.of_recording(browser, url, bypass_csp=True, color_scheme=scheme)
    for view in VIEWS:
        page.show(view)
        to_middle(page)
        page.tab.wait_for_timeout(300)  # charts are drawn
        assert page.violations() == [], view
    page.close()


def test_on_a_phone_nothing_is_wider_than_it(browser: Any, url: str) -> None:
    page = Page.of_recording(browser, url, viewport={"width": 360, "height": 740}, is_mobile=True)
    for view in VIEWS:
        tab = page.show(view)
        to_middle(page)
        tab.wait_for_timeout(200)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360, view
    page.close()


def test_a_frame_of_a_thousand_instances_takes_at_most_fifty_milliseconds(
    browser: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("replay") / "many.html"
    page = Page.of_recording(browser, record(path, ("least_loaded",), 1000, 4000, 0.005))
    assert path.stat().st_size < 8_000_000
    tab = page.show("instances")
    tab.get_by_text("1,000 instances").wait_for()
    tab.evaluate("performance.clearMeasures()")
    tab.get_by_label("Speed").select_option("5 ×")
    tab.get_by_role("button", name="Play").click()
    tab.get_by_role("button", name="Pause").wait_for()
    tab.get_by_role("button", name="Play").wait_for()
    frames = sorted(tab.evaluate("performance.getEntriesByName('penstock-frame').map((each) => each.duration)"))
    print(f"frames: {len(frames)}, median {frames[len(frames) // 2]:.1f} ms, longest {frames[-1]:.1f} ms")
    assert len(frames) >= 10
    assert frames[len(frames) // 2] <= MOST_FRAME_MS
    page.close()
