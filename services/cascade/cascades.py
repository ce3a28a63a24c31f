"""The cascades in force, each with its judges."""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from controlplane.model.cascade_record import CASCADES_PREFIX, CascadeRecord
from mesh.errors import ConfigurationError
from mesh.store.interface import StateStore
from mesh.store.stored_folder import StoredFolder
from mesh.tasks import TaskSet
from services.cascade.judges.chain import JudgeChain
from services.cascade.judges.interface import Judge
from services.cascade.judges.parse import compares
from services.cascade.metrics import CascadeMetrics
from services.cascade.sampling.samplers import Samplers

log = logging.getLogger(__name__)


class _InUse(NamedTuple):
    judges: tuple[str, ...]
    label: str
    chain: JudgeChain
    labels: JudgeChain | None
    """Of the judge that labels samples."""


class Cascades:
    """Follows the state store; `make_judge` makes one from its text and the cascade's rubric, and raises
    `ConfigurationError` for a judge that there is not."""

    def __init__(
        self,
        store: StateStore,
        make_judge: Callable[[str, str], Judge],
        judge_deadline_s: float,
        clock: Callable[[], float],
        tasks: TaskSet,
        samplers: Samplers,
        metrics: CascadeMetrics,
    ) -> None:
        self._make_judge = make_judge
        self._judge_deadline_s = judge_deadline_s
        self._clock = clock
        self._tasks = tasks
        self._samplers = samplers
        self._metrics = metrics
        self._in_use: dict[str, _InUse] = {}
        self._folder = StoredFolder(store, CASCADES_PREFIX, CascadeRecord, self.check, self._on_change)

    @property
    def records(self) -> tuple[CascadeRecord, ...]:
        """All cascades in force, by name."""
        return tuple(self._folder.records[name] for name in sorted(self._folder.records))

    def find(self, name: str) -> CascadeRecord | None:
        """By name; the only one there is, if no name is given."""
        if not name and len(self._folder.records) == 1:
            return next(iter(self._folder.records.values()))
        return self._folder.records.get(name)

    def chain(self, record: CascadeRecord) -> JudgeChain:
        """The judges of a cascade that is in force."""
        return self._in_use[record.name].chain

    def check(self, record: CascadeRecord) -> None:
        """Raises `ConfigurationError` for a cascade that cannot be served."""
        record.checked()
        for text in (*record.judges, *([record.label] if record.label else [])):
            if text == f"model:{record.name}":
                raise ConfigurationError(
                    f"cascade {record.name}: it cannot judge its own answers; name one of its tiers"
                )
            self._make_judge(text, record.rubric)  # opens no connection before it is asked
        if compared := [text for text in record.judges if compares(text)]:
            raise ConfigurationError(
                f"cascade {record.name}: {compared[0]} compares an answer with the largest tier's, which is not there "
                "while a client waits; it can be the label (--label)"
            )

    async def follow(self) -> None:
        """Follow the cascades in the state store until cancelled."""
        await self._folder.follow()

    async def close(self) -> None:
        """Close the judges of all cascades."""
        in_use, self._in_use = list(self._in_use.values()), {}
        await asyncio.gather(*(chain.close() for each in in_use for chain in _chains(each)))

    def _on_change(self, name: str, record: CascadeRecord | None) -> None:
        former = self._in_use.pop(name, None)
        if record is None:
            self._samplers.end(name)
        else:
            if former is not None and (former.judges, former.label) == (record.judges, record.label):
                in_use, former = former, None  # its judgements go on, and a judge that rests goes on resting
            else:
                labels = self._new_chain((record.label,), record.rubric) if record.label else None
                in_use = _InUse(record.judges, record.label, self._new_chain(record.judges, record.rubric), labels)
            self._in_use[name] = in_use
            self._samplers.begin(record, in_use.chain, in_use.labels)
        for chain in _chains(former):
            self._tasks.spawn(chain.close_when_unused(), name=f"close the former judges of {name}")
        self._metrics.show_thresholds(self.records)
        log.warning("cascade changed", extra={"cascade": name, "record": str(record)})

    def _new_chain(self, texts: tuple[str, ...], rubric: str) -> JudgeChain:
        judges = [self._make_judge(text, rubric) for text in texts]
        return JudgeChain(judges, self._judge_deadline_s, self._clock)


def _chains(in_use: _InUse | None) -> tuple[JudgeChain, ...]:
    return () if in_use is None else tuple(filter(None, (in_use.chain, in_use.labels)))
