"""The rescheduler's modes side by side on STAR's small cluster, in the simulator.

    python -m benchmarks.rescheduler_modes [--rates 0.17 0.23] [--eras 0.9 current] [--seeds 5] [--json OUT]

1 prefill and 3 decode instances (RTX 4090D, R1-Distill-Qwen-7B in 8 bit), ShareGPT lengths of STAR's table 2, each
drawn by itself. Means over seeds, with half of their 95 % interval; equal seeds have equal requests. What is in OUT
already is not run again.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from simulator.report.interval import half_interval
from simulator.reproductions.page import markdown_table
from simulator.reproductions.parallel import run_jobs
from simulator.reproductions.run import EngineEra
from simulator.reproductions.star.experiment import Experiment, Reschedules, Rival, run
from simulator.reproductions.star.lengths import SHAREGPT
from simulator.reproductions.star.setups import SMALL, SMALL_SLO

MODES: dict[str, Reschedules | Rival] = {
    "off": Reschedules.VLLM,
    "current": Reschedules.CURRENT,
    "predicted": Reschedules.PREDICTED,
    "trajectories": Rival.TRAJECTORIES,
    "trajectories from the start": Rival.TRAJECTORIES_FROM_START,
    "predicted oracle": Reschedules.ORACLE,
    "trajectories oracle": Rival.TRAJECTORIES_ORACLE,
}


class Figures(msgspec.Struct, frozen=True):
    """Of one run."""

    p99_tpot_ms: float
    goodput_req_s: float
    preemptions: int
    moved: int
    step_variance_ms2: float
    cpu_s: float


def main() -> None:
    """Print the table; with --json, keep every run's figures there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.17, 0.20, 0.23], help="requests per second")
    parser.add_argument(
        "--eras", nargs="+", default=list(EngineEra), choices=list(EngineEra), help="of vLLM's admission"
    )
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2000.0, help="in which requests arrive")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    wanted = {
        f"{era} {rate:g} {mode} #{seed}": Experiment(
            SMALL,
            SHAREGPT,
            MODES[mode],
            rate,
            arguments.seconds,
            SMALL_SLO,
            seed,
            engine_era=EngineEra(era),
            independent_lengths=True,
        )
        for seed in range(arguments.seeds)
        for era in arguments.eras
        for rate in arguments.rates
        for mode in arguments.modes
    }
    known: dict[str, Figures] = {}
    if arguments.json is not None and arguments.json.exists():
        known = msgspec.json.decode(arguments.json.read_bytes(), type=dict[str, Figures])
    missing = {name: experiment for name, experiment in wanted.items() if name not in known}
    batch = max(1, arguments.processes)
    for start in range(0, len(missing), batch):
        jobs: dict[str, Callable[[], Figures]] = {
            name: partial(measure, missing[name]) for name in list(missing)[start : start + batch]
        }
        known |= run_jobs(jobs, arguments.processes)
        if arguments.json is not None:
            arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(known), indent=1) + b"\n")
    header = (
        "vLLM's admission",
        "req/s",
        "mode",
        "P99 TPOT ms",
        "goodput req/s",
        "preemptions",
        "moved",
        "variance ms^2",
    )
    rows = []
    for era in arguments.eras:
        for rate in arguments.rates:
            for mode in arguments.modes:
                runs = [known[f"{era} {rate:g} {mode} #{seed}"] for seed in range(arguments.seeds)]
                rows.append((era, f"{rate:g}", mode, *_means(runs)))
    print(markdown_table(header, rows))


def measure(experiment: Experiment) -> Figures:
    """Simulate one mode on one seed's requests; times are simulated ones, but for `cpu_s` of the whole run."""
    result = run(experiment)
    return Figures(
        result.p99_tpot_ms,
        result.goodput_req_s,
        result.preemptions,
        result.moved,
        result.exec_variance_ms2,
        result.cpu_s,
    )


def _means(runs: list[Figures]) -> list[str]:
    tpot, goodput = [each.p99_tpot_ms for each in runs], [each.goodput_req_s for each in runs]
    shown = [
        f"{np.mean(tpot):.1f} +- {half_interval(tpot):.1f}",
        f"{np.mean(goodput):.4f} +- {half_interval(goodput):.4f}",
    ]
    counts = [np.mean([getattr(each, name) for each in runs]) for name in ("preemptions", "moved", "step_variance_ms2")]
    return [*shown, *(f"{count:.3g}" for count in counts)]


if __name__ == "__main__":
    main()
