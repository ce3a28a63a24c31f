"""Every view and every action of the console, in a browser, on a mesh under load with a worker killed in the middle."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.console.browser import VIEWS, Page
from tests.console.conftest import KeyedMesh

SLOW_MS = 30_000
pytestmark = pytest.mark.browser


@pytest.fixture
def page(browser: Any, keyed_mesh: KeyedMesh) -> Iterator[Page]:
    """An operator's."""
    opened = Page.of_mesh(browser, keyed_mesh.mesh.url, keyed_mesh.operator)
    opened.tab.set_default_timeout(SLOW_MS)
    yield opened
    opened.close()


def do_it(page: Page) -> str:
    """Confirm the action that the dialog shows; returns what came of it."""
    command = page.tab.locator("#action-dialog code").inner_text()
    with page.tab.expect_response("**/console/actions") as answered:
        page.tab.get_by_role("button", name="Do it").click()
    answer = answered.value
    assert not answer.ok or answer.json()["command"] == command, "what the page shows is what the frontend did"
    outcome = page.tab.locator("#action-dialog [role=status]", has_text=re.compile("^(Done|Not done)"))
    outcome.wait_for()
    text: str = outcome.inner_text()
    page.tab.get_by_role("button", name="Close").click()
    return text


def test_the_overview_shows_service_and_charts(page: Page, keyed_mesh: KeyedMesh) -> None:
    for asked in keyed_mesh.load(12):
        assert asked.result()[0] == 200
    tab = page.show("overview")
    tab.get_by_role("row", name=re.compile("^demo-large .*ms")).wait_for()
    tab.get_by_role("row", name=re.compile("^app ")).wait_for()
    assert tab.locator(".plot canvas").count() == 6
    assert "3 of 3" in tab.locator(".tiles").inner_text()


def test_a_killed_worker_is_loud_and_its_requests_go_on(page: Page, keyed_mesh: KeyedMesh) -> None:
    keyed_mesh.wait_whole()
    tab = page.show("instances")
    victim = tab.get_by_role("row", name=re.compile("^demo-large-1 "))
    victim.get_by_text("ready").wait_for()
    asked = keyed_mesh.load(12, tokens=300)
    tab.get_by_role("row", name=re.compile(r"^demo-large-1 ready [1-9]")).wait_for()
    keyed_mesh.mesh.kill("demo-large-1")
    tab.locator("#faults li", has_text="demo-large-1").first.wait_for()
    assert {each.result()[0] for each in asked} == {200}
    tab.get_by_role("row", name=re.compile("^demo-large-1 ready")).wait_for()
    page.show("overview").get_by_text(re.compile("worker demo-large-1 (was started again|has joined)")).first.wait_for()
    tab.locator("#faults").wait_for(state="hidden")


def test_a_request_has_a_story(page: Page, keyed_mesh: KeyedMesh) -> None:
    _, request_id = keyed_mesh.ask("a story " * 40)
    tab = page.show("requests")
    tab.get_by_role("link", name=request_id).first.click()
    story = tab.locator("#story")
    for span in ("admission", "placement", "prefill", "decode"):
        story.get_by_role("row", name=re.compile(f"^{span} ")).wait_for()
    story.get_by_role("row", name=re.compile("chosen$")).wait_for()
    tab.get_by_label("Request id").fill("nobody-knows-it")
    tab.get_by_role("button", name="Show").click()
    story.get_by_text("Nobody here remembers").wait_for()
    page.complaints = [each for each in page.complaints if "404" not in each]  # the browser logs what it was answered


def test_placements_come_with_the_milliseconds_of_each_option(page: Page, keyed_mesh: KeyedMesh) -> None:
    _, request_id = keyed_mesh.ask("place me " * 40)
    tab = page.show("placement")
    options = tab.get_by_role("table", name=f"Options for {request_id}")
    options.wait_for()
    assert {"wait_ms", "prefill_ms", "decode_ms", "others_ms"} <= set(
        options.get_by_role("columnheader").all_inner_texts()
    )
    assert options.get_by_role("row").count() == 4, "three instances and the heads"
    summed = {head.inner_text() for head in options.get_by_role("columnheader").all() if head.locator(".dot").count()}
    assert summed == {"wait_ms", "prefill_ms", "decode_ms", "others_ms"}, "what another way costs is no part of it"


def test_the_playground_streams_with_what_the_mesh_says_of_it(page: Page, keyed_mesh: KeyedMesh) -> None:
    tab = page.show("playground")
    tab.get_by_label("Model").select_option("demo-large")
    for number, message in enumerate(("Count from 7 up to 12. " * 10, "And on.")):
        tab.get_by_label("Message").fill(message)
        tab.get_by_label("Message").press("Control+Enter")
        turn = tab.locator(".turn").nth(number)
        turn.get_by_text("cached tokens").wait_for()
        assert turn.locator(".answer").inner_text() != ""
        assert "demo-large-" in turn.locator(".facts").inner_text()
    cached = re.search(r"cached tokens\s+([\d,]+) of", tab.locator(".turn").nth(1).inner_text())
    assert cached is not None
    assert int(cached[1].replace(",", "")) > 0, "the conversation so far is in a prefix cache"
    tab.locator(".turn").nth(1).get_by_role("link").click()
    tab.locator("#story").get_by_role("row", name=re.compile("^decode ")).wait_for()


def test_operators_switch_the_policy_and_the_rescheduler(page: Page, keyed_mesh: KeyedMesh) -> None:
    tab = page.show("placement")
    for name, value in (("Placement policy", "lmetric"), ("Rescheduler", "current")):
        choice = tab.get_by_label(name)
        choice.select_option(value)
        choice.locator("xpath=..").get_by_role("button").click()
        assert f"penstock {name.split()[-1].lower()} {value}" in tab.locator("#action-dialog code").inner_text()
        assert do_it(page).startswith("Done")
    status = keyed_mesh.mesh.status()
    assert (status["policy"]["policy"], status["rescheduler"]["mode"]) == ("lmetric", "current")
    keyed_mesh.mesh.cli("policy", "penstock")
    keyed_mesh.mesh.cli("rescheduler", "off")


def test_operators_move_a_running_request(page: Page, keyed_mesh: KeyedMesh) -> None:
    keyed_mesh.wait_whole()
    (asked,) = keyed_mesh.load(1, tokens=1500)
    tab = page.show("requests")
    running = tab.get_by_role("row", name=re.compile(" running "))
    running.get_by_role("link").click()
    tab.get_by_role("button", name="Move", exact=True).click()
    assert "moved from" in do_it(page)
    assert asked.result()[0] == 200
    tab.get_by_role("button", name="Show").click()
    tab.locator("#story", has_text="moved 1 times").wait_for()


def test_operators_restart_and_drain(page: Page, keyed_mesh: KeyedMesh) -> None:
    keyed_mesh.wait_whole()
    tab = page.show("instances")
    tab.get_by_role("button", name="Restart predictor predictor").click()
    assert "is started again" in do_it(page)
    tab.get_by_role("button", name="Drain demo-large-2").click()
    assert "penstock drain demo-large-2" in tab.locator("#action-dialog code").inner_text()
    assert do_it(page).startswith("Done")
    tab.get_by_role("row", name=re.compile("^demo-large-2 ")).wait_for(state="detached")
    assert "worker demo-large-2 has left" in page.show("overview").locator("main").inner_text()


def test_operators_set_goals_and_are_told_what_is_wrong_with_them(page: Page, keyed_mesh: KeyedMesh) -> None:
    tiers = "--tier demo-small --tier demo-large --threshold 50 --label model:demo-large".split()
    made = keyed_mesh.mesh.cli("cascade", "set", "both", *tiers)
    assert made.returncode == 0, made.stderr
    tab = page.show("cascades")
    tab.get_by_role("table", name="Tiers of both").wait_for()
    tab.get_by_label("GPUs").fill("4")
    tab.get_by_label(re.compile("^Tiers, as")).fill("llama-3.1-8b@h100")
    tab.get_by_label(re.compile("^Quality")).fill("70")
    tab.get_by_role("button", name="Set the goal").click()
    assert "penstock plan goal both --gpus 4" in tab.locator("#action-dialog code").inner_text()
    assert do_it(page).startswith("Not done"), "one tier for a cascade of two"
    page.complaints = [each for each in page.complaints if "409" not in each]
    tab.get_by_label(re.compile("^Tiers, as")).fill("llama-3.1-8b@h100 llama-3.3-70b@h100")
    tab.get_by_label(re.compile("^Quality")).fill("")
    tab.get_by_label(re.compile("^or latency")).fill("2.5")
    tab.get_by_role("button", name="Set the goal").click()
    assert do_it(page) == "Done: both is planned from the next workload on."
    tab.locator(
        "dd", has_text="gpus 4, tiers llama-3.1-8b@h100 llama-3.3-70b@h100, replan true, latency_s 2.5"
    ).wait_for()
    assert keyed_mesh.mesh.cli("plan", "goal", "both", "--remove").returncode == 0, "the command knows the goal"
    keyed_mesh.mesh.cli("cascade", "remove", "both")


def test_operators_have_a_model_follow_its_load(page: Page, keyed_mesh: KeyedMesh) -> None:
    tab = page.show("autoscale")
    tab.get_by_text("no model is scaled").wait_for()
    tab.get_by_label("Model", exact=True).fill("demo-large")
    tab.get_by_role("button", name="Scale it").click()
    assert do_it(page).startswith("Not done: "), "an SLO has a limit"
    page.complaints = [each for each in page.complaints if "409" not in each]
    tab.get_by_label(re.compile("^Time to first token")).fill("500")
    tab.get_by_label("Replicas at most").fill("4")
    tab.get_by_text("More", exact=True).click()
    tab.get_by_label("Seconds between two decisions").fill("1")
    tab.get_by_label(re.compile("^Decide and show only")).check()
    tab.get_by_role("button", name="Scale it").click()
    assert do_it(page).startswith("Done: demo-large is scaled so")
    scale = tab.get_by_role("article", name="Scale of demo-large")
    for said in ("99 % of requests within TTFT 500 ms", "1 to 4 replicas", "serve, ", "(dry run)", "requests/s, up to"):
        scale.get_by_text(said).first.wait_for()
    tab.get_by_role("button", name="Change the scale of demo-large").click()
    assert tab.get_by_label("Seconds between two decisions").input_value() == "1", "the form has what is set"
    tab.get_by_label(re.compile("^Share of requests")).fill("0.9")
    tab.get_by_role("button", name="Scale it").click()
    assert do_it(page).startswith("Done")
    scale.get_by_text("90 % of requests within TTFT 500 ms").wait_for()
    tab.get_by_role("button", name="Scale demo-large no more").click()
    assert do_it(page) == "Done: demo-large keeps the replicas that it has."
    tab.get_by_text("no model is scaled").wait_for()


def test_a_client_s_key_sees_its_own_requests_and_may_not_act(browser: Any, keyed_mesh: KeyedMesh) -> None:
    keyed_mesh.ask("mine")
    page = Page.of_mesh(browser, keyed_mesh.mesh.url, keyed_mesh.client)
    tab = page.show("instances")
    tab.get_by_role("button", name="Restart demo-large-0", exact=True).click()
    assert tab.get_by_role("button", name="Do it").is_disabled()
    tab.get_by_text("Your key is not an operator's").wait_for()
    tab.keyboard.press("Escape")
    tab.locator("#action-dialog").wait_for(state="hidden")
    assert tab.evaluate("document.activeElement.textContent") == "Restart", "the focus is where it was"
    page.close()


def test_without_a_key_nothing_is_shown(browser: Any, keyed_mesh: KeyedMesh) -> None:
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(f"{keyed_mesh.mesh.url}/console")
    tab.get_by_role("heading", name="API key").wait_for()
    assert "demo-large" not in tab.content()
    context.close()


def test_a_mesh_that_was_watched_opens_as_a_recording(browser: Any, keyed_mesh: KeyedMesh, tmp_path: Path) -> None:
    asked = keyed_mesh.load(6)
    path, both = tmp_path / "watched.html", tmp_path / "both.html"
    watched = keyed_mesh.mesh.cli(*f"top --count 4 --interval 0.5 --console {path} --json".split())
    assert watched.returncode == 0, watched.stderr
    assert {each.result()[0] for each in asked} == {200}
    assert keyed_mesh.mesh.cli("replay", str(path), str(path), "--console", str(both)).returncode == 0
    for file, regions in ((path, 1), (both, 2)):
        page = Page.of_recording(browser, file.as_uri())
        tab = page.show("instances")
        assert tab.get_by_role("row", name=re.compile("^demo-large-0 ")).count() == regions
        tab = page.show("summary" if regions == 1 else "compare", "compare")
        tab.get_by_role("table", name="Numbers of the whole runs").get_by_text("policies").wait_for()
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_in_any_view(browser: Any, keyed_mesh: KeyedMesh, scheme: str) -> None:
    keyed_mesh.ask("look at me")
    keyed_mesh.mesh.cli(*"autoscale set demo-large --slo-ttft-ms 500 --interval-s 1 --dry-run".split())
    page = Page.of_mesh(browser, keyed_mesh.mesh.url, keyed_mesh.operator, bypass_csp=True, color_scheme=scheme)
    for view in VIEWS:
        page.show(view)
        page.tab.wait_for_timeout(300)  # charts are drawn
        if view == "autoscale":
            page.tab.get_by_role("article", name="Scale of demo-large").get_by_text("(dry run)").wait_for()
        assert page.violations() == [], view
    page.show("instances").get_by_role("button", name="Restart demo-large-0", exact=True).click()
    assert page.violations() == [], "the dialog"
    page.close()
    keyed_mesh.mesh.cli("autoscale", "remove", "demo-large")


def test_on_a_phone_nothing_is_wider_than_it(browser: Any, keyed_mesh: KeyedMesh) -> None:
    page = Page.of_mesh(
        browser, keyed_mesh.mesh.url, keyed_mesh.operator, viewport={"width": 360, "height": 740}, is_mobile=True
    )
    for view in VIEWS:
        tab = page.show(view)
        tab.wait_for_timeout(200)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360, view
    page.close()


def test_it_can_be_used_by_keyboard_alone(page: Page) -> None:
    tab = page.tab
    tab.locator("body").press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the content"
    tab.keyboard.press("Tab")
    tab.keyboard.press("Tab")
    tab.keyboard.press("Enter")
    heading = tab.get_by_role("columnheader", name="running")
    heading.wait_for()
    heading.get_by_role("button").focus()
    tab.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert tab.evaluate("document.activeElement.textContent") == "running", "the focus stays while the numbers change"
