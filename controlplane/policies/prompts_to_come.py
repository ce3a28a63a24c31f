"""How much slower an answer is decoded where prompts come.

A step that computes a piece of a prompt is many times as long as one that only decodes, and everybody there waits for
it. Placement that takes an answer to run undisturbed sends long prompts where few run, again and again, and there they
wait for each other and are decoded beside each other.

In the time that an answer takes undisturbed, as many prompts come as came in as long a time of late; what comes in the
time that those take is left out. With that, too (a pace of 1 / (1 - share), as `prefill_shares` has it for a move),
answers seem to take ten times as long where prompts are nearly always computed, all shun such instances together, and
others were swamped: 18 % longer end to end on a mix of short and long prompts near what is sustained, 30 % on a
held-out trace.
"""

from typing import Final

import numpy as np

from controlplane.model.instance import InstanceDescription
from controlplane.model.placement import PlacementProblem
from controlplane.model.prompt_prices import PriceRow
from controlplane.model.snapshot import Snapshot
from controlplane.policies.kv_options import Milliseconds, step_costs
from controlplane.policies.selection import MAX_MODELS

REMEMBERED_S: Final = 30.0
"""An answer is over sooner. But what the prompts of one answer's time say is mostly chance: with the pace of
1 / (1 - share), remembering them for one or three usual answers made short answers take 5 to 14 % longer, and 10, 30
and 60 s made no difference there."""
LEAST_REMEMBERED_S: Final = 0.5
"""At first, what was placed is a share of the time since then, and of so much at least."""
GUESSED_PROMPTS: Final = 3.0
"""Each instance counts as having had so many mean prompts before the first, which are forgotten like all others. With
few prompts, how much the instances differ is chance: without this a mesh of like instances took the first one
that it had used for busy, by more than what it had cached was worth. Like it, the share by time alone (as if all were
idle before) sends no early request astray, but `m-large`, whose 1,200 requests come within half a minute, took 5.6 %
longer with it; a guess that is never forgotten made coding agents take up to 2 % longer, with three or ten prompts."""
REFRESH_S: Final = 0.1


def prompt_work_ms(problem: PlacementProblem, row: int, had_tokens: int) -> float:
    """What the instance computes for the prompt, of which it need not compute `had_tokens`."""
    snapshot, prompt_tokens = problem.snapshot, problem.request.prompt_tokens
    new = max(prompt_tokens - had_tokens, 1)
    fixed, token, _, _, pair = snapshot.uniform_costs or snapshot.costs[:, row].tolist()
    step_tokens = max(1, int(snapshot.step_tokens[row]))
    return float(new * (token + fixed / step_tokens + pair * (prompt_tokens - 0.5 * new)))


class _Prompts:
    """What one model's instances have been given to compute. Arrays are in the order of `instances`."""

    def __init__(self, instances: tuple[InstanceDescription, ...], now_s: float) -> None:
        self.instances = instances
        self.since_s = now_s
        self.at_s = now_s
        self.work_ms = np.zeros(len(instances))
        """As of `at_s`, what is older counting less."""
        self.prompts = 0.0
        """How many prompts that is, on all instances together."""
        self.slowdown: Milliseconds = np.zeros(len(instances))

    def follow(self, snapshot: Snapshot, now_s: float) -> None:
        """Time passes, and instances come and go."""
        is_other = snapshot.instances is not self.instances
        if is_other:
            known = {each.instance_id: ms for each, ms in zip(self.instances, self.work_ms.tolist(), strict=True)}
            self.work_ms = np.array([known.get(each.instance_id, 0.0) for each in snapshot.instances])
            self.instances = snapshot.instances
            # Those that have gone take their prompts along: about as large a share of them as of the work.
            self.prompts *= float(self.work_ms.sum()) / (sum(known.values()) or 1.0)
        if is_other or now_s - self.at_s >= REFRESH_S:
            remembered = np.exp(min(0.0, self.at_s - now_s) / REMEMBERED_S)
            self.work_ms *= remembered
            self.prompts *= float(remembered)
            self.at_s = now_s
            self.slowdown = self._slowdown(snapshot)

    def _slowdown(self, snapshot: Snapshot) -> Milliseconds:
        unknown = float(np.exp((self.since_s - self.at_s) / REMEMBERED_S))
        lasted_ms = 1000 * max(REMEMBERED_S * (1 - unknown), LEAST_REMEMBERED_S)
        guessed = GUESSED_PROMPTS * len(self.instances) * unknown
        mean_ms, trusted = self.work_ms.mean(), self.prompts / max(self.prompts + guessed, 1.0)
        fixed, token, per_request, context, _ = step_costs(snapshot)
        step = context * snapshot.prices[PriceRow.HELD_TOKENS] + per_request * snapshot.prices[PriceRow.BATCH] + fixed
        chunk = token * snapshot.step_tokens
        expected_ms = mean_ms + (self.work_ms - mean_ms) * trusted
        slowdown: Milliseconds = np.minimum(expected_ms / lasted_ms, 1.0) * (chunk / (step + chunk))
        return slowdown


class PromptsToCome:
    """What this scheduler has placed of late on the instances of each model, and what that does to answers there."""

    def __init__(self) -> None:
        self._models: dict[str, _Prompts] = {}

    def placed(self, problem: PlacementProblem, row: int, work_ms: float) -> None:
        """A prompt goes to the instance in that row, which has `work_ms` of it to compute (`prompt_work_ms`)."""
        prompts = self._prompts_of(problem)
        prompts.work_ms[row] += work_ms
        prompts.prompts += 1

    def slowdown(self, problem: PlacementProblem) -> Milliseconds:
        """What an answer takes longer on each instance for the prompts to come, as a share of what it takes without.
        Up to `REFRESH_S` old."""
        return self._prompts_of(problem).slowdown

    def _prompts_of(self, problem: PlacementProblem) -> _Prompts:
        model = problem.snapshot.model
        prompts = self._models.get(model)
        if prompts is None:
            if len(self._models) >= MAX_MODELS:
                del self._models[next(iter(self._models))]
            prompts = self._models[model] = _Prompts(problem.snapshot.instances, problem.request.now_s)
        prompts.follow(problem.snapshot, problem.request.now_s)
        return prompts
