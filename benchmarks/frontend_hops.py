"""The frontend's own work on a request and on a chunk, function by function, in CPU microseconds."""

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from benchmarks.english import prompts, text
from controlplane.model.incarnation import Incarnation
from controlplane.model.prefix_hash import block_hashes
from controlplane.protocols.relay.events import Loss
from penstock.v1 import request_pb2, scheduler_pb2, worker_pb2
from services.frontend.answers.choice import ChoicePiece, ChoiceText, TextRules
from services.frontend.answers.formats import AnswerExtras, AnswerHeader, ChatFormat
from services.frontend.errors import ApiError
from services.frontend.http.body import decode_body
from services.frontend.metrics import FrontendMetrics
from services.frontend.requests.schema import ChatCompletionRequest
from services.frontend.text.model_text import ModelText
from services.frontend.workers.relay import Relay, RelayRegistry
from services.frontend.workers.token_mailbox import Piece, TokenMailbox

BLOCK_TOKENS = 16
ROUNDS = 5
OWNER = Incarnation("worker-0", "1")
ANSWER_CHARACTERS = 8000
WARM_UP_CHARACTERS = 300_000
"""Tokenised first, so that the frontend knows the words that are in use, as it does after its first minutes."""
STOP_STRINGS = ("\nUser:", "###")
"""None of which comes in the answers here: they would end there."""


def cpu_us(work: Callable[[], Any], times: int) -> float:
    """Median over the rounds of the CPU time of one call."""
    taken = []
    for _ in range(ROUNDS):
        start_s = time.process_time()
        for _ in range(times):
            work()
        taken.append(1e6 * (time.process_time() - start_s) / times)
    return statistics.median(taken)


def request_hops(model: ModelText, characters: int, shared_characters: int) -> dict[str, float]:
    """Of one request whose prompt shares its beginning with those before it."""
    source = prompts(characters, shared_characters, seed=0)
    template = model.template
    assert template is not None
    messages = [{"role": "user", "content": next(source)}]
    body = json.dumps({"model": "demo", "messages": messages, "max_tokens": 1}).encode()
    model.chunked.encode(text(WARM_UP_CHARACTERS, random.Random(1)))
    rendered = [template.render([{"role": "user", "content": next(source)}]) for _ in range(1 + 10 * ROUNDS)]
    token_ids = model.chunked.encode(rendered.pop())
    relay = _relay(token_ids)
    hashes = block_hashes(token_ids, BLOCK_TOKENS)

    def place() -> bytes:
        request = scheduler_pb2.PlaceRequest(request_id="r", model="demo", block_hashes=hashes)
        return scheduler_pb2.SchedulerMessage(place=request).SerializeToString()

    def generate() -> bytes:
        return worker_pb2.FrontendMessage(generate=relay.generate_request(0.0)).SerializeToString()

    return {
        "decode and check the body": cpu_us(lambda: decode_body(body, ChatCompletionRequest), 50),
        "chat template": cpu_us(lambda: template.render(messages), 50),
        "tokenise": cpu_us(lambda: model.chunked.encode(rendered.pop()), 10),
        "hash the blocks": cpu_us(lambda: block_hashes(token_ids, BLOCK_TOKENS), 50),
        "place: encode the message": cpu_us(place, 50),
        "stream: encode the request": cpu_us(generate, 50),
    }


def chunk_hops(model: ModelText, streams: int) -> dict[str, float]:
    """Of one chunk, where a step's message holds one delta for each stream."""
    deltas = [request_pb2.TokenDelta(request_id=f"chatcmpl-{i:032x}", offset=9, token_ids=[70]) for i in range(streams)]
    message = worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(deltas=deltas)).SerializeToString()
    relay = _relay([1])
    delta = request_pb2.TokenDelta(request_id=relay.request_id, offset=0, token_ids=[70])
    relays = RelayRegistry(FrontendMetrics(CollectorRegistry()), {}, lambda: 0.0)
    relays.submitted(relay, OWNER)
    answer = model.chunked.encode(text(ANSWER_CHARACTERS, random.Random(0)))
    pieces = itertools.cycle([Piece(0, [token_id], (), 0, None) for token_id in answer])
    plain = ChoiceText(0, model.detokenizer([]), TextRules())
    stopping = ChoiceText(0, model.detokenizer([]), TextRules(STOP_STRINGS))
    header = AnswerHeader("chatcmpl-" + 32 * "0", 0, "demo", model, logprobs=False, include_usage=False)
    form, shown = ChatFormat(header, AnswerExtras([""])), ChoicePiece(0, " token", (), None)

    def deliver() -> None:
        relay.emitted_token_ids.clear()
        relays.deliver(OWNER, delta, 0.0)

    return {
        "stream: decode the message, per delta": cpu_us(lambda: _read(message), 200) / streams,
        "stream: relay": cpu_us(deliver, 2000),
        "detokenise": cpu_us(lambda: plain.push(next(pieces)), 2000),
        "detokenise, with two stop strings": cpu_us(lambda: stopping.push(next(pieces)), 2000),
        "SSE: encode": cpu_us(lambda: form.event(shown), 2000),
    }


def _read(message: bytes) -> None:
    for delta in worker_pb2.WorkerMessage.FromString(message).step.deltas:
        _ = delta.request_id


def _relay(token_ids: list[int]) -> Relay:
    return Relay(
        request_id="chatcmpl-" + 32 * "0",
        index=0,
        model="demo",
        prompt_token_ids=token_ids,
        sampling=request_pb2.SamplingParams(max_tokens=1),
        priority=0,
        started_s=0.0,
        deadline_s=600.0,
        mailbox=TokenMailbox(10**9, lambda: None),
        on_lost=_never_lost,
    )


def _never_lost(relay: Relay, loss: Loss[ApiError]) -> None:
    raise RuntimeError(f"the benchmark loses no worker: {loss}")
