"""The connector's scheduler side: which blocks are published, held, loaded and freed. Runs on vLLM's engine loop."""

from dataclasses import dataclass
from typing import Any

from vllm.v1.request import RequestStatus

from engine_worker.engines.vllm.connector.bridge import CoreBridge
from engine_worker.engines.vllm.connector.grammar import continue_grammar
from engine_worker.engines.vllm.connector.holds import PARAMETER as HOLD
from engine_worker.engines.vllm.connector.holds import PrefixHolds
from engine_worker.engines.vllm.connector.host_blocks import HostBlocks
from engine_worker.engines.vllm.connector.host_copies import Fetched, Loaded, Saved
from engine_worker.engines.vllm.connector.inbox import Exported, Hurried, InboxEvent, Received, Sent, Unexported, Unheld
from engine_worker.engines.vllm.connector.messages import PausedNotice
from engine_worker.engines.vllm.connector.metadata import ConnectorMetadata
from engine_worker.engines.vllm.connector.orders import HeldPrefix, Load, StagingCopy

PARAMETERS = "penstock"
"""Key in a request's kv_transfer_params."""
ONLY_LOADS = "only_loads"
"""Key in a loader's parameters; False once the worker was told that there is nothing to load."""
_NOTHING = ConnectorMetadata()


@dataclass(slots=True)
class _Export:
    request_id: str
    published: int = 0
    """Full blocks that the bridge knows of."""
    internal_id: str = ""
    """vLLM's id of the request that the blocks belong to."""


class SchedulerSide:
    """Called by vLLM's scheduler; see `KVConnectorBase_V1` for when."""

    def __init__(self, bridge: CoreBridge, block_tokens: int) -> None:
        self._bridge = bridge
        self._block_tokens = block_tokens
        self._requests: dict[str, Any] = {}
        """vLLM's request by the mesh's id; read by the bridge's thread too."""
        self._exports: dict[str, _Export] = {}
        self._loaded: set[str] = set()
        """Carriers (vLLM's ids) that had their chance to load."""
        self._loading: set[str] = set()
        """Those of them whose load is not over."""
        self._orders = ConnectorMetadata()
        self._kv_cache_manager: Any = None
        self._holds = PrefixHolds(block_tokens, bridge.holds.__contains__, self._publish_hold)
        self._host = HostBlocks(block_tokens, lambda: bridge.host)
        bridge.internal_id = self.internal_id
        bridge.free_blocks = self.free_blocks

    def bind(self, kv_cache_manager: Any) -> None:
        """vLLM's KV cache manager, which knows the blocks of each request. Called once, before the first step."""
        self._kv_cache_manager = kv_cache_manager
        self._holds.bind(kv_cache_manager)
        self._host.bind(kv_cache_manager)

    def internal_id(self, request_id: str) -> str:
        """vLLM's id of a request, empty if it is not here. From any thread."""
        request = self._requests.get(request_id)
        return "" if request is None else str(request.request_id)

    def free_blocks(self) -> int:
        """From any thread; as of some moment within the current step."""
        return int(self._kv_cache_manager.block_pool.get_num_free_blocks())

    def on_new_request(self, request: Any) -> None:
        """Remember vLLM's request under the mesh's id, and have its grammar go on where it stands. Called when the
        request enters vLLM's waiting queue."""
        parameters = self._parameters(request)
        if HOLD in parameters:
            self._holds.begin(request, parameters)
            return
        request_id = parameters.get("request_id")
        if request_id is not None:
            self._requests[request_id] = request
            self._host.on_new_request(request)
        continue_grammar(request, parameters.get("grammar_tokens", 0))

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the local prefix cache's come from elsewhere, and whether they take time; None: it
        must not run, or not yet."""
        parameters = self._parameters(request)
        if HOLD in parameters:
            return None, False
        if "load_id" in parameters:
            if request.request_id in self._loaded:
                return 0, False
            return request.num_tokens - local_tokens, True
        if "staged" in parameters:
            first_token = parameters["first_block"] * self._block_tokens
            tokens = min(parameters["computed_tokens"], request.num_tokens - 1) - local_tokens
            # Where blocks were evicted in front of the staged ones, all of it is computed again.
            if tokens > 0 and local_tokens >= first_token and self._bridge.staged(parameters["staged"]):
                return tokens, False
            return 0, False
        tokens, takes_time = self._host.matched_tokens(request, local_tokens)
        if ONLY_LOADS in parameters and tokens == 0:
            if parameters[ONLY_LOADS]:
                parameters[ONLY_LOADS] = False
                self._bridge.tell_nothing_loaded(parameters["request_id"])
            return None, False
        return tokens, takes_time

    def allocated(self, request: Any, block_ids: list[int], external_tokens: int) -> None:
        """The request has blocks for what was matched."""
        parameters = self._parameters(request)
        if "load_id" in parameters and external_tokens:
            self._order_load(request, parameters, block_ids, external_tokens)
        elif "staged" in parameters:
            self._order_fill(request, parameters, block_ids, external_tokens)
        else:
            self._host.allocated(request, block_ids, external_tokens)
            if external_tokens:
                parameters.pop(ONLY_LOADS, None)

    def step_metadata(self, output: Any) -> ConnectorMetadata:
        """The worker side's part in the step that `output` describes."""
        inbox = self._bridge.inbox
        if not inbox and not self._orders and not (self._exports or self._holds.is_waiting or self._host.is_active):
            return _NOTHING
        self._read_inbox()
        self._holds.step()
        self._host.step(output)
        if self._exports:
            self._break_preempted(output)
            self._publish(output)
        orders, self._orders = self._orders, ConnectorMetadata()
        orders.host_loads, self._host.orders = self._host.orders, []
        return orders

    def finished(self, request: Any, block_ids: list[int]) -> bool:
        """The request ended or was aborted. Whether its blocks are to be held until `sent` names it."""
        parameters = self._parameters(request)
        if HOLD in parameters:
            return self._holds.ended(parameters[HOLD])
        if "load_id" in parameters:
            self._loaded.discard(request.request_id)
            if request.request_id in self._loading:
                self._bridge.cancel_load(request.request_id)
            return False
        if "staged" in parameters:
            self._orders.unstaged.append(parameters["staged"])
        request_id = parameters.get("request_id")
        if request_id is None or request_id not in self._requests or self._requests[request_id] is not request:
            return False
        del self._requests[request_id]
        # An export may have been asked for since the last step.
        self._read_inbox()
        self._host.finished(request)
        exported = [name for name, export in self._exports.items() if export.request_id == request_id]
        is_pause = request_id in self._bridge.pauses
        self._bridge.pauses.discard(request_id)
        if is_pause and request.status == RequestStatus.FINISHED_ABORTED:
            self._pause(request, request_id, block_ids, exported)
            return True
        if is_pause:
            self._bridge.tell_ended(request_id)
        for migration_id in exported:
            del self._exports[migration_id]
        if exported:
            self._bridge.end_exports(request.request_id, exported)
        return bool(exported)

    def _pause(self, request: Any, request_id: str, block_ids: list[int], exported: list[str]) -> None:
        # What an unfinished step computes is not counted, nor is the token that has yet to be computed.
        computed = max(0, min(_computed(request), request.num_tokens - 1))
        blocks = tuple(block_ids[: -(-computed // self._block_tokens)])
        for migration_id in exported:
            export = self._exports.pop(migration_id)
            self._bridge.publish(migration_id, request.request_id, export.published, blocks[export.published :])
        notice = PausedNotice(request_id, request.request_id, tuple(request.output_token_ids), computed, blocks)
        self._bridge.hold(request.request_id, exported, notice)

    def _read_inbox(self) -> None:
        while self._bridge.inbox:
            self._take(self._bridge.inbox.popleft())

    @property
    def has_pinned_blocks(self) -> bool:
        """Whether blocks become free soon without a preemption."""
        return self._host.pinned_blocks > 0

    def _take(self, event: InboxEvent) -> None:
        match event:
            case Exported(migration_id, request_id):
                self._exports[migration_id] = _Export(request_id)
            case Unexported(migration_id):
                self._exports.pop(migration_id, None)
            case Sent(internal_id):
                self._orders.sent.add(internal_id)
            case Loaded(internal_id, failed_blocks):
                self._host.take(event)
                self._orders.received.add(internal_id)
                self._orders.failed_blocks.update(failed_blocks)
            case Saved() | Fetched():
                self._host.take(event)
            case Received(carrier_id, failed_blocks):
                self._loading.discard(carrier_id)
                self._orders.received.add(carrier_id)
                self._orders.failed_blocks.update(failed_blocks)
            case Hurried(hold_id):
                self._holds.hurry(hold_id)
            case Unheld(hold_id):
                if internal_id := self._holds.let_go(hold_id):
                    self._orders.sent.add(internal_id)

    def _break_preempted(self, output: Any) -> None:
        for internal_id in output.preempted_req_ids or ():
            for migration_id, export in tuple(self._exports.items()):
                if export.internal_id == internal_id:
                    # Never exported again: other blocks under ids that the peer was told would be taken for these.
                    del self._exports[migration_id]
                    self._orders.broken.append(migration_id)

    def _publish(self, output: Any) -> None:
        # The blocks that a request was admitted with are filled by this very step.
        fresh = {new.req_id for new in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        for migration_id, export in self._exports.items():
            request = self._requests.get(export.request_id)
            if request is None or request.request_id in fresh or request.status != RequestStatus.RUNNING:
                continue
            full = max(0, _computed(request)) // self._block_tokens
            if full > export.published:
                ids = self._kv_cache_manager.get_block_ids(request.request_id)[0][export.published : full]
                self._bridge.publish(migration_id, request.request_id, export.published, tuple(ids))
                export.published, export.internal_id = full, request.request_id

    def _publish_hold(self, hold_id: str, block_ids: tuple[int, ...]) -> None:
        if self._bridge.has_ranks:
            # Their processes may be steps behind: with this step they have computed all that was composed before.
            self._orders.held.append(HeldPrefix(hold_id, block_ids))
        else:
            self._bridge.publish_hold(HeldPrefix(hold_id, block_ids))

    def _order_load(self, request: Any, parameters: dict[str, Any], block_ids: list[int], tokens: int) -> None:
        self._loaded.add(request.request_id)
        self._loading.add(request.request_id)
        blocks = request.num_tokens // self._block_tokens
        local = (request.num_tokens - tokens) // self._block_tokens
        self._orders.loads.append(
            Load(
                carrier_id=request.request_id,
                load_id=parameters["load_id"],
                migration_id=parameters["migration_id"],
                peer=parameters["peer"],
                peer_block_ids=tuple(parameters["peer_block_ids"][local:blocks]),
                block_ids=tuple(block_ids[local:blocks]),
                deadline_s=parameters["deadline_s"],
            )
        )

    def _parameters(self, request: Any) -> dict[str, Any]:
        parameters: dict[str, Any] = (request.kv_transfer_params or {}).get(PARAMETERS, {})
        return parameters if parameters and self._bridge.is_ours(parameters) else {}

    def _order_fill(self, request: Any, parameters: dict[str, Any], block_ids: list[int], tokens: int) -> None:
        staging_ids = self._bridge.staged(parameters["staged"])
        if tokens and staging_ids:
            end = min(parameters["computed_tokens"], request.num_tokens - 1)
            first, last = (end - tokens) // self._block_tokens, -(-end // self._block_tokens)
            skipped = first - parameters["first_block"]
            self._orders.fills.append(
                StagingCopy(tuple(staging_ids[skipped : skipped + last - first]), tuple(block_ids[first:last]))
            )
        # From here on the request is like any other, after a preemption too.
        self._orders.unstaged.append(parameters.pop("staged"))


def _computed(request: Any) -> int:
    """Tokens that steps which are over have computed."""
    return int(request.num_computed_tokens - request.num_in_flight_tokens)
