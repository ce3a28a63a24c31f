"""The placement policy as the mesh has it configured: a key in the state store that every scheduler watches."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing

import msgspec

from controlplane.policies.registry import NO_PARAMETERS, create_policy
from controlplane.scheduler.policy_switch import PolicySwitch
from mesh.errors import ConfigurationError, DeadlineExceeded, StoreCompacted, StoreError
from mesh.store.interface import StateStore

log = logging.getLogger(__name__)

POLICY_KEY = "/penstock/config/policy"
RETRY_S = 0.5
APPLIED_TIMEOUT_S = 3.0


class PolicyRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What stands at the key, as JSON."""

    name: str
    parameters: dict[str, float] = {}
    """Those that are missing take their defaults."""


class PolicyConfig:
    """Keeps the switch at what the store says, and writes there what operators ask for."""

    def __init__(self, store: StateStore, switch: PolicySwitch) -> None:
        self._store = store
        self._switch = switch
        self._default = PolicyRecord(switch.configured.name, switch.configured.parameters.values())
        self._revision = 0
        self._applied = asyncio.Condition()

    async def set(self, name: str, parameters: Mapping[str, float] = NO_PARAMETERS) -> None:
        """Switch all schedulers; returns when this one has. Raises `ConfigurationError` for a policy or parameters
        that there are not, `StoreError` and `DeadlineExceeded`.

        What is stored is every parameter, so that schedulers of another release with other defaults agree.

        It waits for its own watch instead of switching by itself: with two operators at once, every scheduler
        must end with the policy that was written last.
        """
        record = PolicyRecord(name, create_policy(name, parameters).parameters.values())
        revision = await self._store.put(POLICY_KEY, msgspec.json.encode(record))
        try:
            async with asyncio.timeout(APPLIED_TIMEOUT_S), self._applied:
                await self._applied.wait_for(lambda: self._revision >= revision)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the policy {name} is stored, but did not come back from the store within {APPLIED_TIMEOUT_S:g} s"
            ) from None

    async def follow(self) -> None:
        """Apply what the store says, for ever; while it is away the policy stays as it is."""
        while True:
            try:
                listing = await self._store.range(POLICY_KEY)
                found = [entry.value for entry in listing.entries if entry.key == POLICY_KEY]
                await self._apply(found[0] if found else None, listing.revision)
                async with aclosing(self._store.watch(POLICY_KEY, listing.revision + 1)) as events:
                    async for event in events:
                        if event.key == POLICY_KEY:
                            await self._apply(event.value if event.kind == "put" else None, event.mod_revision)
                return
            except StoreCompacted as error:
                log.info("reading the policy again", extra={"reason": str(error)})
            except StoreError as error:
                log.warning("the state store cannot be reached; trying again", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S)

    async def _apply(self, value: bytes | None, revision: int) -> None:
        try:
            record = self._default if value is None else msgspec.json.decode(value, type=PolicyRecord)
            if self._switch.configure(record.name, record.parameters):
                log.warning(
                    "placement policy switched",
                    extra={"policy": record.name, "parameters": record.parameters, "revision": revision},
                )
        except (msgspec.MsgspecError, ConfigurationError) as error:
            log.error(
                "the stored placement policy cannot be used and is ignored",
                extra={"key": POLICY_KEY, "error": str(error), "policy": self._switch.configured.name},
            )
        async with self._applied:
            self._revision = max(self._revision, revision)
            self._applied.notify_all()
