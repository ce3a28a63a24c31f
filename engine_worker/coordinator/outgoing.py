"""What the coordinator knows of requests that are to leave."""

from dataclasses import dataclass, field

from controlplane.protocols.migration.source_events import MigrationOutcome
from engine_worker.coordinator.link import TargetLink
from engine_worker.engines.movable import ExportProgress, PausedRequest
from engine_worker.request_table import TrackedRequest
from mesh.tracing import Span


@dataclass(slots=True, eq=False)
class WatchedRequest:
    """A request whose first token and end the manager is to be told of."""

    tracked: TrackedRequest
    began_is_told: bool = False


@dataclass(slots=True, eq=False)
class OutgoingRequest:
    """What the engine has said of a request that is being copied."""

    migration_id: str
    tracked: TrackedRequest
    link: TargetLink
    span: Span
    """The move, from here to its end."""
    kv_token: str = field(repr=False)
    """By which the target pulls the blocks."""
    is_exported: bool = False
    progress: ExportProgress | None = None
    """The frontend may not have all tokens of it yet."""
    paused: PausedRequest | None = None
    paused_ms: float = 0.0
    pause_is_told: bool = False
    block_ids: tuple[int, ...] = ()

    @property
    def request_id(self) -> str:
        """That of the frontend."""
        return self.tracked.request.request_id

    def end_span(self, outcome: MigrationOutcome) -> None:
        """The move is over."""
        if not self.span.is_recorded:
            return
        self.span.set(
            request_id=self.request_id,
            target=self.link.target.member_id,
            moved=outcome.moved,
            blocks=outcome.blocks,
            paused_ms=outcome.paused_ms or 0.0,
        )
        self.span.end(outcome.reason)

    def take_progress(self) -> tuple[int, int] | None:
        """Full blocks and tokens emitted here, once all of these are on their way to the frontend: no token may be left
        behind when the request moves."""
        news, told_tokens = self.progress, len(self.tracked.emitted_token_ids)
        if news is None or told_tokens < news.emitted_tokens:
            return None
        if self.paused is None or not self.pause_is_told:
            self.block_ids = news.block_ids
        return len(news.block_ids), told_tokens - len(self.tracked.request.emitted_token_ids)
