"""Ask a stock vLLM server and a mesh the same, and print what differs:

    python -m tests.conformance --write docs/clients.md
    python -m tests.conformance --stock http://127.0.0.1:8100 --mesh http://127.0.0.1:8000 --case "chat: stop"

Without addresses it starts both, once for each model that the cases are about.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.clients.matrix import written_into
from tests.conformance.all_cases import CASES
from tests.conformance.answers import ask
from tests.conformance.case import Case
from tests.conformance.compare import differences
from tests.conformance.report import Outcome, page
from tests.conformance.servers import mesh_of_one, stock_server

BEGIN, END = "<!-- printed by tests/conformance -->", "<!-- end of conformance -->"


def compared(cases: Sequence[Case], stock_url: str, mesh_url: str) -> list[Outcome]:
    """Each case at both, one after the other, so that neither's batches change what a model says."""
    outcomes = []
    with httpx.Client(base_url=stock_url) as stock, httpx.Client(base_url=mesh_url) as mesh:
        for case in cases:
            outcomes.append(Outcome(case, tuple(differences(ask(stock, case), ask(mesh, case)))))
            if sys.stderr.isatty():
                print(f"\r{len(outcomes)} of {len(cases)}", end="", file=sys.stderr)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stock", help="a vLLM server that runs already")
    parser.add_argument("--mesh", help="a mesh that runs already")
    parser.add_argument("--case", action="append", help="only those whose name holds this; repeatable")
    parser.add_argument("--json", action="store_true", help="every difference of every case")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and its servers with it
    wanted = [case for case in CASES if options.case is None or any(each in case.name for each in options.case)]
    if not wanted:
        parser.error(f"no case has {' or '.join(options.case)} in its name")
    outcomes = []
    for name in dict.fromkeys(case.served for case in wanted):
        with tempfile.TemporaryDirectory(prefix="penstock-conformance-") as run_dir, ExitStack() as started:
            stock_url = options.stock or started.enter_context(stock_server(name, Path(run_dir)))
            mesh_url = options.mesh or started.enter_context(mesh_of_one(name, Path(run_dir)))
            outcomes += compared([case for case in wanted if case.served == name], stock_url, mesh_url)
    print(json.dumps([each.as_json() for each in outcomes]) if options.json else page(outcomes))
    if options.write is not None:
        options.write.write_text(written_into(options.write.read_text(), page(outcomes), BEGIN, END))
    return 1 if any(each.open for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
