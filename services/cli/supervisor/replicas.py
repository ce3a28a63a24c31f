"""Which instances of a model to start and which to end, so that a plan's replicas run (pure)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controlplane.planning.cascade.plan import PlannedTier

Shape = tuple[int, int]
"""(tensor, pipeline) parallel."""


@dataclass(frozen=True, slots=True)
class Change:
    """From the instances that run to those that are planned."""

    start: tuple[tuple[str, Shape], ...]
    """(name, shape), names new."""
    end: tuple[str, ...]
    starts_first: bool
    """Ending those first would leave nobody to serve the model meanwhile."""


def change_of(tier: PlannedTier, running: Mapping[str, Shape]) -> Change:
    """Instances whose shape is planned stay; of too many, those started last end first."""
    wanted = Counter({(each.tp, each.pp): each.count for each in tier.replicas})
    kept: list[str] = []
    for name, shape in running.items():
        if wanted[shape] > 0:
            wanted[shape] -= 1
            kept.append(name)
    end = tuple(name for name in running if name not in kept)
    numbers = (number for number in range(len(running) + wanted.total() + 1) if f"{tier.model}-{number}" not in running)
    start = tuple((f"{tier.model}-{next(numbers)}", shape) for shape in wanted.elements())
    return Change(start, end, starts_first=bool(start) and not kept)


def shape_of(engine_options: Sequence[str]) -> Shape:
    """Of an engine with these settings (NAME=VALUE)."""
    degrees = {"tensor_parallel": 1, "pipeline_parallel": 1}
    for option in engine_options:
        name, _, value = option.partition("=")
        if name in degrees and value.isdecimal():
            degrees[name] = int(value)
    return degrees["tensor_parallel"], degrees["pipeline_parallel"]


def shaped(engine_options: Sequence[str], shape: Shape) -> tuple[str, ...]:
    """The settings of an engine in another shape."""
    kept = [each for each in engine_options if each.partition("=")[0] not in ("tensor_parallel", "pipeline_parallel")]
    tp, pp = shape
    return (*kept, *((f"tensor_parallel={tp}",) if tp > 1 else ()), *((f"pipeline_parallel={pp}",) if pp > 1 else ()))
