"""Which instances form which stage."""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import msgspec

from controlplane.planning.stage_plan import StagePlan
from mesh.errors import ConfigurationError


class StageLayout(msgspec.Struct, frozen=True):
    """A stage plan with its instances, by ascending length."""

    model: str
    revision: int
    """Of the plan; a new plan has a higher one."""
    stages: tuple[tuple[str, ...], ...]
    """Instance ids; each in one stage, none empty."""
    boundaries_tokens: tuple[int, ...]
    """The longest sequence of each stage but the last, strictly ascending."""

    def __post_init__(self) -> None:
        members = [instance_id for stage in self.stages for instance_id in stage]
        if not all(self.stages) or not members or len(set(members)) != len(members):
            raise ConfigurationError(f"every stage needs an instance and every instance one stage, got {self.stages}")
        ascending = all(a < b for a, b in pairwise((0, *self.boundaries_tokens)))
        if len(self.boundaries_tokens) != len(self.stages) - 1 or not ascending:
            raise ConfigurationError(
                f"{len(self.stages)} stages need one boundary less, ascending, got {self.boundaries_tokens}"
            )

    @property
    def instance_ids(self) -> tuple[str, ...]:
        return tuple(instance_id for stage in self.stages for instance_id in stage)

    def stage_of(self, length_tokens: int) -> int:
        """The earliest stage whose range covers this length."""
        return bisect_left(self.boundaries_tokens, length_tokens)

    def stage_with(self, instance_id: str) -> int | None:
        """Number of the stage that an instance is in, from 0; None if it is in none."""
        return next((number for number, stage in enumerate(self.stages) if instance_id in stage), None)

    def covering(self, alive: Collection[str]) -> "StageLayout | None":
        """Without the instances that are not alive; None if none is.

        A stage that has lost its last instance is covered by the next one that has any, downstream; past the last of
        these, by the one upstream.
        """
        stages = [tuple(each for each in stage if each in alive) for stage in self.stages]
        kept = [number for number, stage in enumerate(stages) if stage]
        if not kept:
            return None
        boundaries = tuple(self.boundaries_tokens[number] for number in kept[:-1])
        return StageLayout(self.model, self.revision, tuple(stages[number] for number in kept), boundaries)

    def refined(self, boundaries_tokens: Mapping[str, float]) -> "StageLayout":
        """With the boundaries that instances have found since, each stage's being the mean over those that have said.

        Boundaries that would not ascend, as may be for a moment, are pushed up.
        """
        found: list[int] = []
        lower = 0
        for stage, planned in zip(self.stages, self.boundaries_tokens, strict=False):
            said = [boundaries_tokens[each] for each in stage if each in boundaries_tokens]
            wanted = round(sum(said) / len(said)) if said else planned
            lower = max(wanted, lower + 1)
            found.append(lower)
        return StageLayout(self.model, self.revision, self.stages, tuple(found))


def assign(
    plan: StagePlan, instance_ids: Sequence[str], *, model: str, revision: int, before: StageLayout | None = None
) -> StageLayout:
    """Give each stage of the plan its instances.

    `instance_ids` come in an order in which neighbours are close (the same host, say): adjacent stages exchange most.
    Instances stay in the order of their stages of `before`, so that few requests find themselves out of range.
    Raises `ConfigurationError` if the plan is for another number of instances.
    """
    if sum(plan.instances) != len(instance_ids):
        raise ConfigurationError(f"the plan is for {sum(plan.instances)} instances, there are {len(instance_ids)}")
    place = {instance_id: number for number, instance_id in enumerate(instance_ids)}

    def order(instance_id: str) -> tuple[float, int]:
        stage = None if before is None else before.stage_with(instance_id)
        # A newcomer goes where it is needed: after everybody who has a stage.
        return (float("inf") if stage is None else stage, place[instance_id])

    ordered = iter(sorted(instance_ids, key=order))
    stages = tuple(tuple(next(ordered) for _ in range(size)) for size in plan.instances)
    return StageLayout(model, revision, stages, plan.boundaries_tokens)
