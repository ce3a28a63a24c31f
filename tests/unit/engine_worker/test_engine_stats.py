"""How many tokens steps have, and how long requests wait, prefill and decode, counted where it happens."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from controlplane.model.instance import LoadReport
from controlplane.model.request import FinishReason, StepOutput, TokenDelta
from engine_worker import engine_stats
from engine_worker.engine_stats import EngineStats
from engine_worker.metrics import WorkerMetrics


@dataclass
class Timed:
    """Stats of one instance on a clock that the test turns."""

    now_s: float = 100.0

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        self.stats = EngineStats(WorkerMetrics(self.registry), lambda: self.now_s)

    def step(self, delta: TokenDelta) -> None:
        self.stats.step(StepOutput((delta,)), LoadReport())

    def seen(self, phase: str) -> tuple[float, float]:
        """How many, and their sum in seconds."""
        name = f"penstock_worker_{phase}_seconds"
        count, total = (self.registry.get_sample_value(f"{name}_{each}") for each in ("count", "sum"))
        assert count is not None
        assert total is not None
        return count, round(total, 6)


def first(queued_ms: float | None = None) -> TokenDelta:
    return TokenDelta("r", 0, (7,), cached_tokens=0, queued_ms=queued_ms)


def later(finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta("r", 1, (8,), finish_reason=finish)


def test_the_phases_of_a_request_add_up() -> None:
    one = Timed()
    one.stats.begin("r")
    one.now_s += 3.0
    one.step(first(queued_ms=1000.0))
    one.now_s += 4.0
    one.step(later())
    one.now_s += 1.0
    one.step(later(FinishReason.LENGTH))
    assert [one.seen(phase) for phase in ("queue", "prefill", "decode", "inference")] == [
        (1, 1.0),
        (1, 2.0),
        (1, 5.0),
        (1, 7.0),
    ]
    assert len(one.stats) == 0


def test_an_engine_that_does_not_tell_of_its_queue_has_it_in_the_prefill() -> None:
    one = Timed()
    one.stats.begin("r")
    one.now_s += 3.0
    one.step(first())
    assert (one.seen("queue"), one.seen("prefill")) == ((0, 0.0), (1, 3.0))


def test_a_request_that_moves_counts_where_each_part_ran() -> None:
    source, target = Timed(), Timed()
    source.stats.begin("r")
    source.now_s += 1.0
    source.step(first())
    source.now_s += 2.0
    source.stats.end("r")
    target.stats.begin("r", is_moved=True)
    target.now_s += 5.0
    target.step(later(FinishReason.STOP))
    assert (source.seen("prefill"), source.seen("decode")) == ((1, 1.0), (1, 2.0))
    assert (target.seen("prefill"), target.seen("decode"), target.seen("inference")) == ((0, 0.0), (1, 5.0), (1, 5.0))


def test_a_request_without_a_token_has_no_phases() -> None:
    one = Timed()
    one.stats.begin("r")
    one.step(TokenDelta("r", 0, (), finish_reason=FinishReason.ABORT))
    one.step(later(FinishReason.STOP))  # nobody's
    assert {one.seen(phase) for phase in ("queue", "prefill", "decode", "inference")} == {(0, 0.0)}
    assert len(one.stats) == 0


def test_requests_that_never_end_are_given_up() -> None:
    one = Timed()
    for number in range(engine_stats.MAX_OPEN + 5):
        one.stats.begin(f"r{number}")
    assert len(one.stats) == engine_stats.MAX_OPEN


def test_a_step_has_the_tokens_that_were_computed_and_generated_since_the_last_one() -> None:
    one = Timed()
    for prefilled, generated in ((100, 1), (100, 1), (100, 5)):
        load = LoadReport(prefilled_tokens_total=prefilled, generated_tokens_total=generated, step_ms=20.0)
        one.stats.step(StepOutput(), load)
    names = ("steps_total", "step_tokens_count", "step_tokens_sum", "step_seconds_sum")
    values = [one.registry.get_sample_value(f"penstock_worker_{name}") for name in names]
    assert [round(value or 0.0, 6) for value in values] == [3, 2, 105, 0.06]
