"""What a worker says of itself where its requests cannot move: in its load reports, and so in `penstock status`."""

from dataclasses import replace
from typing import cast

import pytest

from engine_worker.engines.simulated_movable import MovableSimulatedEngine
from engine_worker.engines.vllm.data_parallel import vllm_engine
from engine_worker.engines.vllm.settings import VllmSettings
from engine_worker.instance import Instance
from engine_worker.kv.fabric import KvFabric
from engine_worker.kv.service import AgentPort
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.transfer import AgentStatus
from engine_worker.transfer_watch import TransferWatch
from mesh.errors import ConfigurationError, KvTransferRefused, PeerUnavailable, PenstockError
from mesh.runtime import SystemClock
from services.cli.supervisor.local_mesh import DEMO_MODELS
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig

VLLM = VllmSettings(model_path=str(DEMO_MODELS / "demo-small"))


class Told:
    """An instance, as far as it is told."""

    transfer_obstacle = ""


class Agent:
    """Answers with its status, or raises what it is to."""

    def __init__(self, answer: AgentStatus | PenstockError) -> None:
        self.answer = answer

    async def status(self) -> AgentStatus:
        if isinstance(self.answer, PenstockError):
            raise self.answer
        return self.answer


async def looked(*found: Agent | PenstockError) -> str:
    """The obstacle after a look at each."""
    told, agents = Told(), list(found)

    def agent() -> AgentPort:
        following = agents.pop(0)
        if isinstance(following, PenstockError):
            raise following
        return cast(AgentPort, following)

    watch = TransferWatch(cast(Instance, told), agent, SystemClock())
    for _ in found:
        await watch.look()
    return told.transfer_obstacle


WELL = AgentStatus(0, 0, 0, 0, 0, (), 0, 0, 0, 0, 0.0)
STUCK = replace(WELL, obstacle="eth0 was made anew")


@pytest.mark.parametrize(
    ("found", "obstacle"),
    [
        (
            (KvTransferRefused("its layers keep a part of the context only"),),
            "its layers keep a part of the context only",
        ),
        ((ConfigurationError("movable=false"),), ""),
        ((Agent(STUCK),), "eth0 was made anew"),
        ((Agent(STUCK), Agent(PeerUnavailable("hangs"))), "eth0 was made anew"),
        ((Agent(STUCK), Agent(WELL)), ""),
    ],
)
async def test_an_obstacle_is_told_unless_it_was_asked_for(
    found: tuple[Agent | PenstockError, ...], obstacle: str
) -> None:
    assert await looked(*found) == obstacle


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (VLLM, KvTransferRefused),
        (replace(VLLM, data_parallel_size=2), KvTransferRefused),
        (replace(VLLM, movable=False), ConfigurationError),
        (replace(VLLM, runner="pooling"), ConfigurationError),
    ],
)
def test_vllm_engines_tell_whether_they_were_to_move(settings: VllmSettings, expected: type[PenstockError]) -> None:
    with pytest.raises(expected, match="not been started"):
        vllm_engine(settings).kv_agent()


def no_fabric(settings: KvTransferSettings) -> KvFabric:
    raise ConfigurationError("UCX is not installed")


async def test_an_engine_without_a_fabric_says_why() -> None:
    engine = MovableSimulatedEngine(InstanceConfig(), LinearCost(), SystemClock(), make_fabric=no_fabric)
    await engine.start()
    with pytest.raises(KvTransferRefused, match="UCX is not installed"):
        engine.kv_agent()
    await engine.stop()
