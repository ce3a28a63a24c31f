"""A headless Chromium, and what is asked of every page in it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

MISSING = "install Chromium (`apt-get install chromium`) and then `make test-console`, which fetches the rest"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
VIEWS = ("overview", "instances", "requests", "placement", "cascades", "autoscale", "playground")
LIVE_MS = 30_000
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def chromium() -> str:
    """Where it is; skips the test, with what to install, where it or what drives it is missing."""
    for module in ("playwright.sync_api", "axe_playwright_python"):
        pytest.importorskip(module, reason=MISSING)
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(MISSING)
    return found


@contextmanager
def browser() -> Iterator[Any]:
    """A Playwright browser."""
    executable = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Root, as in a container, has no sandbox of Chromium's.
        running = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        try:
            yield running
        finally:
            running.close()


class Page:
    """The console in one tab."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.tab = self.context.new_page()
        self.complaints: list[str] = []
        """What the browser says of the page: errors, and breaches of its content security policy."""
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("console", lambda message: self._note(message))
        self.tab.goto(url, wait_until="load")

    @classmethod
    def of_mesh(cls, browser: Any, url: str, key: str = "", **options: Any) -> "Page":
        """The live console of a frontend."""
        page = cls(browser, f"{url}/", **options)
        if key:
            page.tab.get_by_label("Key", exact=True).fill(key)
            page.tab.get_by_role("button", name="Use it").click()
        page.wait("live")
        return page

    @classmethod
    def of_recording(cls, browser: Any, url: str, **options: Any) -> "Page":
        """One HTML file."""
        page = cls(browser, url, **options)
        page.wait("recording")
        return page

    def _note(self, message: Any) -> None:
        is_refusal = "status of 401" in message.text or "status of 403" in message.text
        if message.type == "error" and not is_refusal:
            self.complaints.append(message.text)

    def wait(self, text: str) -> None:
        """Until the page says that it shows what it is there for."""
        self.tab.locator("#live", has_text=text).wait_for(timeout=LIVE_MS)

    def show(self, view: str, address: str = "") -> Any:
        """Go to a view by its link, and return the tab. `address`: of the view, where it is not its name."""
        self.tab.get_by_role("link", name=view.capitalize(), exact=True).click()
        self.tab.locator(f'nav a[href="#{address or view}"][aria-current="page"]').wait_for()
        return self.tab

    def violations(self) -> list[str]:
        """What axe finds, each with the elements concerned."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.tab, options={"runOnly": TAGS}).response["violations"]
        return [f"{each['id']}: {node['html']}" for each in found for node in each["nodes"]]

    def close(self) -> None:
        """The browser must have had nothing to say."""
        self.context.close()
        assert self.complaints == []
