"""Takes the pictures of docs/console.md: of a simulated mesh under load, a worker of which is killed, and of a replay.

    python scripts/console_screenshots.py FOLDER

Needs Chromium and what `make test-console` installs.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "generated")]
from tests.mesh.running_mesh import RunningMesh  # noqa: E402

WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 900}


def _ask(url: str, number: int) -> None:
    prompt = f"Tell me of penstock number {number % 5}. " * (10 + 12 * (number % 5))
    body = {"model": "demo-large", "prompt": prompt, "max_tokens": 40 + 50 * (number % 4), "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    urllib.request.urlopen(request, timeout=120).read()


def _page(browser: Any, url: str, viewport: dict[str, int], scheme: str = "light") -> Any:
    page = browser.new_context(viewport=viewport, color_scheme=scheme).new_page()
    page.goto(f"{url}/console", wait_until="load")
    page.locator("#live", has_text="live").wait_for()
    return page


def _show(page: Any, view: str) -> None:
    page.get_by_role("link", name=view, exact=True).click()
    page.wait_for_timeout(1500)


def _talk(page: Any) -> None:
    for message in ("What is a penstock? Tell me at some length. " * 6, "And what is it for?"):
        page.get_by_label("Message").fill(message)
        page.get_by_label("Message").press("Control+Enter")
        page.get_by_role("status").get_by_text("answered").wait_for()


def _replay(browser: Any, run_dir: Path, folder: Path) -> None:
    file = run_dir / "both.html"
    policies = ("--policy", "penstock", "--policy", "least_loaded")
    command = (
        sys.executable,
        "-m",
        "services.cli.main",
        "compare",
        *policies,
        "--instances",
        "8",
        "--console",
        str(file),
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'generated'}"}
    subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    page = browser.new_context(viewport={"width": 1440, "height": 800}).new_page()
    page.goto(f"{file.as_uri()}#placement", wait_until="load")
    page.locator("#live", has_text="recording").wait_for()
    slider = page.get_by_role("slider", name="Moment")
    for _ in range(30):
        slider.press("ArrowRight")
    page.wait_for_timeout(500)
    page.screenshot(path=folder / "console-replay.png")


def main(folder: Path) -> None:
    """Bring the mesh up, ask, kill, look."""
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = Path(tempfile.mkdtemp())
    mesh = RunningMesh(run_dir, "--engine", "simulated", "--workers", "4", "--rescheduler", "current")
    try:
        mesh.wait_until_serving()
        with sync_playwright() as driver, ThreadPoolExecutor(24) as pool:
            executable = shutil.which("chromium") or shutil.which("google-chrome")
            browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
            page = _page(browser, mesh.url, WIDE)
            asked = [pool.submit(_ask, mesh.url, number) for number in range(900)]
            page.wait_for_timeout(15_000)
            page.screenshot(path=folder / "console-overview.png")
            mesh.kill("demo-large-1")
            page.locator("#faults li").first.wait_for()
            dark = _page(browser, mesh.url, WIDE, "dark")
            dark.get_by_role("link", name="Instances", exact=True).click()
            dark.locator(".state.bad").first.wait_for()
            dark.screenshot(path=folder / "console-instances.png")
            mesh.cli(*"autoscale set demo-large --slo-ttft-ms 500 --minimum 3 --maximum 6 --interval-s 2".split())
            _show(page, "Autoscale")
            page.get_by_text("requests/s, up to").first.wait_for()
            page.wait_for_timeout(10_000)
            page.screenshot(path=folder / "console-autoscale.png")
            for each in asked:
                each.result()
            _show(page, "Requests")
            page.locator("#content tbody a").first.click()
            page.locator(".waterfall").wait_for()
            page.screenshot(path=folder / "console-story.png")
            phone = _page(browser, mesh.url, PHONE)
            _show(phone, "Playground")
            _talk(phone)
            phone.screenshot(path=folder / "console-playground.png")
            _replay(browser, run_dir, folder)
            browser.close()
        mesh.stop()
    finally:
        mesh.cut()
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
