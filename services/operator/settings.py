"""Settings of the operator."""

from dataclasses import dataclass

from mesh.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class OperatorSettings:
    """Which pods the operator may have, and how long they may take. The cluster is the one that the process runs in, or
    that of KUBECONFIG."""

    namespace: str = ""
    """Namespace of the PenstockModels and of their pods; default: that of the operator's own pod or kubeconfig."""
    max_pods: int = 256
    """So many instances at most, of all models together."""
    ready_timeout_s: float = 1800.0
    """An instance that has not joined the mesh by then has failed: its image is pulled and its weights are loaded
    meanwhile."""
    instance_drain_s: float = 600.0
    """What an instance that is to end is given to move its requests or finish them; its pod is then killed."""

    def __post_init__(self) -> None:
        if self.max_pods < 1 or self.ready_timeout_s <= 0:
            raise ConfigurationError(
                f"--max-pods {self.max_pods} --ready-timeout-s {self.ready_timeout_s:g}: give numbers above 0"
            )
