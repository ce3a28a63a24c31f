"""Graceful shutdown of a process."""

import asyncio

from mesh.exit_status import ExitStatus


class Shutdown:
    """Asked for at most once; asked again by a signal, it cuts the drain."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.cut_asked = asyncio.Event()
        self.status = ExitStatus.STOPPED
        """Of the process, if it does not fail before."""
        self.drain_s: float | None = None
        """What running work is given; None: as the settings say."""

    def ask(self, status: ExitStatus, drain_s: float | None = None) -> bool:
        """Drain and end with `status`. False, and without effect, if an end has been asked for before."""
        if self.asked.is_set():
            return False
        self.status, self.drain_s = status, drain_s
        self.asked.set()
        return True

    def on_signal(self) -> None:
        """SIGTERM or SIGINT: the first drains, the second cuts."""
        if not self.ask(ExitStatus.STOPPED):
            self.cut_asked.set()
