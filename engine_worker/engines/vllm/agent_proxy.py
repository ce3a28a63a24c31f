"""The KV transfer agent in the engine core, as the worker's process asks it."""

from collections.abc import Sequence

from engine_worker.engines.vllm.connector.channel import CoreChannel
from engine_worker.engines.vllm.connector.messages import AskStatus, Describe, Described, OrderPull, Pulled, Status
from engine_worker.kv.connection import PeerAddress
from engine_worker.kv.transfer import AgentDescription, AgentStatus, TransferStats


class AgentProxy:
    """The `KvTransferAgent` in the engine core's process, as an `AgentPort`. Every call raises what the agent raises,
    and `EngineFailed` if the core is dead."""

    def __init__(self, channel: CoreChannel) -> None:
        self._channel = channel
        self.ports: tuple[int, ...] = ()
        """Where peers connect, a port for each rank, as of the last answer."""

    async def describe(self) -> AgentDescription:
        answer = await self._channel.ask(Describe())
        assert isinstance(answer, Described)
        self.ports = (answer.agent.port, *answer.agent.more_ports)
        return answer.agent

    async def status(self) -> AgentStatus:
        answer = await self._channel.ask(AskStatus())
        assert isinstance(answer, Status)
        self.ports = (answer.agent.port, *answer.agent.more_ports)
        return answer.agent

    async def pull_reserved(
        self,
        peer: PeerAddress,
        transfer_id: str,
        source_block_ids: Sequence[int],
        target_block_ids: Sequence[int],
        deadline_s: float,
    ) -> TransferStats:
        """See `PullOrders.pull`. It ends by its deadline, not with the caller's patience."""
        order = OrderPull(peer.with_token, transfer_id, tuple(source_block_ids), tuple(target_block_ids), deadline_s)
        answer = await self._channel.ask(order)
        assert isinstance(answer, Pulled)
        return answer.stats
