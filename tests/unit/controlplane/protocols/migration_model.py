"""Two instances with one request between them: engines and transfer agent as counters, the network as two lists."""

from typing import Any

from controlplane.model.request import EngineRequest, SamplingParams
from controlplane.protocols.migration import messages, source, target
from controlplane.protocols.migration.limits import MigrationLimits
from controlplane.protocols.migration.source import SourceMigration, SourceState
from controlplane.protocols.migration.target import TargetMigration

LIMITS = MigrationLimits()
BLOCK_TOKENS = 4
CHUNK_TOKENS = 10
PROMPT = tuple(range(40))
REQUEST = EngineRequest("r", PROMPT, SamplingParams(max_tokens=100))


def new_source(now_ms: float = 0.0, limits: MigrationLimits = LIMITS) -> SourceMigration:
    return SourceMigration("m", REQUEST, epoch=3, frontend_id="f", limits=limits, now_ms=now_ms)


def full_blocks(emitted: int) -> int:
    return (len(PROMPT) + emitted) // BLOCK_TOKENS


class TwoInstances:
    """Every method is one thing that may happen; `check` is what must hold after each."""

    def __init__(self, *, is_fresh: bool = False) -> None:
        """`is_fresh`: nothing of the prompt is computed yet."""
        self.now_ms = 0.0
        self.to_target: list[messages.ToTarget] = []
        self.to_source: list[messages.ToSource] = []
        self.source: SourceMigration | None = new_source()
        self.target: TargetMigration | None = None
        self.target_forgot = False
        self.emitted = 0 if is_fresh else 3
        self.computed_prompt = 0 if is_fresh else len(PROMPT)
        self.runs_at_source = True
        self.pause_asked = self.ended = False
        self.source_frees = self.target_reservations = self.target_frees = self.activations = 0
        self.recoveries = 0
        self.reserving = False
        self.pulls: list[target.Pull] = []
        self.pulled: set[int] = set()
        self.do_source(self.source.start(source.Progress(0, decoding=False) if is_fresh else None))

    # What the instructions mean.

    def do_source(self, instructions: tuple[source.SourceInstruction, ...]) -> None:
        for instruction in instructions:
            match instruction:
                case source.Send(message):
                    self.to_target.append(message)
                case source.Pause():
                    self.pause_asked = True
                case source.Resume():
                    self.pause_asked = False
                    self.runs_at_source = not self.ended
                case source.Release():
                    assert not self.runs_at_source
                    self.source_frees += 1
                case source.GiveUp():
                    assert not self.runs_at_source
                    self.source_frees += 1
                    self.recoveries += 1

    def do_target(self, instructions: tuple[target.TargetInstruction, ...]) -> None:
        for instruction in instructions:
            match instruction:
                case target.Send(message):
                    self.to_source.append(message)
                case target.Reserve():
                    self.reserving = True
                case target.Pull():
                    self.pulls.append(instruction)
                case target.Discard():
                    self.target_frees += 1
                case target.Activate(emitted, computed):
                    assert len(emitted) == self.emitted
                    blocks = -(-computed // BLOCK_TOKENS)
                    assert self.pulled >= set(range(blocks)), "activated with a block missing"
                    self.activations += 1

    def tell_source(self, event: source.SourceEvent) -> None:
        if self.source is not None:
            self.do_source(self.source.handle(event, self.now_ms))

    def tell_target(self, event: Any) -> None:
        if self.target is not None:
            self.do_target(self.target.handle(event, self.now_ms))

    def deliver_to_target(self, message: messages.ToTarget) -> None:
        if self.target_forgot:
            return
        if self.target is None:
            if isinstance(message, messages.Offer):
                self.target = TargetMigration(message, limits=LIMITS, now_ms=self.now_ms)
                self.do_target(self.target.start())
            else:
                self.to_source.append(messages.Failed(message.migration_id, "unknown migration"))
            return
        self.tell_target(message)

    # The network.

    def arrive_at_target(self, index: int = 0, *, keep: bool = False) -> None:
        self.deliver_to_target(self.to_target[index] if keep else self.to_target.pop(index))

    def arrive_at_source(self, index: int = 0, *, keep: bool = False) -> None:
        self.tell_source(self.to_source[index] if keep else self.to_source.pop(index))

    def pass_time(self, ms: float) -> None:
        self.now_ms += ms
        self.tell_source(source.Tick())
        self.tell_target(target.Tick())

    # The engines and the transfer agent.

    @property
    def may_step(self) -> bool:
        return self.source is not None and self.runs_at_source and not self.ended

    def step(self) -> None:
        if self.pause_asked:
            self.runs_at_source = False
            tokens = len(PROMPT) + self.emitted - 1
            blocks = -(-tokens // BLOCK_TOKENS)
            self.tell_source(source.Paused(tuple(range(self.emitted)), tokens, blocks))
            return
        if self.computed_prompt < len(PROMPT):
            self.computed_prompt += CHUNK_TOKENS
            if self.computed_prompt < len(PROMPT):
                self.tell_source(source.Progress(self.computed_prompt // BLOCK_TOKENS, decoding=False))
                return
        self.emitted += 1
        self.tell_source(source.Progress(full_blocks(self.emitted - 1), decoding=True))

    def end_by_itself(self) -> None:
        self.ended, self.runs_at_source = True, False
        self.source_frees += 1
        self.tell_source(source.Ended())

    def reserve(self, enough: bool) -> None:
        self.reserving = False
        if enough:
            self.target_reservations += 1
            self.tell_target(target.Reserved())
        else:
            self.tell_target(target.NotReserved("no blocks"))

    def pull(self, whole: bool) -> None:
        pull = self.pulls.pop(0)
        if whole and self.source is not None and not self.source_frees:
            self.pulled |= set(range(pull.first_block, pull.first_block + pull.block_count))
            self.tell_target(target.Arrived(pull.first_block, pull.block_count))
        else:
            self.tell_target(target.NotArrived("torn"))

    def cancel(self) -> None:
        self.tell_source(source.Cancel("the operator changed their mind"))

    def crash_source(self) -> None:
        self.source, self.runs_at_source = None, False
        self.to_source.clear()
        self.tell_target(target.SourceLost())

    def crash_target(self) -> None:
        self.target, self.target_forgot, self.reserving = None, True, False
        self.pulls.clear()
        self.to_target.clear()
        # Messages of the dead incarnation may still arrive; the shell then tells of its death.
        self.tell_source(source.TargetLost())
        self.to_source.clear()

    # What must hold at every moment.

    def check(self) -> None:
        self.one_owner()
        self.blocks_are_freed_once()

    def one_owner(self) -> None:
        runs_at_target = self.activations > 0 and not self.target_forgot
        assert not (self.runs_at_source and self.activations), "runs at both"
        if self.source is not None and self.source.state is SourceState.MOVED:
            assert runs_at_target or self.target_forgot

    def blocks_are_freed_once(self) -> None:
        assert self.source_frees <= 1
        assert self.activations <= 1
        assert self.target_frees + self.activations <= self.target_reservations <= 1

    def settle(self) -> None:
        """Let everything arrive and enough time pass: then somebody has the request, and nobody holds spare blocks."""
        for _ in range(40):
            while self.to_target or self.to_source:
                if self.to_target:
                    self.arrive_at_target()
                else:
                    self.arrive_at_source()
            if self.reserving:
                self.reserve(enough=True)
            if self.pulls:
                self.pull(whole=True)
            if self.may_step and (self.pause_asked or self.computed_prompt < len(PROMPT)):
                self.step()
            self.pass_time(LIMITS.idle_ms / 20)
        if self.source is not None:
            assert self.source.state in source.FINAL, self.source.story
            kept = self.source.state is SourceState.KEPT
            assert (self.source_frees == 0) == (kept and not self.ended)
            assert self.runs_at_source == (kept and not self.ended)
        if self.target is not None and not self.target_forgot:
            assert self.target.state in target.FINAL, self.target.story
            assert self.target_frees + self.activations == self.target_reservations
