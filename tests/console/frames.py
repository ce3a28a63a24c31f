"""How much CPU the page takes for a frame, main thread only: style, layout and paint included, by Chromium's trace."""

import json
from dataclasses import dataclass
from typing import Any

CATEGORIES = ["disabled-by-default-devtools.timeline", "devtools.timeline", "toplevel"]
TASKS = ("RunTask", "ThreadControllerImpl::RunTask")
FRAME = "FireAnimationFrame"


@dataclass(frozen=True)
class Frames:
    """CPU time of main-thread tasks, in ms and ascending; a busy machine makes tasks last longer, not cost more."""

    frames: list[float]
    """Tasks in which the page drew: scripts, style, layout and paint."""
    longest_task: float
    """Of all, those that take in an update included."""

    @property
    def p50(self) -> float:
        """By the nearest rank, as `p95`."""
        return self.frames[len(self.frames) // 2]

    @property
    def p95(self) -> float:
        return self.frames[-(-len(self.frames) * 95 // 100) - 1]

    def __str__(self) -> str:
        figures = f"p50 {self.p50:.1f} ms, p95 {self.p95:.1f} ms, longest {self.frames[-1]:.1f} ms"
        return f"{len(self.frames)} frames: {figures} of CPU; longest task of all {self.longest_task:.1f} ms"


def traced(browser: Any, tab: Any, while_ms: float) -> Frames:
    """What the tab does while a time passes."""
    browser.start_tracing(page=tab, categories=CATEGORIES)
    tab.wait_for_timeout(while_ms)
    events = json.loads(browser.stop_tracing())["traceEvents"]
    main = {
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
    }
    drawn = [event for event in events if event["name"] == FRAME and (event["pid"], event["tid"]) in main]
    threads = {(event["pid"], event["tid"]) for event in drawn}
    tasks = [
        event
        for event in events
        if event["name"] in TASKS and (event["pid"], event["tid"]) in threads and "tdur" in event
    ]
    assert tasks, "the trace has tasks with their CPU time"
    frames = [
        task["tdur"] / 1000 for task in tasks if any(task["ts"] <= at["ts"] <= task["ts"] + task["dur"] for at in drawn)
    ]
    return Frames(sorted(frames), max(task["tdur"] for task in tasks) / 1000)
