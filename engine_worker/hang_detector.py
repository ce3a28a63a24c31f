"""Tells an engine that hangs from one that has nothing to do. Pure."""

from controlplane.model.instance import LoadReport


class HangDetector:
    """An engine hangs when it has had requests for `hang_s` and made no step in that time.

    A step counts whether or not it brought a token: a long prompt is prefilled over many steps, and these show
    only in the load's totals.
    """

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        self._last_progress_s = 0.0
        self._last_marks: tuple[float, ...] = ()
        self.hung = False

    def stalled_s(self, now_s: float) -> float:
        """Since the engine's last step, or since it had nothing to do."""
        return max(0.0, now_s - self._last_progress_s)

    def note_step(self, now_s: float) -> None:
        """The engine brought a step's output."""
        self._last_progress_s = now_s

    def observe(self, now_s: float, *, busy: bool, load: LoadReport) -> bool:
        """Look at the engine; call it some ten times within `hang_s`. Returns whether `hung` has changed."""
        marks = (
            load.generated_tokens_total,
            load.prefilled_tokens_total,
            load.preemptions_total,
            load.finished_requests_total,
            load.step_ms,
        )
        if marks != self._last_marks or not busy:
            self._last_marks = marks
            self._last_progress_s = now_s
        was_hung, self.hung = self.hung, now_s - self._last_progress_s > self._hang_s
        return self.hung != was_hung
