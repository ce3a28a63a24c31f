"""The placement policy as the mesh has it configured: a key in the state store that every scheduler watches."""

import logging
from collections.abc import Mapping

import msgspec

from controlplane.policies.registry import NO_PARAMETERS, create_policy
from controlplane.scheduler.policy_switch import PolicySwitch
from mesh.store.interface import StateStore
from mesh.store.stored_setting import StoredSetting

log = logging.getLogger(__name__)

POLICY_KEY = "/penstock/config/policy"


class PolicyRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What stands at the key, as JSON."""

    name: str
    parameters: dict[str, float] = {}
    """Those that are missing take their defaults."""


class PolicyConfig:
    """Keeps the switch at what the store says, and writes there what operators ask for."""

    def __init__(self, store: StateStore, switch: PolicySwitch) -> None:
        self._switch = switch
        default = PolicyRecord(switch.configured.name, switch.configured.parameters.values())
        self._setting = StoredSetting(store, POLICY_KEY, PolicyRecord, default, self._apply)

    async def set(self, name: str, parameters: Mapping[str, float] = NO_PARAMETERS) -> None:
        """Switch all schedulers; returns when this one has. Raises `ConfigurationError` for a policy or parameters
        that there are not, `StoreError` and `DeadlineExceeded`.

        What is stored is every parameter, so that schedulers of another release with other defaults agree.
        """
        await self._setting.put(PolicyRecord(name, create_policy(name, parameters).parameters.values()))

    async def follow(self) -> None:
        """Apply what the store says, for ever; while it is away the policy stays as it is."""
        await self._setting.follow()

    def _apply(self, record: PolicyRecord, revision: int) -> None:
        """Configure the switch as stored. Raises `ConfigurationError` for a policy or parameter that there is not."""
        if self._switch.configure(record.name, record.parameters):
            log.warning(
                "placement policy switched",
                extra={"policy": record.name, "parameters": record.parameters, "revision": revision},
            )
