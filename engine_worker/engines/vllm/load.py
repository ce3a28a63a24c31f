"""The engine's load, from vLLM's statistics of each step and an account of the requests submitted to it. Pure.

How exact each field of the report is, as of the last step:

- running_requests, preemptions_total, kv_blocks_used: vLLM's own numbers. A preemption shows once the request
  produces its next token.
- queued_requests: submitted and unfinished, less the running ones; exact.
- generated_tokens_total, finished_requests_total: counted from the outputs; exact.
- prefilled_tokens_total: the tokens that steps computed for requests without output yet; exact. What is computed
  again after a preemption is not in it.
- running_tokens: context of the requests that have output or were seen to be in prefill; exact but for preempted
  requests, which stay in it.
- queued_prefill_tokens: vLLM says how many prompt tokens a step computed, not of which request. They are given
  to the requests in the scheduler's order, so the sum is exact as long as the guess of what the cache holds
  is; a wrong guess (a block evicted or shared meanwhile) is corrected by the request's first token.
- decoding_requests: those that have brought a token here; preempted ones stay in it.
- token_interval_ms: from token to token of each request, its waiting after a preemption included.
- step_ms: time between two steps' arrivals, or since the request that ended an idle time.
"""

from dataclasses import dataclass

from controlplane.model.adapter import NO_ADAPTERS, AdapterLoad
from controlplane.model.instance import LoadReport
from controlplane.model.step_sample import StepSample
from controlplane.model.token_intervals import TokenIntervals


@dataclass(frozen=True, slots=True)
class StepStats:
    """The scheduler statistics that vLLM passes to stat loggers after a step."""

    running_requests: int
    kv_cache_usage: float
    """Share of the blocks that requests hold."""
    prefilled_tokens: int
    """Prompt tokens that the step computed."""
    decoded_tokens: int
    """Other tokens that it computed; neither means that it only cleaned up after ended requests."""
    preemptions: int


@dataclass(slots=True)
class _Account:
    order: tuple[int, int]
    context_tokens: int
    prefill_tokens: int
    started: bool = False
    token_ms: float = 0.0
    """When its latest token came; once there is one."""


class LoadAccount:
    """Fed by the engine as requests come, produce and go; `now_s` is any monotonic time."""

    def __init__(self, kv_blocks: int) -> None:
        self._kv_blocks = kv_blocks
        self._accounts: dict[str, _Account] = {}
        self._prefilling: dict[str, _Account] = {}
        self._arrivals = 0
        self._step_since_s = 0.0
        self._stats = StepStats(0, 0.0, 0, 0, 0)
        self._generated_tokens = 0
        self._prefilled_tokens = 0
        self._preemptions = 0
        self._finished = 0
        self._step_ms = 0.0
        self._intervals = TokenIntervals()
        self._attended_pairs = 0.0

    def submitted(self, request_id: str, context_tokens: int, cached_tokens: int, priority: int, now_s: float) -> None:
        """A request was submitted, of whose context that many tokens are thought to be cached."""
        if not self._accounts:
            self._step_since_s = now_s
        self._arrivals += 1
        account = _Account((priority, self._arrivals), context_tokens, context_tokens - cached_tokens)
        self._accounts[request_id] = account
        self._prefilling[request_id] = account

    def produced(self, request_id: str, tokens: int) -> None:
        """A step brought tokens for the request: its prompt has been computed."""
        self._generated_tokens += tokens
        account = self._accounts[request_id]
        account.context_tokens += tokens
        account.started = True
        now_ms = 1e3 * self._step_since_s
        if self._prefilling.pop(request_id, None) is None:
            self._intervals.add(1, account.token_ms, now_ms, tokens)
        account.token_ms = now_ms

    def ended(self, request_id: str) -> None:
        """The request has ended in the engine, by itself or not."""
        self.left(request_id)
        self._finished += 1

    def left(self, request_id: str) -> None:
        """The request is no longer in the engine but goes on: it was taken out to move, or to be submitted again."""
        del self._accounts[request_id]
        self._prefilling.pop(request_id, None)

    def stepped(self, stats: StepStats, now_s: float) -> None:
        """A step is over. Comes before the step's `produced` and `ended`."""
        self._stats = stats
        self._prefilled_tokens += stats.prefilled_tokens
        self._preemptions += stats.preemptions
        if stats.prefilled_tokens or stats.decoded_tokens:
            self._step_ms = 1e3 * (now_s - self._step_since_s)
        self._step_since_s = now_s
        self._spread(stats.prefilled_tokens)

    def report(self, adapters: AdapterLoad = NO_ADAPTERS) -> LoadReport:
        """The load by vLLM's last step and by what was submitted and delivered since."""
        requests = len(self._accounts)
        running = min(self._stats.running_requests, requests)
        usage = self._stats.kv_cache_usage if requests else 0.0
        decoding = requests - len(self._prefilling)
        return LoadReport(
            adapters=adapters,
            running_requests=running,
            queued_requests=requests - running,
            queued_prefill_tokens=sum(account.prefill_tokens for account in self._prefilling.values()),
            running_tokens=sum(account.context_tokens for account in self._accounts.values() if account.started),
            kv_blocks_used=round(usage * self._kv_blocks),
            generated_tokens_total=self._generated_tokens,
            prefilled_tokens_total=self._prefilled_tokens,
            preemptions_total=self._preemptions,
            step_ms=self._step_ms,
            finished_requests_total=self._finished,
            decoding_requests=decoding,
            token_interval_ms=self._intervals.mean_ms() if decoding else 0.0,
        )

    def step_sample(self) -> StepSample | None:
        """The step that `stepped` told of last, as long as nothing was `produced` since; None: it computed nothing.

        Which requests decoded is inferred: those that have brought a token, preempted ones among them.
        """
        stats = self._stats
        if not stats.prefilled_tokens and not stats.decoded_tokens:
            return None
        contexts = [
            account.context_tokens
            for request_id, account in self._accounts.items()
            if account.token_ms and request_id not in self._prefilling
        ]
        return StepSample(
            duration_ms=self._step_ms,
            prefill_tokens=stats.prefilled_tokens,
            attended_pairs=self._attended_pairs,
            decode_requests=stats.decoded_tokens,
            context_tokens=sum(contexts),
            longest_context_tokens=max(contexts, default=0),
        )

    def _spread(self, tokens: int) -> None:
        self._attended_pairs = 0.0
        if tokens == 0:
            return
        for account in sorted(self._prefilling.values(), key=lambda account: (not account.started, account.order)):
            computed = min(tokens, account.prefill_tokens)
            before = account.context_tokens - account.prefill_tokens
            self._attended_pairs += computed * (before + (computed + 1) / 2)
            account.prefill_tokens -= computed
            account.started = account.started or computed > 0
            tokens -= computed
            if tokens == 0:
                return
