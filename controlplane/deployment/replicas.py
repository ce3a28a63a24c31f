"""Instances as a plan counts them: their shapes, and how far each has come (pure)."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from controlplane.planning.cascade.plan import CascadePlan

Shape = tuple[int, int]
"""An engine's degrees of (tensor, pipeline) parallelism; their product is the number of GPUs of each engine core."""


class ReplicaState(StrEnum):
    """How far an instance has come. STARTING -> SERVING -> ENDING; STARTING and SERVING fall to FAILED."""

    STARTING = "starting"
    """Its process runs, or is about to be started again, and has not joined the mesh."""
    SERVING = "serving"
    FAILED = "failed"
    """It did not join in time, or kept ending. It serves nobody and still holds its GPUs."""
    ENDING = "ending"
    """It finishes or moves what runs on it and still holds its GPUs."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One instance of a planned model."""

    name: str
    model: str
    shape: Shape
    state: ReplicaState


def gpus_of(shape: Shape) -> int:
    """How many GPUs an engine core of this shape spans."""
    tp, pp = shape
    return tp * pp


def wanted_by(plans: Iterable[CascadePlan]) -> Mapping[str, Counter[Shape]]:
    """Replicas by model and shape, smallest tiers first: the sum over all plans, since each plan was made for load and
    GPUs of its own. A model that plans know and give nothing has an empty counter."""
    wanted: dict[str, Counter[Shape]] = {}
    for plan in plans:
        for tier in plan.tiers:
            counts = wanted.setdefault(tier.model, Counter())
            for each in tier.replicas:
                counts[each.tp, each.pp] += each.count
    return wanted


def with_scales(
    planned: Mapping[str, Counter[Shape]],
    scales: Mapping[str, int | Counter[Shape]],
    shapes: Mapping[str, Shape],
) -> Mapping[str, Counter[Shape]]:
    """What plans want, and at least as many of each scaled model as its scale says: in the shapes that it says, or in
    the model's shape here.

    The larger of the two counts: a plan was made for a part of the load that the scale was decided by.
    """
    wanted = {model: Counter(counts) for model, counts in planned.items()}
    for model, replicas in scales.items():
        counts = wanted.setdefault(model, Counter())
        if isinstance(replicas, Counter):
            wanted[model] = counts | replicas
            continue
        more = replicas - counts.total()
        if more > 0:
            counts[shapes[model]] += more
    return wanted


def new_name(model: str, taken: Collection[str]) -> str:
    """For another instance of the model: the first that nobody has."""
    return next(name for number in range(len(taken) + 1) if (name := f"{id_part(model)}-{number}") not in taken)


def id_part(model: str) -> str:
    """A model's name in the ids of its instances, which hold no slash; the Hub's cache writes ids alike."""
    return model.replace("/", "--")


def shape_of(engine_args: Sequence[str]) -> Shape:
    """Of an engine with these settings (NAME=VALUE)."""
    return _degree(engine_args, "tensor_parallel_size"), _degree(engine_args, "pipeline_parallel_size")


def cores_of(engine_args: Sequence[str]) -> int:
    """Engine cores of an engine with these settings (data parallelism), each of its shape."""
    return _degree(engine_args, "data_parallel_size")


def shaped(engine_args: Sequence[str], shape: Shape) -> tuple[str, ...]:
    """The settings of an engine in another shape."""
    kept = [
        each for each in engine_args if each.partition("=")[0] not in ("tensor_parallel_size", "pipeline_parallel_size")
    ]
    tp, pp = shape
    return (
        *kept,
        *((f"tensor_parallel_size={tp}",) if tp > 1 else ()),
        *((f"pipeline_parallel_size={pp}",) if pp > 1 else ()),
    )


def _degree(engine_args: Sequence[str], setting: str) -> int:
    """The last one that is a number; what is none the engine refuses."""
    given = [value for name, _, value in (each.partition("=") for each in engine_args) if name == setting]
    return next((int(value) for value in reversed(given) if value.isdecimal()), 1)
