"""What only one process of the mesh may do at a time; each has a leader (`mesh.leadership`)."""

from typing import Final

POOLS: Final = "pools"
"""A scheduler: placing by a policy that keeps instances in pools of its own making."""
RESCHEDULER: Final = "rescheduler"
"""A scheduler: moving running requests."""
STAGES: Final = "stages"
"""A planner: the plans of stages."""
CASCADES: Final = "cascades"
"""A planner: the plans of cascades."""
AUTOSCALE: Final = "autoscale"
"""A planner: how many replicas models have."""
OPERATOR: Final = "operator"
"""An operator: the pods of a Kubernetes cluster."""
