import pytest
from prometheus_client import CollectorRegistry

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.ownership import TokenGap
from penstock.v1 import request_pb2
from services.frontend.errors import ApiError, unavailable
from services.frontend.metrics import FrontendMetrics
from services.frontend.workers.relay import MAX_RELEASED, Loss, Relay, RelayRegistry
from services.frontend.workers.token_mailbox import TokenMailbox

WORKER = Incarnation("worker-0", "first")


def relay_into(mailbox: TokenMailbox) -> Relay:
    relay = Relay(
        request_id="r",
        index=0,
        model="demo",
        prompt_token_ids=[1, 2, 3],
        sampling=request_pb2.SamplingParams(max_tokens=9, seed=4),
        priority=-1,
        started_s=100.0,
        deadline_s=10.0,
        mailbox=mailbox,
        on_lost=lambda relay, loss: relay.fail(loss.error),
    )
    relay.placed(WORKER)
    return relay


def mailbox() -> TokenMailbox:
    return TokenMailbox(100, lambda: None)


def test_a_relay_can_be_placed_again_at_any_moment() -> None:
    relay = relay_into(mailbox())
    relay.accept(WORKER, request_pb2.TokenDelta(offset=0, token_ids=[7, 8]), 0.0)
    relay.accept(WORKER, request_pb2.TokenDelta(offset=2, token_ids=[9]), 0.0)
    again = relay.generate_request(now_s=104.0)
    assert (list(again.prompt_token_ids), list(again.emitted_token_ids)) == ([1, 2, 3], [7, 8, 9])
    assert (again.sampling.max_tokens, again.sampling.seed, again.priority) == (9, 4, -1)
    assert again.deadline_ms == 6000
    assert relay.generate_request(now_s=1000.0).deadline_ms == 1, "0 would mean none"


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_tokens_must_follow_each_other(offset: int) -> None:
    relay = relay_into(mailbox())
    relay.accept(WORKER, request_pb2.TokenDelta(offset=0, token_ids=[7, 8]), 0.0)
    with pytest.raises(TokenGap, match=r"instance worker-0 .*offset 2"):
        relay.accept(WORKER, request_pb2.TokenDelta(offset=offset, token_ids=[9]), 0.0)


async def test_what_came_before_an_error_is_still_delivered() -> None:
    box = mailbox()
    relay = relay_into(box)
    relay.accept(WORKER, request_pb2.TokenDelta(offset=0, token_ids=[7]), 0.0)
    relay.fail(unavailable("gone"))
    relay.fail(unavailable("later"))
    assert [piece.token_ids for piece in box.take()] == [[7]]
    with pytest.raises(ApiError, match="gone"):
        box.take()


async def test_a_waiting_reader_gets_what_comes() -> None:
    box = mailbox()
    waiting = box.wait()
    assert box.is_awaited
    relay_into(box).accept(WORKER, request_pb2.TokenDelta(offset=0, token_ids=[7], cached_tokens=0), 0.0)
    await waiting
    (piece,) = box.take()
    assert not box.is_awaited
    assert (piece.token_ids, piece.cached_tokens, piece.finish_reason) == ([7], 0, 0)


def test_a_full_mailbox_ends_once() -> None:
    overflows: list[int] = []
    box = TokenMailbox(3, lambda: overflows.append(1))
    relay = relay_into(box)
    for index in range(10):
        relay.accept(WORKER, request_pb2.TokenDelta(offset=index, token_ids=[7]), 0.0)
    assert overflows == [1]
    assert box.error is not None
    assert box.error.code == "client_too_slow"


async def test_a_request_that_has_all_its_tokens_needs_no_other_worker() -> None:
    box = mailbox()
    relay = relay_into(box)
    relay.accept(WORKER, request_pb2.TokenDelta(offset=0, token_ids=range(9)), 0.0)
    relay.lost(WORKER, Loss("worker_lost", "worker-0", unavailable("gone")))
    assert relay.finished
    assert box.take()[-1].finish_reason == request_pb2.FINISH_REASON_LENGTH


def test_a_lost_request_is_placed_again_under_a_higher_epoch() -> None:
    relay = relay_into(mailbox())
    relay.accept(WORKER, request_pb2.TokenDelta(offset=0, token_ids=[7]), 0.0)
    losses: list[str] = []
    relay._on_lost = lambda _, loss: losses.append(loss.reason)
    error = request_pb2.RequestError(code=request_pb2.ERROR_CODE_LOST)
    relay.accept(WORKER, request_pb2.TokenDelta(finish_reason=request_pb2.FINISH_REASON_ERROR, error=error), 0.0)
    assert losses == ["handoff"]
    assert not relay.finished
    again = relay.generate_request(now_s=101.0)
    assert (again.epoch, list(again.emitted_token_ids)) == (2, [7])
    assert relay.instance_id == "worker-0", "the latest one, for operators"


class ToldLink:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.sender = Incarnation("worker-1", "first")
        self.told: list[tuple[str, str]] = []

    def abort(self, request_id: str) -> None:
        self.told.append(("abort", request_id))

    def release(self, request_id: str) -> None:
        self.told.append(("release", request_id))


def test_a_request_that_moves_after_its_client_has_left_to_come_back_is_kept() -> None:
    relays, link = RelayRegistry(FrontendMetrics(CollectorRegistry())), ToldLink()
    relay = relay_into(mailbox())
    arrived = request_pb2.TokenDelta(request_id="r", offset=1, token_ids=[8], emitted_token_ids=[7], epoch=1)
    relays.add(relay)
    relays.remove(relay)
    relays.deliver(link, arrived, 0.0)
    relays.add(relay)
    relays.release(relay)
    relays.deliver(link, arrived, 0.0)
    assert link.told == [("abort", "r"), ("release", "r")]


def test_few_requests_that_were_left_to_their_workers_are_remembered() -> None:
    relays, link = RelayRegistry(FrontendMetrics(CollectorRegistry())), ToldLink()
    for number in range(MAX_RELEASED + 1):
        relay = relay_into(mailbox())
        relay.request_id = f"r{number}"
        relays.release(relay)
    relays.drop(link, "r0")
    relays.drop(link, "r1")
    assert link.told == [("abort", "r0"), ("release", "r1")]
