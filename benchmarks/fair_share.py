"""What a tenant that asks for twenty times its share costs the others.

    python -m benchmarks.fair_share [--seeds 5] [--json OUT]

One simulated instance (an 8B model on an A100 by its data sheet, `simulator.cost.linear`), five tenants with equal
shares. Four of them offer a fixed part of their share each; the fifth offers twenty times its own. A share is a fifth
of what the instance sustains. Lengths are lognormal (prompts of 600 tokens in the median, answers of 150), arrivals
Poisson. TTFT of the four, from arrival to first token: without the fifth, with it, and with it under fair shares.
"""

import json
import math
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev

import click
import numpy as np

from controlplane.model.request import NO_TENANT, Tenant
from controlplane.policies.fair_share import GENERATED_WEIGHT, FairShare, turn_of
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.instance.counted_request import CountedRequest
from simulator.instance.instance import SimulatedInstance

TENANTS = 5
GREEDY = 0
TIMES = 20.0
"""What the greedy tenant offers, in shares."""
OFFERED = (0.5, 0.8)
"""What each of the others offers, in shares."""
STEPS = (2048, 512)
"""Token budgets of a step."""
WARM_UP_S = 30.0
T_97_5 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26}
"""Of Student's t by the number of seeds."""
KV_BLOCKS = 25_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a tenant."""

    at_s: float
    tenant: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """One load of the others: means over seeds, with half-widths of 95 % intervals."""

    step_tokens: int
    offered_shares: float
    p95_alone_ms: float
    p95_first_come_ms: float
    p95_fair_ms: float
    fair_over_alone: float
    fair_over_alone_half: float
    others_tokens_kept: float
    """Of the tokens that the others got without the greedy one in the same time, under fair shares."""
    greedy_tokens_per_s: float


@click.command()
@click.option("--seeds", type=click.IntRange(2), default=5, show_default=True)
@click.option("--duration-s", type=click.FloatRange(1), default=180.0, show_default=True, help="Of arrivals measured.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures here, too.")
def main(seeds: int, duration_s: float, json_path: Path | None) -> None:
    """Measure and print."""
    click.echo("step  others offer  P95 TTFT alone  first come  fair shares  over alone   tokens kept  greedy tokens/s")
    rows = []
    for step_tokens in STEPS:
        share_per_s = sustained(step_tokens) / TENANTS
        for offered in OFFERED:
            rows.append(row := measure(step_tokens, offered, share_per_s, seeds, duration_s))
            click.echo(
                f"{step_tokens:>4} {offered:>6.2f} shares {row.p95_alone_ms:>12.0f} ms {row.p95_first_come_ms:>8.0f} ms"
                f" {row.p95_fair_ms:>9.0f} ms  {row.fair_over_alone:.2f} +- {row.fair_over_alone_half:.2f}"
                f" {100 * row.others_tokens_kept:>10.1f} % {row.greedy_tokens_per_s:>15.0f}"
            )
    if json_path is not None:
        told = {"seeds": seeds, "duration_s": duration_s, "rows": [asdict(row) for row in rows]}
        json_path.write_text(json.dumps(told, indent=2) + "\n")


def measure(step_tokens: int, offered: float, share_per_s: float, seeds: int, duration_s: float) -> Row:
    """All three cases with the same arrivals, seed by seed."""
    alone: list[float] = []
    first_come: list[float] = []
    fair: list[float] = []
    kept: list[float] = []
    greedy: list[float] = []
    for seed in range(seeds):
        others = [
            arrival
            for tenant in range(1, TENANTS)
            for arrival in arrivals(tenant, offered * share_per_s, duration_s, seed)
        ]
        everybody = others + arrivals(GREEDY, TIMES * share_per_s, duration_s, seed)
        runs = [
            served(others, step_tokens, duration_s, is_fair=False),
            served(everybody, step_tokens, duration_s, is_fair=False),
            served(everybody, step_tokens, duration_s, is_fair=True),
        ]
        for into, run in zip((alone, first_come, fair), runs, strict=True):
            into.append(float(np.percentile([ms for tenant, ms in run.ttft_ms if tenant != GREEDY], 95)))
        kept.append(sum(runs[2].tokens[1:]) / sum(runs[0].tokens[1:]))
        greedy.append(runs[2].tokens[GREEDY] / duration_s)
    ratios = [one / other for one, other in zip(fair, alone, strict=True)]
    half = T_97_5.get(seeds, 2.0) * stdev(ratios) / math.sqrt(seeds)
    p95_ms = mean(alone), mean(first_come), mean(fair)
    return Row(step_tokens, offered, *p95_ms, mean(ratios), half, mean(kept), mean(greedy))


@dataclass(slots=True)
class Served:
    """What came of it."""

    ttft_ms: list[tuple[int, float]]
    """Tenant and time of each request that arrived after the warm-up; those never begun count until the end."""
    tokens: list[int]
    """Prompt and answer of requests that ended in time, by tenant."""


def served(requests: list[Arrival], step_tokens: int, duration_s: float, *, is_fair: bool) -> Served:
    """Serve by turns, or by arrival."""
    ordered = sorted(requests, key=lambda arrival: arrival.at_s)
    config = InstanceConfig(kv_blocks=KV_BLOCKS, max_step_tokens=step_tokens, max_queued_requests=1 << 20)
    instance, shares = SimulatedInstance(config, LinearCost()), FairShare()
    outcome = Served([], [0] * TENANTS)
    ends_ms = 1000 * (WARM_UP_S + duration_s)
    now_ms, coming = 0.0, 0
    begun: set[int] = set()

    def note(number: int, first_ms: float) -> None:
        arrival = ordered[number]
        if arrival.at_s >= WARM_UP_S:
            outcome.ttft_ms.append((arrival.tenant, first_ms - 1000 * arrival.at_s))

    while now_ms < ends_ms:
        while coming < len(ordered) and 1000 * ordered[coming].at_s <= now_ms:
            arrival, request_id = ordered[coming], str(coming)
            request = CountedRequest(request_id, arrival.prompt_tokens, arrival.output_tokens)
            tenant = Tenant(str(arrival.tenant)) if is_fair else NO_TENANT
            turn = turn_of(shares.enter(request_id, tenant, arrival.prompt_tokens))
            instance.submit(replace(request, turn=turn))
            coming += 1
        step = instance.plan_step(now_ms)
        if step is None:
            now_ms = 1000 * ordered[coming].at_s if coming < len(ordered) else ends_ms
            continue
        result = instance.finish_step(step)
        now_ms = step.ends_ms
        for started in result.started:
            number = int(started.request_id)
            shares.begin(started.request_id)
            if number not in begun:
                begun.add(number)
                note(number, now_ms)
        for request_id in result.finished:
            arrival = ordered[int(request_id)]
            shares.charge(request_id, GENERATED_WEIGHT * arrival.output_tokens)
            shares.leave(request_id)
            outcome.tokens[arrival.tenant] += arrival.prompt_tokens + arrival.output_tokens
    for number in range(coming):
        if number not in begun:
            note(number, ends_ms)
    return outcome


def arrivals(tenant: int, rate_per_s: float, duration_s: float, seed: int) -> list[Arrival]:
    """Of one tenant, the same for each seed whatever the others do."""
    chance = random.Random(f"{seed}-{tenant}")
    at_s, coming = chance.expovariate(rate_per_s), []
    while at_s < WARM_UP_S + duration_s:
        prompt, output = chance.lognormvariate(math.log(600), 0.9), chance.lognormvariate(math.log(150), 0.8)
        coming.append(Arrival(at_s, tenant, min(4000, 1 + int(prompt)), min(1500, 1 + int(output))))
        at_s += chance.expovariate(rate_per_s)
    return coming


def sustained(step_tokens: int) -> float:
    """Requests/s of the instance where there is always one more."""
    crowd = arrivals(1, 100.0, 60.0, 0)
    run = served(crowd, step_tokens, 60.0, is_fair=False)
    mean_tokens = mean(arrival.prompt_tokens + arrival.output_tokens for arrival in crowd)
    return sum(run.tokens) / (WARM_UP_S + 60.0) / mean_tokens


if __name__ == "__main__":
    main()
