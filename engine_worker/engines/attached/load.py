"""The load of an attached server: what its metrics say, and an account of the requests that were sent to it. Pure.

The metrics come every quarter of a second and count the requests of other clients too; the account is exact and at
once, and knows only the mesh's. So the account counts the mesh's requests, and the metrics what is there besides.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from controlplane.model.instance import LoadReport
from controlplane.model.token_intervals import TokenIntervals
from engine_worker.engines.attached.wire import ServerMetrics

COUNTED_AFTER_S: Final = 0.1
"""A request that has ended may be in metrics that are asked for so long after it: vLLM sends the last token first, and
counts then."""
_RECENT_ENDS: Final = 4096
"""At most so many ends between two polls are remembered: with more, others look busier until the next one."""


@dataclass(slots=True)
class _Account:
    context_tokens: int
    prefill_tokens: int
    """Still to be computed, as far as is known; 0 once it has brought a token."""
    token_ms: float | None = None


class AttachedLoad:
    """Fed by the engine as requests go, bring tokens and end, and by its poll of the metrics; `now_s` is monotonic."""

    def __init__(self, kv_blocks: int, block_tokens: int) -> None:
        self._kv_blocks = kv_blocks
        self._block_tokens = block_tokens
        self._accounts: dict[str, _Account] = {}
        self._metrics = ServerMetrics()
        self._foreign = 0
        """Requests of others, by the latest metrics."""
        self._ends_s: deque[float] = deque(maxlen=_RECENT_ENDS)
        self._generated_tokens = 0
        self._prefilled_tokens = 0
        self._finished = 0
        self._step_ms = 0.0
        self._intervals = TokenIntervals()

    def submitted(self, request_id: str, context_tokens: int, cached_tokens: int) -> None:
        """A request was sent, of whose context so many tokens are thought to be cached there."""
        self._accounts[request_id] = _Account(context_tokens, context_tokens - cached_tokens)

    def produced(self, request_id: str, tokens: int, now_s: float) -> None:
        """Tokens of a request came."""
        account, now_ms = self._accounts[request_id], now_s * 1e3
        self._generated_tokens += tokens
        self._prefilled_tokens += account.prefill_tokens
        account.context_tokens += tokens
        account.prefill_tokens = 0
        if account.token_ms is not None:
            self._intervals.add(1, account.token_ms, now_ms, tokens)
            self._step_ms = (now_ms - account.token_ms) / tokens
        account.token_ms = now_ms

    def ended(self, request_id: str, now_s: float) -> None:
        """A request is over."""
        del self._accounts[request_id]
        self._finished += 1
        self._ends_s.append(now_s)

    def measured(self, metrics: ServerMetrics) -> None:
        """The server's metrics were read. Whether a request of ours that has just come or gone is in them is not known,
        so others have as many as before where that fits."""
        self._metrics = metrics
        told = metrics.running_requests + metrics.waiting_requests
        while self._ends_s and self._ends_s[0] < metrics.asked_s - COUNTED_AFTER_S:
            self._ends_s.popleft()
        least = told - len(self._accounts) - len(self._ends_s)
        most = told - sum(account.token_ms is not None for account in self._accounts.values())
        self._foreign = max(0, min(max(self._foreign, least), most))

    def report(self) -> LoadReport:
        """The load now."""
        requests = len(self._accounts) + self._foreign
        decoding = [account for account in self._accounts.values() if account.token_ms is not None]
        running = min(requests, max(len(decoding), self._metrics.running_requests))
        used = round(self._metrics.kv_usage * self._kv_blocks) if requests else 0
        own_tokens = sum(account.context_tokens for account in decoding)
        return LoadReport(
            running_requests=running,
            queued_requests=requests - running,
            queued_prefill_tokens=sum(account.prefill_tokens for account in self._accounts.values()),
            running_tokens=max(own_tokens, used * self._block_tokens) if self._foreign else own_tokens,
            kv_blocks_used=used,
            generated_tokens_total=self._generated_tokens,
            prefilled_tokens_total=self._prefilled_tokens,
            preemptions_total=self._metrics.preemptions_total,
            step_ms=self._step_ms,
            finished_requests_total=self._finished,
            decoding_requests=len(decoding),
            token_interval_ms=self._intervals.mean_ms() if decoding else 0.0,
        )
