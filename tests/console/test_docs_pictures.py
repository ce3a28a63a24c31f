"""The documentation's pictures, from a folder and without the internet."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser
SITE = Path(__file__).resolve().parents[2] / "build" / "docs"


@pytest.mark.parametrize(("page", "pictures"), [("index.html", 1), ("architecture.html", 2)])
def test_pictures_are_drawn_and_nothing_is_asked(browser: Any, page: str, pictures: int) -> None:
    if not SITE.is_dir():
        pytest.skip("`make docs` builds the site")
    tab = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto((SITE / page).as_uri(), wait_until="load")
    # The theme draws into a closed shadow, in place of the text.
    tab.wait_for_function(f"document.querySelectorAll('div.mermaid').length === {pictures}")
    for drawn in tab.locator("div.mermaid").all():
        box = drawn.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) > 100
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    tab.context.close()
