"""What prefill and decode on two instances cost a request, beside both on one.

Two worker processes with the simulated engine (or vLLM) and a client that follows the request as a frontend does.
Each prompt is new. Both phases on one instance are asked for as the scheduler asks for them, with that instance's own
name; the blocks that the workers report as moved show that nothing is transferred then.

    python -m benchmarks.disaggregation [--engine vllm] [--json OUT]
"""

import argparse
import asyncio
import itertools
import json
import random
import secrets
import statistics
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.migration_gap import CONTEXTS_TOKENS, MODEL, PROMPT_TOKEN_IDS, Client, worker_members
from mesh.membership import Member
from mesh.rpc.client import open_channel
from mesh.runtime import GrpcTransport
from penstock.v1 import request_pb2, worker_pb2, worker_pb2_grpc

PREFILL, DECODE = "a", "b"
TOKENS = 60


async def run(engine: str, contexts_tokens: Sequence[int], repeats: int) -> dict[str, Any]:
    """Rows by prompt length and by who decodes."""
    async with worker_members(engine, PREFILL, DECODE) as members, AsyncExitStack() as stack:
        stubs = {}
        for member in members:
            channel = await stack.enter_async_context(open_channel(GrpcTransport(), member.address))
            stubs[member.member_id] = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        client = Client(stubs)
        await client.connect()
        rows = []
        for context_tokens in contexts_tokens:
            for decode_id in (PREFILL, DECODE):
                rows.append(await measure(client, members, context_tokens, decode_id, repeats))
                print(json.dumps(rows[-1]))
        await client.close()
    return {"engine": engine, "tokens": TOKENS, "rows": rows}


async def measure(
    client: Client, members: Sequence[Member], prompt_tokens: int, decode_id: str, repeats: int
) -> dict[str, Any]:
    """Requests one after the other."""
    moved_before = await asyncio.to_thread(moved_blocks, members)
    timings, late = [], 0
    for _ in range(repeats):
        timings.append(await one_request(client, prompt_tokens, decode_id))
        late += client.owner != decode_id
    return {
        "prompt_tokens": prompt_tokens,
        "instances": 1 if decode_id == PREFILL else 2,
        "requests": repeats,
        "ttft_ms_median": round(statistics.median(ttft_ms for ttft_ms, _, _ in timings), 2),
        "median_token_gap_ms": round(statistics.median(gap_ms for _, gap_ms, _ in timings), 2),
        "longest_token_gap_ms_median": round(statistics.median(longest_ms for _, _, longest_ms in timings), 2),
        "not_moved_within_the_tokens": late,
        "moved_kv_blocks": await asyncio.to_thread(moved_blocks, members) - moved_before,
    }


async def one_request(client: Client, prompt_tokens: int, decode_id: str) -> tuple[float, float, float]:
    """(TTFT, median gap between tokens, longest gap), in ms."""
    salt = secrets.randbelow(2**31)
    request = request_pb2.GenerateRequest(
        request_id=f"r{salt}",
        prompt_token_ids=random.Random(salt).choices(PROMPT_TOKEN_IDS, k=prompt_tokens),
        model=MODEL,
        sampling=request_pb2.SamplingParams(max_tokens=4 * TOKENS, top_p=1, repetition_penalty=1, ignore_eos=True),
        decode_instance_id=decode_id,
    )
    started_s = time.perf_counter()
    await client.generate(PREFILL, request)
    await client.until_tokens(TOKENS)
    arrivals_s = client.arrivals_s[:TOKENS]
    abort = worker_pb2.AbortRequest(request_id=request.request_id)
    await client.calls[client.owner].write(worker_pb2.FrontendMessage(abort=abort))
    between_ms = [1000 * (after_s - before_s) for before_s, after_s in itertools.pairwise(arrivals_s)]
    return 1000 * (arrivals_s[0] - started_s), statistics.median(between_ms), max(between_ms)


def moved_blocks(members: Sequence[Member]) -> int:
    """KV blocks that came to any of the workers, since they started."""
    total = 0.0
    for member in members:
        with urllib.request.urlopen(f"http://{member.metrics_address}/metrics", timeout=10) as page:
            for family in text_string_to_metric_families(page.read().decode()):
                if family.name == "penstock_worker_migrated_kv_blocks":
                    total += sum(
                        sample.value
                        for sample in family.samples
                        if sample.name.endswith("_total") and sample.labels["direction"] == "in"
                    )
    return int(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(CONTEXTS_TOKENS), default="simulated")
    parser.add_argument("--contexts", help="tokens, comma-separated")
    parser.add_argument("--repeats", type=int, default=10, help="requests of each kind")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    contexts = arguments.contexts.split(",") if arguments.contexts else CONTEXTS_TOKENS[arguments.engine]
    result = asyncio.run(run(arguments.engine, [int(each) for each in contexts], arguments.repeats))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
