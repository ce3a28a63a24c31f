import asyncio

import pytest
from prometheus_client import CollectorRegistry

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.ownership import EPOCHS_PER_RECOVERY
from controlplane.protocols.relay.events import Loss, LossReason
from penstock.v1 import request_pb2, worker_pb2
from services.frontend.errors import ApiError, unavailable
from services.frontend.metrics import FrontendMetrics
from services.frontend.workers.relay import Relay, RelayRegistry
from services.frontend.workers.token_mailbox import TokenMailbox

WORKER, OTHER = Incarnation("worker-0", "first"), Incarnation("worker-1", "first")


class ToldLink:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.connected = asyncio.Event()
        self.told: list[tuple[str, str]] = []

    def abort(self, request_id: str, epoch: int, *, is_done: bool = False) -> None:
        self.told.append(("done" if is_done else "abort", request_id))

    def release(self, request_id: str, epoch: int) -> None:
        self.told.append(("release", request_id))


class Relays:
    """The relays of a frontend with two workers, one request of which is on the first."""

    def __init__(self, box: TokenMailbox | None = None) -> None:
        self.metrics = FrontendMetrics(CollectorRegistry())
        self.links = {WORKER: ToldLink(), OTHER: ToldLink()}
        self.registry = RelayRegistry(self.metrics, self.links, lambda: 0.0)
        self.box = box or mailbox()
        self.losses: list[Loss[ApiError]] = []
        self.relay = self.new()

    def new(self) -> Relay:
        """One more life of the request r."""
        relay = Relay(
            request_id="r",
            index=0,
            model="demo",
            prompt_token_ids=[1, 2, 3],
            sampling=request_pb2.SamplingParams(max_tokens=9, seed=4),
            priority=-1,
            started_s=100.0,
            deadline_s=10.0,
            mailbox=self.box,
            on_lost=lambda _, loss: self.losses.append(loss),
        )
        self.registry.submitted(relay, WORKER)
        return relay

    def step(self, offset: int, *token_ids: int, sender: Incarnation = WORKER, **fields: object) -> None:
        delta = request_pb2.TokenDelta(request_id="r", offset=offset, token_ids=token_ids, **fields)
        self.registry.deliver(sender, delta, 0.0)
        self.registry.validate()

    def tokens(self) -> list[int]:
        return [token for piece in self.box.take() for token in piece.token_ids]


def mailbox() -> TokenMailbox:
    return TokenMailbox(100, lambda: None)


def test_a_relay_can_be_placed_again_at_any_moment() -> None:
    relays = Relays()
    relays.step(0, 7, 8)
    relays.step(2, 9)
    again = relays.relay.generate_request(now_s=104.0)
    assert (list(again.prompt_token_ids), list(again.emitted_token_ids)) == ([1, 2, 3], [7, 8, 9])
    assert (again.sampling.max_tokens, again.sampling.seed, again.priority) == (9, 4, -1)
    assert again.deadline_ms == 6000
    assert relays.relay.generate_request(now_s=1000.0).deadline_ms == 1, "0 would mean none"


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_tokens_must_follow_each_other(offset: int) -> None:
    relays = Relays()
    relays.step(0, 7, 8)
    relays.step(offset, 9)
    assert relays.tokens() == [7, 8]
    with pytest.raises(ApiError, match=r"instance worker-0 .*offset 2"):
        relays.box.take()
    assert (relays.relay.finished, len(relays.registry)) == (True, 0)
    assert relays.links[WORKER].told == [("abort", "r")]
    assert relays.metrics.token_gaps._value.get() == 1


def test_what_came_before_an_error_is_still_delivered() -> None:
    relays = Relays()
    relays.step(0, 7)
    relays.registry.fail(relays.relay, unavailable("gone"))
    relays.registry.fail(relays.relay, unavailable("later"))
    assert relays.tokens() == [7]
    with pytest.raises(ApiError, match="gone"):
        relays.box.take()
    assert relays.links[WORKER].told == [("abort", "r")]


def test_a_request_ends_with_the_delta_that_says_so() -> None:
    relays = Relays()
    relays.step(0, 7, finish_reason=request_pb2.FINISH_REASON_STOP)
    relays.step(1, 8)
    (piece,) = relays.box.take()
    assert (piece.token_ids, piece.finish_reason) == ([7], request_pb2.FINISH_REASON_STOP)
    assert (relays.relay.finished, len(relays.registry), relays.links[WORKER].told) == (True, 0, [])
    relays.registry.drop(relays.relay)
    relays.registry.release(relays.relay)
    assert relays.links[WORKER].told == [], "it has ended"


async def test_a_waiting_reader_gets_what_comes() -> None:
    relays = Relays()
    waiting = relays.box.wait()
    assert relays.box.is_awaited
    relays.step(0, 7, cached_tokens=0)
    await waiting
    (piece,) = relays.box.take()
    assert not relays.box.is_awaited
    assert (piece.token_ids, piece.cached_tokens, piece.finish_reason) == ([7], 0, 0)


def test_a_full_mailbox_ends_once() -> None:
    overflows: list[int] = []
    relays = Relays(TokenMailbox(3, lambda: overflows.append(1)))
    for index in range(10):
        relays.step(index, 7)
    assert overflows == [1]
    assert relays.box.error is not None
    assert relays.box.error.code == "client_too_slow"


def test_a_request_that_has_all_its_tokens_needs_no_other_worker() -> None:
    relays = Relays()
    relays.step(0, *range(9))
    relays.registry.worker_lost(WORKER, LossReason.WORKER_LOST, "gone")
    assert relays.box.take()[-1].finish_reason == request_pb2.FINISH_REASON_LENGTH
    assert (relays.relay.finished, len(relays.registry), relays.losses) == (True, 0, [])


def test_a_lost_request_is_placed_again_under_a_higher_epoch() -> None:
    relays = Relays()
    relays.step(0, 7)
    error = request_pb2.RequestError(code=request_pb2.ERROR_CODE_LOST)
    relays.step(0, finish_reason=request_pb2.FINISH_REASON_ERROR, error=error)
    assert [loss.reason for loss in relays.losses] == ["handoff"]
    assert not relays.relay.finished
    again = relays.relay.generate_request(now_s=101.0)
    assert (again.epoch, list(again.emitted_token_ids)) == (EPOCHS_PER_RECOVERY, [7])
    assert relays.relay.instance_id == "worker-0", "the latest one, for operators"


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_request_that_moved_to_a_worker_that_is_gone_is_placed_again(is_connected: bool) -> None:
    relays = Relays()
    if is_connected:
        relays.links[OTHER].connected.set()
    moved = worker_pb2.RequestMoved(request_id="r", instance_id="worker-1", incarnation_id="first", epoch=1)
    relays.registry.moved(WORKER, moved)
    assert [(loss.reason, loss.instance_id) for loss in relays.losses] == [("handoff", "worker-1")] * (not is_connected)


def test_a_client_that_comes_back_while_its_former_connection_is_open_gets_the_request() -> None:
    relays = Relays()
    former, relays.box = relays.box, mailbox()
    relays.registry.adopted(
        adopted := Relay(
            request_id="r",
            index=0,
            model="demo",
            prompt_token_ids=[1],
            sampling=request_pb2.SamplingParams(max_tokens=9),
            priority=0,
            started_s=0.0,
            deadline_s=10.0,
            mailbox=relays.box,
            on_lost=lambda _, loss: relays.losses.append(loss),
        ),
        OTHER,
        4,
    )
    assert former.error is not None
    assert former.error.code == "adopted_elsewhere"
    relays.registry.drop(relays.relay)
    relays.step(0, 7, sender=OTHER, epoch=4)
    assert (relays.tokens(), adopted.finished, relays.links[OTHER].told) == ([7], False, [])
    relays.registry.drop(adopted, is_done=True)
    assert relays.links[OTHER].told == [("done", "r")]


def test_a_request_that_moves_after_its_client_has_left_to_come_back_is_kept() -> None:
    relays = Relays()
    relays.registry.drop(relays.relay)
    relays.step(1, 8, emitted_token_ids=[7], epoch=1, sender=OTHER)
    relays.registry.release(relays.new())
    relays.step(1, 8, emitted_token_ids=[7], epoch=1, sender=OTHER)
    assert relays.links[OTHER].told == [("abort", "r"), ("release", "r")]
    assert relays.links[WORKER].told == [("abort", "r"), ("release", "r")]


def test_a_worker_that_hangs_is_to_drop_what_it_has() -> None:
    relays = Relays()
    relays.registry.worker_lost(WORKER, LossReason.WORKER_HUNG, "no sign of life", is_connected=True)
    assert relays.links[WORKER].told == [("abort", "r")]
    assert [(loss.reason, loss.error.code) for loss in relays.losses] == [("worker_hung", "worker_hung")]
