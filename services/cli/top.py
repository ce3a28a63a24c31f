"""`penstock top`: the mesh as it is now, in a terminal, once a second."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mesh.runtime import SystemClock
from services.cli.connection import AS_OPERATOR, mesh_directory, mesh_store, run, store_options
from services.cli.console.output import console_option, write_console
from services.cli.console.watched import MeshRecorder
from services.cli.finite_range import FiniteRange
from services.cli.report_output import check_writable
from services.frontend.console.collector import Collector
from services.frontend.console.recorded import Moments
from services.frontend.console.state import InstanceRow, Percentiles, ServiceRow, Severity, State
from services.frontend.console.stories import Stories
from services.frontend.console.view import View
from services.frontend.console.window import Objectives

LEAST_WIDTH: Final = 80
"""What every line fits into."""
PIPE_WIDTH: Final = 100
PIPE_HEIGHT: Final = 10_000
"""A pipe has no height: all instances are printed."""
SHOWN_FAULTS: Final = 4
SHOWN_MODELS: Final = 6
_STYLES: Final = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "default"}
_WELL: Final = frozenset({"ready", "starting", "draining"})


@click.command()
@click.option(
    "--interval",
    "interval_s",
    type=FiniteRange(0.2, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--count", type=click.IntRange(1), help="Looks to show; by default until Ctrl-C, and one into a pipe.")
@click.option("--slo-ttft-ms", type=FiniteRange(0, min_open=True), default=1000.0, show_default=True,
              help="Time to the first token that counts as well served.")  # fmt: skip
@click.option("--slo-tpot-ms", type=FiniteRange(0, min_open=True), default=100.0, show_default=True,
              help="The same for the mean time from one token to the next.")  # fmt: skip
@store_options
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each look.")
@console_option
def command(
    interval_s: float,
    count: int | None,
    slo_ttft_ms: float,
    slo_tpot_ms: float,
    store: str | None,
    mesh: str,
    as_json: bool,
    console_path: Path | None,
) -> None:
    """Watch a running mesh: faults, service by model with rates and percentiles, and the busiest instances.

    The same as in the console of every frontend. Rates are of the time between two looks, percentiles of the last five
    minutes. Ctrl-C ends it, and --console writes what was seen until then.
    """
    if console_path is not None:
        check_writable(console_path)
    is_terminal = sys.stdout.isatty() and not as_json
    looks = count if count is not None or is_terminal or console_path is not None else 1
    view = View(Objectives(slo_ttft_ms, slo_tpot_ms))
    recorder = None if console_path is None else MeshRecorder(moments=Moments(1000 * interval_s))
    try:
        run(_watch(store, mesh, interval_s, looks, view, recorder, as_json=as_json, is_terminal=is_terminal))
    except KeyboardInterrupt:
        pass  # how one leaves it
    finally:
        # Also when the mesh has gone: that is what one may want to see.
        if console_path is not None and recorder is not None and recorder.moments.states:
            write_console(console_path, f"mesh {mesh}", [recorder.encode(mesh, {})], is_simulated=False)


async def _watch(
    store: str | None,
    mesh: str,
    interval_s: float,
    looks: int | None,
    view: View,
    recorder: MeshRecorder | None,
    *,
    as_json: bool,
    is_terminal: bool,
) -> None:
    async with mesh_store(store, mesh) as opened, mesh_directory(opened) as directory:
        collector = Collector(directory, opened, AS_OPERATOR, SystemClock())
        stories = Stories(collector, SystemClock())
        try:
            view.add(await collector.look())  # a rate takes two looks
            with _shown(as_json=as_json, is_terminal=is_terminal) as show:
                while looks is None or looks > 0:
                    await asyncio.sleep(interval_s)
                    look = await collector.look()
                    state = view.add(look)
                    show(state)
                    if recorder is not None:
                        await recorder.add(look, state, stories)
                    looks = None if looks is None else looks - 1
        finally:
            await collector.stop()


@contextmanager
def _shown(*, as_json: bool, is_terminal: bool) -> Iterator[Any]:
    """What shows a state: a line of JSON, the whole screen, or lines for a pipe."""
    if as_json:
        yield lambda state: click.echo(json.dumps(as_plain(state)))
    elif is_terminal:
        with Live(console=Console(), screen=True, auto_refresh=False) as live:
            yield lambda state: live.update(
                screen(state, live.console.size.width, live.console.size.height), refresh=True
            )
    else:
        console = Console(width=PIPE_WIDTH)
        yield lambda state: console.print(screen(state, PIPE_WIDTH, PIPE_HEIGHT))


def as_plain(state: State) -> dict[str, Any]:
    """For `--json`: instances as objects, and of the charts the last point."""
    return {
        **msgspec.to_builtins(state.body),
        "instances": [msgspec.structs.asdict(row) for row in state.instances],
        "now": msgspec.structs.asdict(state.series[-1]),
    }


def screen(state: State, width: int, height: int) -> RenderableType:
    """The whole screen; no line is longer than `width`, which is 80 at least, and there are at most `height`."""
    body, parts = state.body, [_headline(state)]
    faults = [Text(f"{each.severity}: {each.what}", _STYLES[each.severity]) for each in body.faults[:SHOWN_FAULTS]]
    if len(body.faults) > SHOWN_FAULTS:
        faults.append(Text(f"and {len(body.faults) - SHOWN_FAULTS} more faults", "red"))
    for line in (*parts, *faults):
        line.no_wrap, line.overflow = True, "ellipsis"
    models = [*body.models[:SHOWN_MODELS]]
    left = height - len(faults) - len(models) - 8
    return Group(*parts, *faults, _models(models), *_instances(state.instances, max(1, left), width))


def _headline(state: State) -> Text:
    body, totals = state.body, state.body.totals
    at = datetime.fromtimestamp(body.at_unix_ms / 1000).strftime("%H:%M:%S")
    policy = "no policy known" if body.policy is None else body.policy.name
    kv = f"{totals.kv_used_blocks / totals.kv_blocks:.0%}" if totals.kv_blocks else "-"
    waiting = totals.waiting + totals.admission_queue
    return Text(
        f"{at} {policy}: {totals.ready}/{totals.instances} ready, {totals.running} running, {totals.queued} queued, "
        f"{waiting} waiting, KV {kv}\n"
        f"{totals.requests_s:g} requests/s, {totals.generated_s:,.0f} tokens/s out, {totals.prefilled_s:,.0f} in, "
        f"{_share(totals.cached_share)} of prompts cached"
    )


def _models(models: list[ServiceRow]) -> Table:
    table = _table("model", "req/s", "tok/s", "TTFT p50", "p95", "TPOT p50", "p95", "kept", "cached")
    for row in models:
        ttft, tpot = row.ttft_ms, row.tpot_ms
        table.add_row(
            row.name,
            f"{row.requests_s:.2f}",
            f"{row.generated_s:.0f}",
            *_pair(ttft),
            *_pair(tpot),
            _share(row.attained),
            _share(row.cached_share),
        )
    if not models:
        table.add_row("no request has ended yet")
    return table


def _instances(instances: tuple[InstanceRow, ...], lines: int, width: int) -> Iterator[RenderableType]:
    """The busiest ones, those that are not well first."""
    table = _table("instance", "state", "run", "queue", "prefill", "KV", "cached", "tok/s", "ms/tok")
    by_load = sorted(instances, key=lambda row: (row.state in _WELL, -row.running - row.queued, row.instance_id))
    for row in by_load[:lines]:
        kv = f"{row.kv_used_blocks / row.kv_blocks:.0%}" if row.kv_blocks > 0 else "-"
        table.add_row(
            row.instance_id,
            Text(row.state, "default" if row.state in _WELL else "bold red"),
            str(row.running),
            str(row.queued),
            str(row.queued_prefill_tokens),
            kv,
            _share(None if row.cached_share < 0 else row.cached_share),
            "-" if row.generated_s < 0 else f"{row.generated_s:.0f}",
            f"{row.token_interval_ms:.1f}" if row.token_interval_ms else "-",
        )
    yield table
    if len(by_load) > lines:
        yield Text(f"and {len(by_load) - lines} more instances; a higher terminal shows more")


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=True)
    table.add_column(first, no_wrap=True, overflow="ellipsis", ratio=1, min_width=12)
    for name in others:
        justify: Any = "left" if name == "state" else "right"
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
    return table


def _pair(measured: Percentiles) -> tuple[str, str]:
    return _ms(measured.p50), _ms(measured.p95)


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.1f} s" if value >= 10_000 else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
