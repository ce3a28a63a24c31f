"""What a simulation is of: instances, links, reports, failures and bounds."""

from dataclasses import dataclass, field

from controlplane.model.instance import InstancePhase
from controlplane.model.step_costs import StepCosts
from controlplane.protocols.migration.limits import ManagerLimits
from controlplane.protocols.recovery import RecoveryLimits
from mesh.errors import ConfigurationError
from simulator.cost.model import CostModel
from simulator.instance.config import InstanceConfig

_GIB_PER_S_IN_BYTES_PER_MS = (1 << 30) / 1000


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance dies, and with it its cache; its requests are placed anew and go on after their last token."""

    instance: int
    """The number of the instance that dies, counted from 0."""
    at_s: float
    back_after_s: float | None = None
    """When a fresh incarnation joins, empty; None: never."""

    def __post_init__(self) -> None:
        if self.at_s < 0 or (self.back_after_s is not None and self.back_after_s <= 0):
            raise ConfigurationError(f"a failure needs at_s >= 0 and back_after_s > 0, got {self}")


@dataclass(frozen=True, slots=True)
class KvLinkConfig:
    """An instance's way to the others for KV blocks; sending and receiving share it."""

    latency_ms: float = 1.0
    """From the start of a transfer until its bytes flow."""
    bandwidth_gib_per_s: float = 23.0
    """The default is a 200 Gbit/s link, less its headers."""
    max_parallel: int = 3
    """Transfers at once (CascadeInfer, section 5); more wait for their turn."""

    def __post_init__(self) -> None:
        if self.latency_ms < 0 or self.bandwidth_gib_per_s <= 0 or self.max_parallel < 1:
            raise ConfigurationError(
                f"a KV link needs latency_ms >= 0, bandwidth_gib_per_s > 0 and max_parallel >= 1, got {self}"
            )

    @property
    def bytes_per_ms(self) -> float:
        """The bandwidth in the simulator's units."""
        return self.bandwidth_gib_per_s * _GIB_PER_S_IN_BYTES_PER_MS


@dataclass(frozen=True, slots=True)
class MigrationConfig:
    """How instances move requests: by the bounds of the live ones, unless an experiment wants others."""

    limits: ManagerLimits = field(default_factory=ManagerLimits)
    message_delay_ms: float = 0.5
    """Of a message between two instances."""
    tick_ms: float = 50.0
    """How often the managers are told that time has passed."""

    def __post_init__(self) -> None:
        if self.message_delay_ms < 0 or self.tick_ms <= 0:
            raise ConfigurationError(f"migrations need message_delay_ms >= 0 and tick_ms > 0, got {self}")


@dataclass(frozen=True, slots=True)
class KvReuseConfig:
    """Where instances may get KV from that they have not cached. All off unless an experiment wants it."""

    pulls: bool = False
    """From each other, over their links."""
    host_factor: float = 0.0
    """From their host's memory, which holds so many times the KV memory of its instances; 0: it holds none."""
    host_instances: int = 8
    """How many instances a host has."""
    load_latency_ms: float = 0.5
    """Before the bytes of a load flow."""
    load_gib_per_s: float = 12.0
    """Of an instance's way to its host's memory; the default is half of PCIe 4.0 x16."""

    def __post_init__(self) -> None:
        if self.host_factor < 0 or self.host_instances < 1 or self.load_latency_ms < 0 or self.load_gib_per_s <= 0:
            raise ConfigurationError(
                "reuse of KV needs host_factor and load_latency_ms >= 0, host_instances >= 1 and load_gib_per_s > 0, "
                f"got {self}"
            )

    def load_token_ms(self, instance: InstanceConfig) -> float:
        """Of the load of a token's KV, once it flows."""
        return instance.block_bytes / instance.block_tokens / (self.load_gib_per_s * _GIB_PER_S_IN_BYTES_PER_MS)


@dataclass(frozen=True, slots=True)
class SchedulersConfig:
    """Who places requests, and how late they hear of each other's placements."""

    count: int = 1
    """Each request is placed by one of them, drawn by chance."""
    share_ms: float | None = 2.5
    """From a placement until the other schedulers count it; the default is the live batching and a message. None: they
    never tell each other, and learn of it from reports."""
    bounce_tokens: int = 0
    """Instances give a request back where so many prompt tokens more wait than its scheduler believed; 0: never."""

    def __post_init__(self) -> None:
        if self.count < 1 or (self.share_ms is not None and self.share_ms < 0) or self.bounce_tokens < 0:
            raise ConfigurationError(f"schedulers need count >= 1, share_ms >= 0 and bounce_tokens >= 0, got {self}")


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance, where they differ."""

    config: InstanceConfig
    cost: CostModel | None = None
    """None: that of the simulation."""
    phase: InstancePhase = InstancePhase.ANY
    link: KvLinkConfig | None = None
    """None: that of the cluster."""
    profiled: StepCosts | None = None
    """What a profile of it says; None: what one says of all of the cluster."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Instances of one model, and how old what the scheduler knows of them is."""

    instances: int
    instance: InstanceConfig
    model: str = "simulated"
    report_interval_ms: float = 50.0
    """Each instance reports load and cache changes this often, at a phase of its own; 0: just in time for each
    placement."""
    report_delay_ms: float = 1.0
    """From an instance to the scheduler."""
    failures: tuple[Failure, ...] = ()
    seed: int = 0
    """Phases of the reports follow from it."""
    skip_steps: bool = field(default=True, kw_only=True)
    """Take runs of steps at once; off, every step is planned by itself, for the same results."""
    specs: tuple[InstanceSpec, ...] = field(default=(), kw_only=True)
    """Each instance by itself; empty: all are like `instance`."""
    link: KvLinkConfig = field(default_factory=KvLinkConfig, kw_only=True)
    migration: MigrationConfig = field(default_factory=MigrationConfig, kw_only=True)
    kv_reuse: KvReuseConfig = field(default_factory=KvReuseConfig, kw_only=True)
    profiled: StepCosts | None = field(default=None, kw_only=True)
    """What the scheduler is told that steps cost, by a profile; None: nothing."""
    schedulers: SchedulersConfig = field(default_factory=SchedulersConfig, kw_only=True)
    recovery: RecoveryLimits = field(default_factory=RecoveryLimits, kw_only=True)
    """How long requests wait for an instance, those that have lost theirs included."""

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise ConfigurationError(f"a cluster has at least one instance, got {self.instances}")
        if self.specs and len(self.specs) != self.instances:
            raise ConfigurationError(f"{self.instances} instances, but {len(self.specs)} specs")
        if any(spec.config.block_tokens != self.instance.block_tokens for spec in self.specs):
            raise ConfigurationError("all instances of a cluster have blocks of the same number of tokens")
        if self.report_interval_ms < 0 or self.report_delay_ms < 0:
            raise ConfigurationError("report_interval_ms and report_delay_ms must not be negative")
        down_until: dict[int, float] = {}
        for failure in sorted(self.failures, key=lambda failure: failure.at_s):
            if not 0 <= failure.instance < self.instances:
                raise ConfigurationError(f"{failure}: instances are numbered 0 to {self.instances - 1}")
            if failure.at_s <= down_until.get(failure.instance, -1.0):
                raise ConfigurationError(f"{failure}: this instance is down at that time already")
            back_s = float("inf") if failure.back_after_s is None else failure.at_s + failure.back_after_s
            down_until[failure.instance] = back_s

    def spec(self, number: int) -> InstanceSpec:
        """Instance `number`, counted from 0."""
        return self.specs[number] if self.specs else InstanceSpec(self.instance)
