"""One engine request on its way: everything that is needed to place it again, and the check that no token is
lost or doubled."""

from mesh.errors import RpcError
from penstock.v1 import request_pb2
from services.frontend.api.errors import ApiError, bad_request, deadline_exceeded, unavailable, upstream_failed
from services.frontend.mailbox import Mailbox, Piece


class TokenGap(RpcError):
    """A worker sent tokens that do not follow those it sent before (a bug; the message tells the story)."""


class Relay:
    """Passes the tokens of one choice from a worker to its client's mailbox.

    Prompt, emitted tokens and sampling parameters are kept, so `generate_request` is, at any moment, what lets
    another worker go on from here.
    """

    __slots__ = (
        "_deadline_s",
        "_mailbox",
        "emitted_token_ids",
        "finished",
        "index",
        "instance_id",
        "model",
        "priority",
        "prompt_token_ids",
        "request_id",
        "sampling",
        "started_s",
    )

    def __init__(
        self,
        *,
        request_id: str,
        index: int,
        model: str,
        prompt_token_ids: list[int],
        sampling: request_pb2.SamplingParams,
        priority: int,
        started_s: float,
        deadline_s: float,
        mailbox: Mailbox,
    ) -> None:
        """`started_s` is when the client's request arrived, on the clock that `generate_request` is given."""
        self.request_id = request_id
        self.index = index
        self.model = model
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self.priority = priority
        self.started_s = started_s
        self.emitted_token_ids: list[int] = []
        self.finished = False
        """No more tokens will come, or none are wanted."""
        self.instance_id = ""
        self._deadline_s = deadline_s
        self._mailbox = mailbox

    def generate_request(self, now_s: float) -> request_pb2.GenerateRequest:
        """The request as a worker takes it, as of now."""
        left_s = self.started_s + self._deadline_s - now_s
        return request_pb2.GenerateRequest(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            emitted_token_ids=self.emitted_token_ids,
            sampling=self.sampling,
            priority=self.priority,
            deadline_ms=max(1, int(1000 * left_s)),
            model=self.model,
        )

    def accept(self, delta: request_pb2.TokenDelta) -> None:
        """Take what an engine step brought. Raises TokenGap if it does not follow what came before."""
        if self.finished:
            return
        reason = delta.finish_reason
        if reason in (request_pb2.FINISH_REASON_ERROR, request_pb2.FINISH_REASON_ABORT):
            self.fail(_error_of(delta.error, self._deadline_s))
            return
        token_ids = list(delta.token_ids)
        if delta.offset != len(self.emitted_token_ids):
            raise TokenGap(
                f"request {self.request_id} on instance {self.instance_id}: expected the token at offset "
                f"{len(self.emitted_token_ids)}, got {len(token_ids)} from offset {delta.offset}"
            )
        self.emitted_token_ids += token_ids
        cached = delta.cached_tokens if delta.HasField("cached_tokens") else None
        self._mailbox.put(Piece(self.index, token_ids, delta.logprobs, reason, cached))
        self.finished = bool(reason)

    def fail(self, error: ApiError) -> None:
        """No more tokens will come, for this reason."""
        if not self.finished:
            self._mailbox.fail(error)
            self.finished = True


def _error_of(error: request_pb2.RequestError, deadline_s: float) -> ApiError:
    message = error.message or "the worker took the request back"
    match error.code:
        case request_pb2.ERROR_CODE_REFUSED:
            return bad_request(f"The model cannot serve this request: {message}", code="refused")
        case request_pb2.ERROR_CODE_ENGINE:
            return upstream_failed(f"The engine failed on this request: {message}", "engine_failed")
        case request_pb2.ERROR_CODE_DEADLINE:
            return deadline_exceeded(deadline_s)
        case _:
            return unavailable(f"The worker cannot serve this request now: {message}")
