"""How far a supervisor has come with the plans in force: a record in the state store, kept under its lease."""

import msgspec

DEPLOYMENTS_PREFIX = "/penstock/deployments/"
"""Followed by the supervisor's name."""


class MissingReplicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal replicas that are planned and do not serve."""

    model: str
    count: int
    tp: int
    pp: int
    why: str


class DeploymentRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What runs where one supervisor starts and drains instances, against what is planned."""

    supervisor: str
    plans: dict[str, int]
    """By cascade: revision of the plan that is being followed; 0 where an operator has set thresholds since."""
    missing: tuple[MissingReplicas, ...] = ()
    leaving: tuple[str, ...] = ()
    """Instances that are to go and still run."""

    @property
    def key(self) -> str:
        """The record's key in the state store."""
        return DEPLOYMENTS_PREFIX + self.supervisor

    @property
    def is_reached(self) -> bool:
        """Whether exactly what is planned serves."""
        return not self.missing and not self.leaving
